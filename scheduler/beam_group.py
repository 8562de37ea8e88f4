"""The live beams of one request: which blocks they share, and how they come back after a preemption."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

from scheduler.beam_blocks import num_held_blocks
from scheduler.beam_search import BeamSearch, Survivor, num_blocks_at_most, num_candidates
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import Candidate, Hypothesis
from scheduler.sequence import Sequence
from scheduler.stopping import end_tokens

# What a step is to compute: so many tokens of each of these beams.
Plan = list[tuple[Sequence, int]]


class BeamGroup:
    """Beams of one request. To the queues they are one: the head, the sequence that was added, stands for all.

        head    [ prompt | a b c ]──┐  all known tokens computed:      ┌─►[ prompt | a b c d ]   goes on in its place
        beam 1  [ prompt | a b x ]──┤  it stands, and has candidates ──┼─►[ prompt | a b c e ]   forked from the head
        beam 2  [ prompt | a y z ]──┘  when all stand, who survives    └─►[ prompt | a b x f ]

    All have as many known tokens. A beam that is not among the survivors lets go of its blocks, and its sequence, with
    its id, serves another beam; one that survives twice is forked: they share all blocks by reference, and whoever
    writes first to the last, half full one copies it.

    Admitted, preempted, swapped, aborted and ended is the head, and the others with it; only its status counts. After
    a recompute the head comes back first, and each of the others forks from that one before it with which it has
    most in common, as soon as that is computed: so no token that they share is computed twice.
    """

    __slots__ = ("_ends", "_num_made", "_roots", "beams", "candidates", "head", "num_candidates", "num_saved_blocks",
                 "search")  # fmt: skip

    def __init__(self, head: Sequence, eos_token_ids: frozenset[int]) -> None:
        sampling = head.sampling
        self.head = head
        # The likeliest first, but before the first token is chosen, when there is only the head.
        self.beams = [head]
        self.search = BeamSearch(
            sampling.beam_width,
            head.max_num_tokens - head.num_prompt_tokens,
            sampling.length_penalty,
            sampling.early_stopping,
        )
        self._ends = end_tokens(sampling, eos_token_ids)
        self.num_candidates = num_candidates(sampling.beam_width, len(self._ends))
        # Of those that stand, by id.
        self.candidates: dict[str, tuple[Candidate, ...]] = {}
        # The most blocks that sharing has saved among them at a time.
        self.num_saved_blocks = 0
        self._num_made = 0
        self._roots: dict[str, tuple[Sequence, int]] | None = None

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.beams)

    def __len__(self) -> int:
        return len(self.beams)

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The `n` best that were found so far, the best first."""
        return tuple(self.search.hypotheses[: self.head.sampling.n])

    @property
    def is_standing(self) -> bool:
        """Whether all known tokens of all beams are computed, so that the next ones can be chosen."""
        return len(self.candidates) == len(self.beams) and all(
            beam.num_computed_tokens == beam.num_tokens for beam in self.beams
        )

    def advance(self, kv: KVCacheManager, remove_row: Callable[[Sequence], None]) -> bool:
        """Choose the next beams from the candidates of those that stand, which are all; True once the search is done.

        `remove_row` is called for each whose row serves no longer.
        """
        beams = self.beams
        survivors = self.search.advance(
            [self.candidates[beam.seq_id] for beam in beams],
            [beam.token_ids[beam.num_prompt_tokens :] for beam in beams],
            self._ends.get,
        )
        self.candidates.clear()
        self._roots = None
        if self.search.is_done:
            return True
        self._replace(survivors, kv, remove_row)
        num_in_tables = sum([len(beam.block_table) for beam in self.beams])
        self.num_saved_blocks = max(self.num_saved_blocks, num_in_tables - num_held_blocks(self.beams))
        return False

    def _replace(self, survivors: list[Survivor], kv: KVCacheManager, remove_row: Callable[[Sequence], None]) -> None:
        """Make the survivors the beams, in their order."""
        parents = self.beams
        placed: dict[int, Sequence] = {}
        staying: set[int] = set()
        for index, survivor in enumerate(survivors):
            if survivor.parent not in staying:
                staying.add(survivor.parent)
                placed[index] = parents[survivor.parent]
        if self.head not in placed.values() and len(placed) == len(survivors):
            # Nobody is to be forked, and the head has no successor: it takes over the last one.
            del placed[len(survivors) - 1]
        kept = {beam.seq_id for beam in placed.values()}
        unused = [beam for beam in self._in_order() if beam.seq_id not in kept]
        num_tokens = self.head.num_tokens
        for index, survivor in enumerate(survivors):
            if index not in placed:
                target = unused.pop(0) if unused else self._new_beam()
                remove_row(target)
                self._fork(parents[survivor.parent], target, kv)
                placed[index] = target
        for beam in unused:
            remove_row(beam)
            kv.free(beam)
        for index, survivor in enumerate(survivors):
            placed[index].token_ids.append(survivor.token_id)
        self.beams = [placed[index] for index in range(len(survivors))]
        assert {beam.num_tokens for beam in self.beams} == {num_tokens + 1}, f"{self.beams} differ in length"

    @staticmethod
    def _fork(parent: Sequence, child: Sequence, kv: KVCacheManager) -> None:
        """Make `child` what `parent` is, whatever it was before."""
        del child.token_ids[child.num_prompt_tokens :]
        child.token_ids.extend(parent.token_ids[parent.num_prompt_tokens :])
        kv.share(parent, child)

    def _new_beam(self) -> Sequence:
        head = self.head
        self._num_made += 1
        beam = Sequence(
            f"{head.seq_id}/{self._num_made}",
            head.token_ids[: head.num_prompt_tokens],
            head.sampling,
            priority=head.priority,
            tenant=head.tenant,
            adapter=head.adapter,
            cache_salt=head.cache_salt,
            use_prefix_cache=head.use_prefix_cache,
            arrival_s=head.arrival_s,
        )
        beam.beams, beam.status, beam.account = self, head.status, head.account
        beam.serial, beam.max_num_tokens, beam.num_preemptions = head.serial, head.max_num_tokens, head.num_preemptions
        return beam

    def plan(self, kv: KVCacheManager, num_tokens_left: int, num_behind: int) -> Plan:
        """The next chunk of each beam that can have one now, out of what is left of the step's budget.

        A decode takes a token; other chunks leave one to each of the `num_behind` others. A beam that has lost its
        blocks, and whose root is computed, forks from it here: that takes no block.
        """
        plan: Plan = []
        for beam in self._in_order():
            if num_tokens_left == 0:
                break
            if beam is not self.head and len(beam.block_table) == 0:
                source, num_common = self._root_of(beam)
                if source.num_computed_tokens < num_common:
                    continue
                kv.fork(source, beam, num_common)
            num_tokens = beam.num_tokens - beam.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, max(1, num_tokens_left - num_behind))
            if num_tokens > 0:
                plan.append((beam, num_tokens))
                num_tokens_left -= num_tokens
        return plan

    def num_future_blocks(self, kv: KVCacheManager, num_spare: int) -> int:
        """Blocks that all lack for the tokens they have, and `num_spare` more for each that there may be.

        No more than they may ever hold.
        """
        head, width = self.head, self.search.width
        num_lacking = sum([self._num_lacking_blocks(beam, kv) for beam in self.beams])
        at_most = num_blocks_at_most(head.num_prompt_tokens, head.max_num_tokens - 1, width, kv.block_size)
        return min(num_lacking + width * num_spare, at_most - num_held_blocks(self.beams))

    def _num_lacking_blocks(self, beam: Sequence, kv: KVCacheManager) -> int:
        num_blocks = kv.num_blocks_for(beam.num_tokens)
        if len(beam.block_table) > 0:
            return num_blocks - len(beam.block_table) + kv.must_copy(beam)
        if beam is self.head:
            return num_blocks
        return num_blocks - self._root_of(beam)[1] // kv.block_size

    @property
    def num_distinct_tokens(self) -> int:
        """Tokens that would be computed if all came back without any block."""
        num_each = self.head.num_tokens
        return num_each + sum([num_each - self._root_of(beam)[1] for beam in self.beams if beam is not self.head])

    def _in_order(self) -> list[Sequence]:
        """As they come back: the head first."""
        return [self.head, *[beam for beam in self.beams if beam is not self.head]]

    def _root_of(self, beam: Sequence) -> tuple[Sequence, int]:
        """The one that comes back before `beam` and has most of its first tokens, and how many."""
        if self._roots is None:
            order = self._in_order()
            self._roots = {
                each.seq_id: max(
                    ((other, _num_common(each, other)) for other in order[:index]), key=lambda found: found[1]
                )
                for index, each in enumerate(order)
                if index > 0
            }
        return self._roots[beam.seq_id]


def num_new_blocks(plan: Plan, kv: KVCacheManager) -> int:
    """Free blocks that allocating all of a plan takes.

    Of those that write to one block the last may keep it, if nobody else holds it or finds it by its content.
    """
    num_new = 0
    writers: Counter[int] = Counter()
    for beam, num_tokens in plan:
        num_new += kv.num_blocks_for(beam.num_computed_tokens + num_tokens) - len(beam.block_table)
        if kv.must_copy(beam):
            writers[beam.block_table[beam.num_computed_tokens // kv.block_size].block_id] += 1
    for block_id, num_writers in writers.items():
        is_found = kv.pool.blocks[block_id].content is not None
        num_new += num_writers if is_found else min(num_writers, kv.num_holders(block_id) - 1)
    return num_new


def _num_common(one: Sequence, other: Sequence) -> int:
    """How many first tokens two beams have in common."""
    start, end = one.num_prompt_tokens, min(one.num_tokens, other.num_tokens)
    differs = bisect_left(
        range(start + 1, end + 1), True, key=lambda length: one.token_ids[start:length] != other.token_ids[start:length]
    )
    return start + differs
