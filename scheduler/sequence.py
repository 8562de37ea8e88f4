"""One request inside the engine: its tokens, where it stands, and what it has cost so far."""

from array import array
from collections.abc import Sequence as Tokens
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, Final

from scheduler.account import Account
from scheduler.block_pool import BlockContent
from scheduler.block_table import BlockTable
from scheduler.errors import InvalidPromptError
from scheduler.family import Family
from scheduler.output import FinishReason, SequenceStats
from scheduler.sampling_params import SamplingParams

if TYPE_CHECKING:
    from scheduler.beam_group import BeamGroup


# Stands in `Sequence.token_ids` for a token that is being drawn: no id is below 0.
PLACEHOLDER: Final = -1


class SequenceStatus(Enum):
    """Where a sequence stands.

                         admitted                     finished, failed
          add ─► WAITING ─────────► RUNNING ───────────────────────────► FINISHED
                    ▲                │  ▲                                    ▲
                    │    recompute   │  │                                    │ aborted, from
                    ├────────────────┘  │                                    │ any state
                    │                   │
                    │   swap            │ copied in
                    │    ┌──────────────┼─────────────┐
                    │    ▼              │             │
                    ├─ SWAPPING_OUT     └── SWAPPING_IN ──┐
                    │    │ copied out           ▲         │ copy is bad
         no memory  │    ▼                      │         ▼
                    │  SWAPPED ─────────────────┘      WAITING
                         room for it and one block more

    The three swap states are entered only where there is a CPU tier that takes victims. Where all its blocks lie in
    the tier it goes to already, a victim is SWAPPED at once, and one that comes back is admitted like any other.
    A WAITING one whose beginning lies in the CPU tier is SWAPPING_IN when it is admitted.
    """

    WAITING = auto()
    RUNNING = auto()
    SWAPPING_OUT = auto()
    SWAPPED = auto()
    SWAPPING_IN = auto()
    FINISHED = auto()


class Sequence:
    """A prompt and what has been generated after it.

    The scheduler's view of progress is two numbers; there are no phases:

        tokens     [0 ............ num_prompt_tokens ............ num_tokens)      all known ones
        computed   [0 ... num_computed_tokens)                                     those whose KV is in its blocks

    A step computes a chunk [num_computed_tokens, num_computed_tokens + n); where it reaches num_tokens, the next
    token is drawn and becomes known. A fresh prompt, a decode, a preempted sequence that comes back and one that
    another worker began are all the same case.

    While the step after the one that is being computed is decided (`lookahead`), that chunk counts as computed, and the
    token that it draws as known: its place is taken by a PLACEHOLDER, always the last token, until the outcome is here.

        tokens     [0 ................................ num_tokens - 1) PLACEHOLDER
        computed   [0 ... num_settled_tokens | num_in_flight_tokens)

    seq_id: unique among the unfinished sequences of a scheduler.
    generated_token_ids: not empty where an earlier run of this request was cut short; they count for max_tokens.
    seed: the resolved seed of its draws.
    priority: larger is more important.
    tenant, adapter, cache_salt: only sequences that agree in all three share cached prefixes.
    use_prefix_cache: it may find blocks of others, and they its own; if not, what it computes is known to nobody.
    family: those that share its prompt, if there are any; it joins them when a scheduler takes it on.
    arrival_s, deadline_s: seconds of the clock whose readings the scheduler is passed.

    Raises InvalidPromptError for a prompt without tokens, or with ids that don't fit 31 bits. (Whether an id
    is in the vocabulary is for those to check who know the vocabulary.)
    """

    __slots__ = (
        "__weakref__",
        "account",
        "adapter",
        "arrival_s",
        "beams",
        "block_hashes",
        "block_table",
        "cache_salt",
        "cpu_table",
        "deadline_s",
        "due_s",
        "family",
        "finish_reason",
        "first_scheduled_s",
        "first_token_s",
        "has_row",
        "is_damaged",
        "is_followed",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_decode_slots",
        "num_found_blocks",
        "num_in_flight_tokens",
        "num_passes",
        "num_preemptions",
        "num_promised_blocks",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "num_sealed_blocks",
        "num_swapped_tokens",
        "num_tokens_seen",
        "num_transfers",
        "num_written_blocks",
        "priority",
        "rank",
        "sampling",
        "sealed_name",
        "seed",
        "seq_id",
        "serial",
        "status",
        "swapped_bytes",
        "tenant",
        "token_ids",
        "use_prefix_cache",
        "written_content",
    )

    def __init__(
        self,
        seq_id: str,
        prompt_token_ids: Tokens[int],
        sampling: SamplingParams,
        *,
        seed: int = 0,
        generated_token_ids: Tokens[int] = (),
        priority: int = 0,
        tenant: str = "",
        adapter: str = "",
        cache_salt: str = "",
        use_prefix_cache: bool = True,
        family: Family | None = None,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        self.seq_id: Final = seq_id
        self.token_ids: Final = _as_array(seq_id, prompt_token_ids)
        self.token_ids.extend(_as_array(seq_id, generated_token_ids))
        self.num_prompt_tokens: Final = len(prompt_token_ids)
        if self.num_prompt_tokens == 0:
            raise InvalidPromptError(f"sequence {seq_id} has an empty prompt: give at least one token")
        self.sampling: Final = sampling
        self.seed: Final = seed
        self.priority: Final = priority
        self.tenant: Final = tenant
        self.adapter: Final = adapter
        self.cache_salt: Final = cache_salt
        self.use_prefix_cache: Final = use_prefix_cache
        self.family: Final = family
        self.arrival_s: Final = arrival_s
        self.deadline_s: Final = deadline_s

        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        # All are set by Scheduler.add: the order of arrival, where generation ends at the latest, and of a beam search
        # the beams, of which this is one. (The others' sequences are made by the group.)
        self.serial = 0
        self.max_num_tokens = 0
        self.beams: BeamGroup | None = None
        self.num_computed_tokens = 0
        # Of these the last ones, which a step computes whose outcome is not known yet, but was assumed.
        self.num_in_flight_tokens = 0
        # The most that was ever computed of it: what lies below and is computed again is the price of preemption.
        self.num_tokens_seen = 0
        # What the order among sequences goes by, smallest first: see `policy`.
        self.rank: Final = -priority
        self.due_s: Final = inf if deadline_s is None else deadline_s
        self.account = Account()
        # Whether the runner has a row for it.
        self.has_row = False
        # Its tokens up to here are decodes, one a step, of which nothing but the start changes: the prompt is computed,
        # its row has slots for them, and nobody else may hold the block that they lie in. 0 where that isn't so.
        self.num_decode_slots = 0
        # Blocks that it lacks for its known tokens and one block more; right while it runs and is served.
        self.num_promised_blocks = 0
        self.block_table: Final = BlockTable()
        # The prefix cache's notes: hashes of its full blocks, how many blocks it has sealed, the last one's name.
        self.block_hashes: Final[list[int]] = []
        self.num_sealed_blocks = 0
        # How many of its first blocks were found on the device when it was looked up last: a note.
        self.num_found_blocks = 0
        # None until it is first looked up; False where the cache takes samples and this is none.
        self.is_followed: bool | None = None
        self.sealed_name: int | None = None
        # While it is swapped or on its way: its blocks of the CPU tier, the tokens whose KV they hold, how many
        # transfers it waits for, and whether one of them has failed.
        self.cpu_table: Final = BlockTable()
        self.num_swapped_tokens = 0
        self.num_transfers = 0
        # Its first blocks that were seen in the CPU tier while it ran, and what the last of them holds, where that is
        # known: a note, they may have gone since.
        self.num_written_blocks = 0
        self.written_content: BlockContent | None = None
        self.is_damaged = False

        self.num_passes = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.swapped_bytes = 0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt, those of earlier runs included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_settled_tokens(self) -> int:
        """Computed tokens but for those in flight: what may be entered into a cache."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def has_placeholder(self) -> bool:
        """Whether its last token is being drawn, and so has no id yet."""
        return self.token_ids[-1] == PLACEHOLDER

    @property
    def generated_token_ids(self) -> list[int]:
        """A copy of the tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def is_new(self) -> bool:
        """Whether it has never lost its blocks to others."""
        return self.num_preemptions == 0

    @property
    def all_beams(self) -> "Tokens[Sequence]":
        """The beams that come and go with it; itself alone where it is no beam search."""
        return (self,) if self.beams is None else self.beams.beams

    @property
    def head(self) -> "Sequence":
        """The one that stands for it in the queues: itself, but for the other beams of a search."""
        return self if self.beams is None else self.beams.head

    @property
    def is_finished(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status is SequenceStatus.FINISHED

    def stats(self, now: float) -> SequenceStats:
        """What it has cost if it ends now."""
        return SequenceStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            swapped_bytes=self.swapped_bytes,
            arrival_s=self.arrival_s,
            first_scheduled_s=self.first_scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=now,
            num_saved_blocks=0 if self.beams is None else self.beams.num_saved_blocks,
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens "
            f"computed, {len(self.block_table)} blocks)"
        )


def _as_array(seq_id: str, token_ids: Tokens[int]) -> "array[int]":
    """Token ids in 4 bytes each: a list of Python integers takes up to nine times as much."""
    try:
        ids = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidPromptError(f"sequence {seq_id} holds something that is no token id: {error}") from error
    if ids and min(ids) < 0:
        raise InvalidPromptError(f"sequence {seq_id} holds token id {min(ids)}: token ids start at 0")
    return ids
