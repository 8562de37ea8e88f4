"""Who gives way when blocks run out, and how."""

from bisect import insort
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.policy import Key, age_key
from scheduler.sequence import Sequence, SequenceStatus


class RunningQueue:
    """Running sequences in the order of their protection: the smallest `key` is best protected.

        [ leader | best protected … least protected ]
          served first                  preempted first

    A step serves from the front and takes victims from the back, so nobody loses blocks in a step in which it
    was served already. The leader is the oldest at the time when it became one, and stays until it ends: it
    is never preempted, whatever its priority. All others can be, so it always finds blocks; so it always ends.

    A key may change while its sequence runs: then the order is that of the last `reorder`, roughly.

    num_rows: that they have or may come to have in the runner's batch: a beam search has one for each beam.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._seqs: list[Sequence] = []
        self.num_rows = 0

    @property
    def leader(self) -> Sequence | None:
        """The one that is never preempted; None where nothing runs."""
        return self._seqs[0] if self._seqs else None

    def add(self, seq: Sequence) -> None:
        """Put `seq` into its place; it leads if it is alone."""
        insort(self._seqs, seq, lo=min(1, len(self._seqs)), key=self._key)
        self.num_rows += seq.sampling.beam_width

    def reorder(self) -> None:
        """Sort by the keys of now. The leader stays where it is."""
        self._seqs[1:] = sorted(self._seqs[1:], key=self._key)

    def remove(self, seq: Sequence) -> None:
        """Take out one that has ended. If it led, the oldest of the others leads."""
        index = self._seqs.index(seq)
        del self._seqs[index]
        self.num_rows -= seq.sampling.beam_width
        if index == 0 and self._seqs:
            heir = min(self._seqs, key=age_key)
            self._seqs.remove(heir)
            self._seqs.insert(0, heir)

    def pop_victim(self) -> Sequence:
        """Take out the least protected one, which is never the leader."""
        assert len(self._seqs) > 1, f"the leader {self._seqs} is alone and still lacks blocks"
        victim = self._seqs.pop()
        self.num_rows -= victim.sampling.beam_width
        return victim

    def last_first(self) -> Iterator[Sequence]:
        """All but the leader, the least protected first. Nobody may be added or removed meanwhile."""
        return islice(reversed(self._seqs), max(0, len(self._seqs) - 1))

    def growing(self) -> list[int]:
        """The numbers of those whose next chunk is no mere decode (`Sequence.num_decode_slots`)."""
        return [number for number, seq in enumerate(self._seqs) if seq.num_computed_tokens >= seq.num_decode_slots]

    def part(self, start: int, end: int) -> list[Sequence]:
        """Numbers [start, end) of them, as far as there are so many."""
        return self._seqs[start:end]

    def __getitem__(self, index: int) -> Sequence:
        return self._seqs[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def __len__(self) -> int:
        return len(self._seqs)


class Preemptor:
    """Carries a preemption out, in the mode that fits the victim, and counts.

    RECOMPUTE frees the blocks, and their tokens are computed again later, as far as the prefix cache has not kept
    them. SWAP copies the blocks to the CPU tier and back. AUTO takes what costs this victim less.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig, kv_block_bytes: int) -> None:
        self._kv = kv
        self._config = config
        self._kv_block_bytes = kv_block_bytes
        self.num_recomputes = 0
        self.num_swaps = 0
        self.num_full_tier_recomputes = 0

    def preempt(self, victim: Sequence) -> None:
        """Take the blocks of `victim`, which is in no queue now; it is WAITING, SWAPPING_OUT or SWAPPED afterwards.

        So it is with all its beams.
        """
        for beam in victim.all_beams:
            assert beam.num_in_flight_tokens == 0, f"{beam} gives way, but a step computes it"
            beam.num_preemptions += 1
            self._kv.seal_full_blocks(beam)
        is_swap_wanted = self._is_swap_wanted(victim)
        if is_swap_wanted and self._kv.try_begin_swap_out(victim):
            self.num_swaps += 1
            return
        for beam in victim.all_beams:
            self._kv.free(beam)
        victim.status = SequenceStatus.WAITING
        self.num_recomputes += 1
        self.num_full_tier_recomputes += is_swap_wanted

    def swap_cost_s(self, victim: Sequence) -> float:
        """Seconds that copying it out and in again takes; 0 where the rate is not known.

        What lies in the CPU tier already is not copied out, what others keep on the device is not copied in.
        """
        rate = self._config.swap_bytes_per_s
        num_out, num_in = self._kv.num_blocks_to_copy(victim)
        return 0.0 if rate is None else (num_out + num_in) * self._kv_block_bytes / rate

    def recompute_cost_s(self, victim: Sequence) -> float:
        """Seconds that computing it again takes; inf where the rate is not known. What others keep is not computed."""
        rate = self._config.prefill_tokens_per_s
        if victim.beams is not None:
            return inf if rate is None else victim.beams.num_distinct_tokens / rate
        num_kept = self._kv.num_shared_blocks(victim) * self._kv.block_size
        return inf if rate is None else max(0, victim.num_computed_tokens - num_kept) / rate

    def _is_swap_wanted(self, victim: Sequence) -> bool:
        mode = self._config.preemption_mode
        if self._kv.swap is None or mode is PreemptionMode.RECOMPUTE or len(victim.block_table) == 0:
            return False
        return mode is PreemptionMode.SWAP or self.swap_cost_s(victim) <= self.recompute_cost_s(victim)
