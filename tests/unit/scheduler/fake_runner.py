"""Plays the model runner for the scheduler's tests: strict about what it is told, and with a memory.

Its KV memory keeps, in each slot, a fingerprint of all tokens up to that position. Before a token is drawn, every
slot of the sequence must hold the fingerprint of its own prefix: a block that was freed too early, shared wrongly or
served to another prompt shows at once. Its model draws the next token from the fingerprint, so what a sequence should
generate can be told without any scheduler.

Its copies between the tiers end in the step in which they begin, or any number of steps later, as `CopyFaults` says.
Until a copy ends it may have been made already or not yet, which makes both reading its source too late and writing
its target too early show.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from zlib import crc32

from scheduler import (
    ModelRunnerOutput,
    SamplingParams,
    Scheduler,
    SchedulerOutput,
    Sequence,
    SequenceOutput,
    Transfer,
    TransferResult,
)
from scheduler.beam_search import BeamSearch, num_candidates
from scheduler.invariants import check
from scheduler.output import Candidate, Hypothesis
from scheduler.sequence import PLACEHOLDER
from scheduler.stopping import end_tokens

VOCAB_SIZE = 50


def fingerprint(root: str, token_ids: Iterable[int]) -> list[int]:
    """Of each prefix of `token_ids`, the empty one first."""
    prints = [crc32(root.encode())]
    for token_id in token_ids:
        prints.append(hash((prints[-1], token_id)))
    return prints


def draw(print_: int) -> int:
    """The token that the made-up model generates after a prefix."""
    return print_ % VOCAB_SIZE


def generate(root: str, token_ids: Iterable[int], num_tokens: int) -> list[int]:
    """What the made-up model generates for a prompt, computed on its own."""
    print_ = fingerprint(root, token_ids)[-1]
    generated = []
    for _ in range(num_tokens):
        generated.append(draw(print_))
        print_ = hash((print_, generated[-1]))
    return generated


def candidates(print_: int, num: int) -> tuple[Candidate, ...]:
    """What a beam may go on with after a prefix, by the made-up model: as good as never two equally likely."""
    made = [Candidate(token, -(hash((print_, token, 1)) % 100_003) / 30_000) for token in range(VOCAB_SIZE)]
    return tuple(sorted(made, key=lambda candidate: -candidate.logprob)[:num])


def search(
    root: str, prompt: list[int], sampling: SamplingParams, max_tokens: int, eos_token_ids: frozenset[int]
) -> list[Hypothesis]:
    """What beam search over the made-up model finds for a prompt, on its own."""
    ends = end_tokens(sampling, eos_token_ids)
    made = BeamSearch(sampling.beam_width, max_tokens, sampling.length_penalty, sampling.early_stopping)
    beams: list[list[int]] = [[]]
    while not made.is_done:
        last = [fingerprint(root, prompt + beam)[-1] for beam in beams]
        each = [candidates(print_, num_candidates(sampling.beam_width, len(ends))) for print_ in last]
        beams = [[*beams[next_.parent], next_.token_id] for next_ in made.advance(each, beams, ends.get)]
    return made.hypotheses[: sampling.n]


@dataclass
class Row:
    """What the runner keeps of one sequence."""

    prints: list[int]
    block_ids: list[int]
    num_candidates: int
    num_computed_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prints) - 1


@dataclass
class CopyFaults:
    """How copies go: each ends after up to `max_delay` steps, and may fail. `hold` keeps those from ending that it
    is true for.
    """

    rng: Random = field(default_factory=lambda: Random(0))
    max_delay: int = 0
    p_damaged: float = 0.0
    p_no_memory: float = 0.0
    hold: Callable[[Transfer], bool] = lambda transfer: False


@dataclass
class Copying:
    """A transfer that has not ended."""

    transfer: Transfer
    is_out: bool
    ends_in: int
    is_early: bool


class FakeRunner:
    """Executes steps. `root_of` gives what a sequence's KV depends on beside its tokens (its adapter, say)."""

    def __init__(
        self, block_size: int, root_of: Callable[[str], str] = lambda seq_id: "", faults: CopyFaults | None = None
    ) -> None:
        self.block_size = block_size
        self.rows: dict[str, Row] = {}
        self.num_tokens = 0
        self.faults = faults or CopyFaults()
        self.copying: list[Copying] = []
        self.num_failed: Counter[str] = Counter()
        self._root_of = root_of
        self._memory: dict[tuple[int, int], int] = {}
        self._cpu_memory: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput, failing: dict[str, str] | None = None) -> ModelRunnerOutput:
        """Do a step as the order in SchedulerOutput's docstring says; `failing` rows draw no token."""
        failing = failing or {}
        for seq_id in output.removed_ids:
            del self.rows[seq_id]
        for new in output.new_rows:
            assert new.seq_id not in self.rows, f"{new.seq_id} is new, but has a row"
            assert PLACEHOLDER not in new.token_ids, f"{new.seq_id} is new, but its last token is being drawn"
            prints = fingerprint(self._root_of(new.seq_id), new.token_ids)
            self.rows[new.seq_id] = Row(prints, list(new.block_ids), new.num_candidates)
        for chosen in output.row_tokens:
            row = self.rows[chosen.seq_id]
            assert row.num_candidates, f"{chosen} is no beam's"
            assert chosen.position == row.num_tokens - 1, f"{chosen} of a row with {row.num_tokens} tokens"
            row.prints[-1] = hash((row.prints[-2], chosen.token_id))
        for new_blocks in output.new_blocks:
            assert new_blocks.block_ids, f"{new_blocks} brings no blocks"
            self.rows[new_blocks.seq_id].block_ids += new_blocks.block_ids
        self._begin_copies(output)
        self._copy_on_write(output)
        targets = {copy.dst for copying in self.copying if not copying.is_out for copy in copying.transfer.copies}
        written: set[tuple[int, int]] = set()
        sampled, found = {}, {}
        chunks = output.chunks
        for seq_id, start, count, is_sampled in zip(
            chunks.seq_ids, chunks.starts, chunks.num_tokens, chunks.is_sampled, strict=True
        ):
            row = self.rows[seq_id]
            end = start + count
            chunk = f"chunk [{start}, {end}) of {seq_id}"
            assert row.num_computed_tokens in (None, start), f"{chunk} of {row} leaves a gap"
            assert count >= 1
            assert 0 <= len(row.block_ids) * self.block_size - end < self.block_size, f"{chunk} has {row.block_ids}"
            for position in range(start, end):
                slot = self._slot(row, position)
                assert slot not in written, f"{slot} is written twice in step {output.step}"
                assert slot[0] not in targets, f"{slot} is written while a copy into it is on its way"
                written.add(slot)
                self._memory[slot] = row.prints[position + 1]
            row.num_computed_tokens = end
            self.num_tokens += count
            assert is_sampled == (end == row.num_tokens), f"{chunk} of a row with {row.num_tokens} tokens"
        for seq_id in chunks.sampled_ids:
            if seq_id not in failing:
                row = self.rows[seq_id]
                self._verify(seq_id, row)
                sampled[seq_id] = draw(row.prints[-1])
                if row.num_candidates:
                    found[seq_id] = candidates(row.prints[-1], row.num_candidates)
                row.prints.append(hash((row.prints[-1], sampled[seq_id])))
            elif seq_id in self.rows:  # the next step may have a chunk of it already, for nothing
                self.rows[seq_id].prints.append(PLACEHOLDER)
        assert len(set(chunks.seq_ids)) == len(chunks), "a sequence has two chunks"
        return ModelRunnerOutput(sampled, failing, self._end_copies(), candidates=found)

    def _begin_copies(self, output: SchedulerOutput) -> None:
        rng = self.faults.rng
        for is_out, transfers in ((True, output.swap_outs), (False, output.swap_ins)):
            for transfer in transfers:
                assert transfer.copies, f"{transfer} copies nothing"
                copying = Copying(transfer, is_out, rng.randint(0, self.faults.max_delay), rng.random() < 0.5)
                self.copying.append(copying)
                self._move(copying, is_made=copying.is_early)

    def _copy_on_write(self, output: SchedulerOutput) -> None:
        sources = {copy.src for copy in output.block_copies}
        targets = [copy.dst for copy in output.block_copies]
        assert len(set(targets)) == len(targets), f"a block is the target of two of {output.block_copies}"
        assert not sources & set(targets), f"a block is source and target in {output.block_copies}"
        moving = {copy.dst for copying in self.copying if not copying.is_out for copy in copying.transfer.copies}
        assert not moving & {*sources, *targets}, "a block is copied on the device while it is being swapped in"
        for copy in output.block_copies:
            held = [self._memory.get((copy.src, slot)) for slot in range(self.block_size)]
            self._write(self._memory, copy.dst, held)

    def _end_copies(self) -> tuple[TransferResult, ...]:
        """End those whose time has come, in a random order."""
        rng, results = self.faults.rng, []
        rng.shuffle(self.copying)
        for copying in list(self.copying):
            copying.ends_in -= 1
            if copying.ends_in >= 0 or self.faults.hold(copying.transfer):
                continue
            self.copying.remove(copying)
            if not copying.is_early:
                self._move(copying, is_made=True)
            p_failed = self.faults.p_no_memory if copying.is_out else self.faults.p_damaged
            failed = [copy.dst for copy in copying.transfer.copies if rng.random() < p_failed]
            self.num_failed["no memory" if copying.is_out else "damaged"] += len(failed)
            for block_id in failed:
                self._write(self._cpu_memory if copying.is_out else self._memory, block_id, [None] * self.block_size)
            results.append(TransferResult(copying.transfer.transfer_id, tuple(failed)))
        return tuple(results)

    def _move(self, copying: Copying, *, is_made: bool) -> None:
        """Copy all blocks, or, not yet, leave nothing readable where they will be."""
        source, target = (self._memory, self._cpu_memory) if copying.is_out else (self._cpu_memory, self._memory)
        for copy in copying.transfer.copies:
            slots = range(self.block_size)
            held = [source.get((copy.src, slot)) if is_made else None for slot in slots]
            self._write(target, copy.dst, held)

    def _write(self, memory: dict[tuple[int, int], int], block_id: int, held: list[int | None]) -> None:
        for slot, print_ in enumerate(held):
            if print_ is None:
                memory.pop((block_id, slot), None)
            else:
                memory[block_id, slot] = print_

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // self.block_size], position % self.block_size

    def _verify(self, seq_id: str, row: Row) -> None:
        for position in range(row.num_tokens):
            held = self._memory.get(self._slot(row, position))
            assert held == row.prints[position + 1], f"{seq_id} reads somebody else's KV at position {position}"


class Lookahead(Enum):
    """When the next step is decided and begun."""

    OFF = auto()
    PLANNED = auto()  # decided while this one is computed, begun when its outcome is known: as on the CPU
    LAUNCHED = auto()  # begun, too, before the outcome is known: as on a GPU


class Driver:
    """A scheduler, a runner and a clock of one second a step, stepped with all invariants checked.

    Of that second computing takes `step_s`. With a lookahead a call of `step` ends the oldest step in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        root_of: Callable[[str], str] = lambda seq_id: "",
        faults: CopyFaults | None = None,
        lookahead: Lookahead = Lookahead.OFF,
    ) -> None:
        self.scheduler = scheduler
        self.lookahead = lookahead
        self.num_looked_ahead = 0
        self.num_wasted_rows = 0
        self._in_flight: tuple[SchedulerOutput, ModelRunnerOutput] | None = None
        self.runner = FakeRunner(scheduler.kv.block_size, root_of, faults)
        self.now = 0.0
        self.step_s = 0.0
        self.generated: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}
        self.last_output: SchedulerOutput | None = None

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)
            self.generated[seq.seq_id] = []

    def step(
        self, failing: dict[str, str] | None = None, between: Callable[[SchedulerOutput], None] | None = None
    ) -> list[SequenceOutput]:
        """One step; `between` is called after a step was scheduled and before the next update()."""
        scheduler, between = self.scheduler, between or (lambda output: None)
        self.now += 1
        if self._in_flight is None:
            output = self._checked(scheduler.schedule(self.now))
            runner_output = self.runner.execute(output, failing)
            between(output)
            check(scheduler)
            ahead = self._try_schedule_ahead()
        else:
            output, runner_output = self._in_flight
            ahead = self._try_schedule_ahead()
            if ahead is not None:
                between(ahead)
        self._in_flight = None
        if ahead is not None and self.lookahead is Lookahead.LAUNCHED:
            self._in_flight = ahead, self.runner.execute(ahead, failing)
        outputs = scheduler.update(output, runner_output, self.now + self.step_s)
        check(scheduler)
        if ahead is not None and self.lookahead is Lookahead.PLANNED:
            num_chunks, ahead = len(ahead.chunks), scheduler.without_ended(ahead)
            self.num_wasted_rows += num_chunks - len(ahead.chunks)
            self._in_flight = ahead, self.runner.execute(ahead, failing)
        elif ahead is not None:
            alive = {seq.seq_id for seq in scheduler.running} | scheduler.ending.keys()
            self.num_wasted_rows += len(set(ahead.chunks.seq_ids) - alive)
        for seq_output in outputs:
            assert seq_output.seq_id not in self.ends, f"{seq_output.seq_id} speaks after its end"
            self.generated[seq_output.seq_id] += seq_output.new_token_ids
            if seq_output.finish_reason is not None:
                self.ends[seq_output.seq_id] = seq_output
        return outputs

    @property
    def is_in_flight(self) -> bool:
        """Whether a step is being computed between two calls of `step`."""
        return self._in_flight is not None

    def _try_schedule_ahead(self) -> SchedulerOutput | None:
        if self.lookahead is Lookahead.OFF:
            return None
        ahead = self.scheduler.try_schedule_ahead(self.now)
        check(self.scheduler)
        if ahead is None:
            return None
        self.num_looked_ahead += 1
        return self._checked(ahead)

    def _checked(self, output: SchedulerOutput) -> SchedulerOutput:
        scheduler, self.last_output = self.scheduler, output
        check(scheduler)
        assert output.num_tokens <= scheduler.config.max_num_batched_tokens
        is_idle = not (output.chunks or scheduler.kv.has_transfers)
        assert not is_idle or not (scheduler.running or scheduler.waiting), "a step with work computes nothing"
        return output

    def run(self, max_steps: int = 10_000) -> int:
        """Step until there is no work left; the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                assert not self.runner.rows, f"the runner still has {list(self.runner.rows)}"
                return num_steps
            self.step()
        raise AssertionError(f"there is work left after {max_steps} steps")

    def num_tokens_by_id(self) -> dict[str, int]:
        """What the last step computed, in its order."""
        assert self.last_output is not None
        return dict(zip(self.last_output.chunks.seq_ids, self.last_output.chunks.num_tokens, strict=True))

    def num_blocks_by_id(self) -> dict[str, int]:
        """Blocks held now, best protected first."""
        return {seq.seq_id: len(seq.block_table) for seq in self.scheduler.running}
