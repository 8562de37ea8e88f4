"""The data that passes between the scheduler, the model runner and the engine.

schedule() -> SchedulerOutput -> ModelRunner.execute() -> ModelRunnerOutput -> update() -> [SequenceOutput]
"""

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress
from typing import Final, NamedTuple

from scheduler.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. The wire calls the first three by these names.

    No SequenceOutput says ABORTED: whoever aborts a sequence knows, and hears no more of it. DEADLINE: its time was
    up, or would have been before its next token.
    """

    STOP = "stop"
    EOS = "eos"
    LENGTH = "length"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    ERROR = "error"


class NewRow(NamedTuple):
    """A sequence that enters the runner's input batch: new, or back after a preemption.

    `token_ids` are all known tokens (prompt and generated so far); `block_ids` all its physical blocks in
    logical order, those for this step's chunk included. `num_candidates` are wanted of a beam, 0 of others.
    """

    seq_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: tuple[int, ...]
    num_candidates: int = 0


@dataclass(frozen=True, slots=True)
class Chunks:
    """The tokens that a step computes: a chunk of each of its sequences, in columns of equal length.

        seq_ids      "a"    "b"    "c"
        starts       40     0      16       the chunk is positions [start, start + num_tokens) of the sequence
        num_tokens   1      30     16
        is_sampled   True   True   False    it reaches the last known token, so the next one is drawn from its last
                                            logits row

    In columns, since nearly all chunks are one token of a decode: with hundreds of sequences, to make an object for
    each costs more than to decide the step.
    """

    seq_ids: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    is_sampled: tuple[bool, ...] = ()

    @property
    def sampled_ids(self) -> list[str]:
        """The sequences whose next token is drawn, in order."""
        return list(compress(self.seq_ids, self.is_sampled))

    def part(self, start: int, end: int) -> "Chunks":
        """Chunks [start, end) of them."""
        cut = slice(start, end)
        return Chunks(self.seq_ids[cut], self.starts[cut], self.num_tokens[cut], self.is_sampled[cut])

    def __len__(self) -> int:
        return len(self.seq_ids)


NO_CHUNKS: Final = Chunks()


class NewBlocks(NamedTuple):
    """The blocks to be appended to the row of a sequence, which the runner has already."""

    seq_id: str
    block_ids: tuple[int, ...]


class RowToken(NamedTuple):
    """The token at `position` of a row is `token_id`, whatever was drawn: the scheduler has chosen it, for a beam."""

    seq_id: str
    position: int
    token_id: int


class BlockCopy(NamedTuple):
    """Copy block `src` to block `dst`; which tier each lies on is said by the list that holds it."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies between the tiers that belong together. The runner tells when they are done, under `transfer_id`."""

    transfer_id: int
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A transfer has ended: nobody reads its sources or writes to its targets any more.

    `failed_dst` are the targets that don't hold what was to be copied: there was no memory for them (swapping out),
    or their checksum is not the one taken when they were swapped out (swapping in).
    """

    transfer_id: int
    failed_dst: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, in the order in which the runner does it.

    1. drop the rows `removed_ids` (finished, aborted or preempted); 2. make `new_rows`, and put `row_tokens` into and
    append `new_blocks` to the others; 3. begin the copies: `swap_outs` (device to CPU), `swap_ins` (CPU to device), and
    do `block_copies` (device to device, copy-on-write); 4. compute `chunks`.

    A transfer may end in this step or in any later one. Until its end is reported no chunk touches its blocks on
    either side, but for reading what is shared and full.
    """

    step: int
    chunks: Chunks = NO_CHUNKS
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    removed_ids: tuple[str, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[Transfer, ...] = ()
    swap_ins: tuple[Transfer, ...] = ()
    row_tokens: tuple[RowToken, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(self.chunks.num_tokens)

    @property
    def num_swapped_blocks(self) -> tuple[int, int]:
        """Blocks that this step begins to copy to the CPU tier, and back."""
        outs = sum([len(transfer.copies) for transfer in self.swap_outs])
        return outs, sum([len(transfer.copies) for transfer in self.swap_ins])


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that a beam may go on with, and its log probability, by the model's raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The token drawn for each sampled chunk, by sequence id.

    `failed` names sequences that can't go on, with the reason: their logits held no number to choose from (all NaN or
    -inf), or, those in `out_of_memory_ids`, there was no memory for them even alone.
    `logprobs` has the log probability of each token whose sequence chooses by it, by the model's raw logits.
    `transfers` are those that have ended since the last step, whichever step they began in.
    `num_splits`: how often memory ran out in this step, so that it was computed in parts.
    `candidates` of each sampled beam, the likeliest first. (`sampled` has the likeliest, which nobody follows.)
    """

    sampled: dict[str, int]
    failed: dict[str, str] = field(default_factory=dict)
    transfers: tuple[TransferResult, ...] = ()
    out_of_memory_ids: frozenset[str] = frozenset()
    num_splits: int = 0
    logprobs: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """What one sequence cost, told when it ends. Times are seconds of the clock that the caller passes in.

    `swapped_bytes` counts both ways. `num_saved_blocks` are the most blocks that the beams of a search saved at a time.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    swapped_bytes: int
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_saved_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A reply that a beam search has found.

    `logprob` is the sum over its tokens, the one that ended it included; `score` is that, divided by its length to the
    power of the length penalty.
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


class SequenceOutput(NamedTuple):
    """New tokens of one sequence after a step; `stats` comes with a finish reason and not before.

    A tuple, since a step makes hundreds of them, and a frozen dataclass takes several times as long to make.

    `error` is the reason of FinishReason.ERROR; `is_out_of_memory`: the same request may well succeed later.
    `logprob` is that of the new tokens, where its request chooses by it.
    A beam search tells no new tokens, but at its end `hypotheses`, the best first, and the best one's finish reason.
    """

    seq_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: SequenceStats | None = None
    is_out_of_memory: bool = False
    logprob: float | None = None
    hypotheses: tuple[Hypothesis, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics and dashboards.

    Each block is owned by sequences, or free and holding nothing (`num_free_blocks`), or free and still holding a
    prefix that can be hit (`num_cached_blocks`); the last two can both be handed out. KV use is
    `num_filled_slots` of `num_allocated_slots`. `num_swapped` are the sequences that lie in the CPU tier or are on
    their way there or back; `num_transfers` the copies on their way.

    The counters from `num_preemptions_recompute` on only grow. `num_missing_blocks` are the blocks that allocation
    found missing for running sequences, summed over steps; `num_full_tier_recomputes` the preemptions that would have
    swapped, had the CPU tier had room; `num_damaged_blocks` were found with a wrong checksum, and recomputed;
    `num_written_behind_blocks` were copied to the CPU tier before anybody was preempted, and are not among the swapped;
    `prefix_tier_hit_tokens` were found in the CPU tier, and are hits like the others;
    `num_step_splits` are the times that memory ran out in a step, so that it was computed in parts.
    `num_overdue` are the sequences that were dropped for their deadline.

    `num_allowed_seqs` may run at present: `max_num_seqs`, or what the target of the time between tokens allows.

    `num_saved_blocks` are the blocks that sharing saves now: so many more were taken if each sequence had its own.
    `num_forks` and `num_copied_blocks` (copied before a write, since others hold them too) only grow.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_filled_slots: int
    num_allocated_slots: int
    num_preemptions_recompute: int
    num_preemptions_swap: int
    num_recomputed_tokens: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    num_missing_blocks: int = 0
    num_full_tier_recomputes: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    num_damaged_blocks: int = 0
    num_cpu_blocks: int = 0
    num_used_cpu_blocks: int = 0
    num_transfers: int = 0
    num_step_splits: int = 0
    num_written_behind_blocks: int = 0
    written_behind_bytes: int = 0
    prefix_tier_hit_tokens: int = 0
    num_overdue: int = 0
    num_allowed_seqs: int = 0
    num_saved_blocks: int = 0
    num_forks: int = 0
    num_copied_blocks: int = 0
