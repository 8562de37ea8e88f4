"""Lets waiting and swapped sequences in."""

from itertools import chain

from scheduler.admission_delay import AdmissionDelay
from scheduler.admission_pace import AdmissionPace
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.policy import Policy
from scheduler.queues import Queues
from scheduler.roster import Roster
from scheduler.sequence import Sequence, SequenceStatus
from scheduler.step_adder import StepAdder
from scheduler.step_watch import StepWatch

# So many sequences may be admitted past one that doesn't fit; then they wait behind it.
MAX_PASSES = 32
# So many that don't fit are passed in one step: each may cost a walk through the prefix cache.
MAX_PASSED = 8


class Passed:
    """Who didn't fit in this step, and is passed by smaller ones that do."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self._has_enough = False

    @property
    def is_last(self) -> bool:
        """Whether nobody may pass these any more."""
        return self._has_enough or len(self._seqs) == MAX_PASSED

    def add(self, seq: Sequence) -> None:
        """One more that doesn't fit."""
        self._seqs.append(seq)
        self._has_enough |= seq.num_passes == MAX_PASSES

    def count_pass(self) -> None:
        """Somebody behind all these was admitted."""
        for seq in self._seqs:
            seq.num_passes += 1
            self._has_enough |= seq.num_passes == MAX_PASSES


class Admission:
    """The second part of a step: who comes in with the tokens and blocks that the running ones have left.

    Raises InvalidConfigError for a negative delay factor.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        queues: Queues,
        roster: Roster,
        policy: Policy,
        watch: StepWatch,
        *,
        delay_factor: float,
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._roster = roster
        self._policy = policy
        self._guard = watch.guard
        self._delay = AdmissionDelay(delay_factor, watch.pace)
        self._pace = AdmissionPace()

    def admit(self, adder: StepAdder, now: float) -> None:
        """Let in whoever can and may come in now."""
        if self._is_due(adder, now):
            self._admit_in_order(adder, now)
        self._pace.observe(adder.num_admitted)

    def _is_due(self, adder: StepAdder, now: float) -> bool:
        """Whether one more may run now: nobody is held back for others to come where nothing runs."""
        queues = self._queues
        num_running = len(queues.running) + len(queues.ending)
        if not queues.waiting or adder.num_tokens_left == 0:
            return False
        if num_running + len(queues.coming) >= self._guard.num_seqs:
            return False
        return num_running == 0 or self._delay.is_due(queues.waiting, adder.num_tokens_left, now)

    def _admit_in_order(self, adder: StepAdder, now: float) -> None:
        """Admit in order while there is room. Small ones may pass a big one that doesn't fit, up to a limit."""
        passed = Passed()
        admitted: list[Sequence] = []
        hopeless: list[Sequence] = []
        max_num_seqs, drops_hopeless = self._guard.num_seqs, self._policy.drops_hopeless
        running, coming = self._queues.running, self._queues.coming
        num_admitted = running.num_rows + len(self._queues.ending) + sum([seq.sampling.beam_width for seq in coming])
        adder.open_admission(chain(running, coming))
        if adder.is_full and num_admitted > 0:
            return  # before the waiting ones are put in order
        most = self._pace.most(len(running))
        for seq in self._queues.waiting.candidates():
            is_alone = num_admitted == 0 and not self._kv.has_transfers
            if num_admitted >= max_num_seqs or adder.num_admitted == most or (adder.is_full and not is_alone):
                break
            if seq.family is not None and seq.family.is_awaited_by(seq):
                continue
            if drops_hopeless and seq.deadline_s is not None and self._is_hopeless(seq, now):
                hopeless.append(seq)
                continue
            if passed.is_last:
                break
            num_rows = seq.sampling.beam_width
            has_rows = num_admitted == 0 or num_admitted + num_rows <= max_num_seqs
            if has_rows and adder.try_admit(seq, is_alone=is_alone):
                admitted.append(seq)
                num_admitted += num_rows
                self._charge_prompt(seq)
                passed.count_pass()
            else:
                passed.add(seq)
        for seq in hopeless:
            self._roster.drop(seq, now)
        self._let_in(admitted, now)

    def _let_in(self, admitted: list[Sequence], now: float) -> None:
        """Move those that the step has taken in from the waiting queue to where they are now."""
        for seq in admitted:
            self._queues.waiting.admit(seq)
            if seq.status is not SequenceStatus.SWAPPING_IN:
                seq.status = SequenceStatus.RUNNING
            self._queues.place(seq)
            if seq.first_scheduled_s is None:
                seq.first_scheduled_s = now

    def _charge_prompt(self, seq: Sequence) -> None:
        """Have the tenant pay, once, for what is to be computed of the prompt of one that is admitted."""
        if self._policy.fair is not None and seq.first_scheduled_s is None:
            num_present = max(seq.num_cached_tokens, seq.num_computed_tokens)
            self._policy.fair.charge_prompt(seq, max(0, seq.num_prompt_tokens - num_present))

    def _is_hopeless(self, seq: Sequence, now: float) -> bool:
        """Whether a waiting sequence can't make it, even with what a tier or its family has of it."""
        deadlines = self._roster.deadlines
        if not deadlines.is_hopeless(seq, now):
            return False
        if seq.family is not None and seq.family.source(seq) is not None:
            return deadlines.is_hopeless(seq, now, min(seq.num_prompt_tokens, seq.num_tokens - 1))
        return deadlines.is_hopeless(seq, now, self._kv.num_found_tokens(seq))
