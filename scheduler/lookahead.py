"""The next step, decided while this one is computed and before anybody knows what it brings."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import compress

from scheduler.deadlines import Deadlines
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.output import Chunks, SchedulerOutput
from scheduler.queues import Queues
from scheduler.sequence import PLACEHOLDER, Sequence, SequenceStatus
from scheduler.step_adder import StepAdder


class Wait(StrEnum):
    """Why a step can't be decided before the outcome of the one before it is known."""

    NOTHING_COMPUTED = "the step computes nothing: it waits for copies, and their end decides"
    BEAMS = "a beam search chooses its next beams by what was found of all of them"
    FAMILY = "choices of one prompt fork from what a step has computed, and copy blocks before they write"
    DEADLINE = "a deadline has come: the token that is being drawn is still told before the end"
    LAST_TOKENS = "all that run are at their last token: who comes next takes their blocks"
    BLOCKS = "blocks may run out, and who has to give way depends on who has ended"


@dataclass(slots=True)
class StepInFlight:
    """A step that was scheduled and not updated: `seqs` are those of its chunks, in their order."""

    step: int
    seqs: list[Sequence]
    chunks: Chunks

    def drop_ended(self, output: SchedulerOutput) -> SchedulerOutput:
        """`output`, which is this step and was not begun, without the chunks of those that have ended since."""
        is_alive = [seq.status is not SequenceStatus.FINISHED for seq in self.seqs]
        if all(is_alive):
            return output
        chunks = self.chunks
        self.seqs = list(compress(self.seqs, is_alive))
        self.chunks = Chunks(
            tuple(compress(chunks.seq_ids, is_alive)),
            tuple(compress(chunks.starts, is_alive)),
            tuple(compress(chunks.num_tokens, is_alive)),
            tuple(compress(chunks.is_sampled, is_alive)),
        )
        return replace(output, chunks=self.chunks)


@dataclass(frozen=True, slots=True)
class _Assumed:
    """A sequence of the step in flight, the tokens of its chunk, and whether a token is drawn."""

    seq: Sequence
    num_tokens: int
    is_sampled: bool

    @property
    def is_ending(self) -> bool:
        """Whether the token that is drawn is its last, whichever it is."""
        return self.is_sampled and len(self.seq.token_ids) + 1 >= self.seq.max_num_tokens


class Lookahead:
    """Moves the sequences of the step in flight on by what is certain of it, so that the next one can be scheduled.

        step t      [0 ............ n)  draws token n       in flight
        assumed     [0 .............. PLACEHOLDER)          computed: n + 1 less the placeholder
        step t+1                      [chunk]               reads the id that t has drawn
        update(t)   [0 .............. token n)              the placeholder is filled, or the sequence ends

    What is not certain is left out of the next step, or makes it wait (`Wait`): whoever is at its last token is set
    aside (`Queues.ending`), and nobody is preempted. So a placeholder is only ever met in a running sequence that gets
    a decode. One that ends for another reason has a row in the next step for nothing: see docs/scheduler.md.

    num_waits: how often a step had to wait, and why.
    """

    def __init__(self, kv: KVCacheManager, queues: Queues, deadlines: Deadlines, max_num_batched_tokens: int) -> None:
        self.num_waits: Counter[Wait] = Counter()
        self._kv = kv
        self._queues = queues
        self._deadlines = deadlines
        self._max_num_batched_tokens = max_num_batched_tokens

    def try_assume(self, step: StepInFlight, now: float, *, is_step_counted: bool) -> bool:
        """Count what `step` computes as computed; False, and nothing changed, where its outcome has to be known."""
        wait = self._why_wait(step, now, is_step_counted=is_step_counted) or self._try_move_on(step)
        if wait is not None:
            self.num_waits[wait] += 1
        return wait is None

    def _why_wait(self, step: StepInFlight, now: float, *, is_step_counted: bool) -> Wait | None:
        """By what the step computes; whether blocks suffice is seen when all have moved on."""
        if not step.seqs:
            return Wait.NOTHING_COMPUTED
        for seq in step.seqs:
            if seq.beams is not None:
                return Wait.BEAMS
            if seq.family is not None:
                return Wait.FAMILY
        if self._deadlines.has_overdue(now, is_step_counted=is_step_counted):
            return Wait.DEADLINE
        return None

    def _try_move_on(self, step: StepInFlight) -> Wait | None:
        moved = _alive(step)
        ending = [each.seq for each in moved if each.is_ending]
        running = self._queues.running
        if len(ending) == len(running):
            return Wait.LAST_TOKENS
        for each in moved:
            each.seq.num_computed_tokens += each.num_tokens
            each.seq.num_in_flight_tokens = each.num_tokens
            if each.is_sampled:
                each.seq.token_ids.append(PLACEHOLDER)
        growing = [running[index] for index in running.growing()]
        adder = StepAdder(self._kv, self._max_num_batched_tokens)
        if adder.may_lack_blocks([seq for seq in growing if seq.num_tokens < seq.max_num_tokens]):
            _take_back(moved)
            return Wait.BLOCKS
        for seq in ending:
            running.remove(seq)
            self._queues.ending[seq.seq_id] = seq
        return None


def _alive(step: StepInFlight) -> list[_Assumed]:
    chunks = step.chunks
    return [
        _Assumed(seq, num_tokens, is_sampled)
        for seq, num_tokens, is_sampled in zip(step.seqs, chunks.num_tokens, chunks.is_sampled, strict=True)
        if seq.status is not SequenceStatus.FINISHED
    ]


def _take_back(moved: Iterable[_Assumed]) -> None:
    for each in moved:
        each.seq.num_computed_tokens -= each.num_tokens
        each.seq.num_in_flight_tokens = 0
        if each.is_sampled:
            each.seq.token_ids.pop()
