"""Sequences that wait to be admitted, in the order of the policy."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from scheduler.policy import Key, Policy, age_key
from scheduler.sequence import Sequence

# Entries of so many tenants are set right all at once, which takes less than one by one.
NUM_SORTED_ANEW = 64
# Of so many admissions one goes to whoever has waited longest, whatever the rules say, so that nobody waits for ever.
ADMISSIONS_PER_TURN = 16


class SortedQueue:
    """Sequences in the order of a key that does not change while they are in here.

    Two sorted lists, of keys and of sequences: taking one from the middle (an abort, or a small one that passes a big
    one) costs a binary search and two memmoves, and iteration is as fast as Python has it.

    seqs: in order, to be read.
    """

    def __init__(self, key: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._keys: list[Key] = []
        self.seqs: list[Sequence] = []

    def add(self, seq: Sequence) -> int:
        """Put `seq` into its place; which that is."""
        key = self._key(seq)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self.seqs.insert(index, seq)
        return index

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        index = bisect_left(self._keys, self._key(seq))
        is_here = index < len(self.seqs) and self.seqs[index] is seq
        assert is_here, f"{seq} is not in the waiting queue"
        del self._keys[index], self.seqs[index]

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.seqs)

    def __len__(self) -> int:
        return len(self.seqs)


class TenantQueue:
    """Sequences in the order of a key that changes with what their tenant has used: a sorted queue for each tenant.

    A heap of (key of a tenant's first one, tenant, 0). Accounts only grow, so an entry that is out of date is too
    small, never too large, and is set right when it comes to the top: what a step costs does not grow with the
    number of tenants, where there are many of them. A tenant may have more than one entry.
    """

    def __init__(self, key: Callable[[Sequence], Key], key_in_tenant: Callable[[Sequence], Key]) -> None:
        self._key = key
        self._key_in_tenant = key_in_tenant
        self._lanes: dict[str, SortedQueue] = {}
        self._heap: list[tuple[Key, str, int]] = []
        self._num = 0

    def add(self, seq: Sequence) -> None:
        """Put `seq` into its place."""
        lane = self._lanes.get(seq.tenant)
        if lane is None:
            lane = self._lanes[seq.tenant] = SortedQueue(self._key_in_tenant)
        self._num += 1
        if lane.add(seq) > 0:
            return
        heappush(self._heap, (self._key(seq), seq.tenant, 0))
        if len(self._heap) > 2 * len(self._lanes) + 16:
            self._set_all_right()

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        lane = self._lanes.get(seq.tenant)
        assert lane is not None, f"{seq} is not in the waiting queue"
        lane.remove(seq)
        self._num -= 1
        if not lane:
            del self._lanes[seq.tenant]

    def __iter__(self) -> Iterator[Sequence]:
        """In order; what a tenant uses while it goes on moves those of its sequences back that are still to come."""
        if len(self._lanes) <= NUM_SORTED_ANEW:
            self._set_all_right()
        else:
            self._set_head_right()
        heap, begun = self._heap.copy(), set[str]()
        while heap:
            key, tenant, index = heap[0]
            lane = self._lanes.get(tenant)
            if lane is None or (index == 0 and tenant in begun):
                heappop(heap)
                continue
            seq = lane.seqs[index]
            if (current := self._key(seq)) != key:
                heapreplace(heap, (current, tenant, index))
                continue
            begun.add(tenant)
            yield seq
            if index + 1 < len(lane.seqs):
                heapreplace(heap, (self._key(lane.seqs[index + 1]), tenant, index + 1))
            else:
                heappop(heap)

    def __len__(self) -> int:
        return self._num

    def _set_all_right(self) -> None:
        self._heap = [(self._key(lane.seqs[0]), tenant, 0) for tenant, lane in self._lanes.items()]
        heapify(self._heap)

    def _set_head_right(self) -> None:
        heap = self._heap
        while heap:
            key, tenant, _ = heap[0]
            lane = self._lanes.get(tenant)
            if lane is None:
                heappop(heap)
            elif (current := self._key(lane.seqs[0])) != key:
                heapreplace(heap, (current, tenant, 0))
            else:
                return


class WaitingQueue:
    """Who waits, in the order of `policy`; and now and then whoever has waited longest, whatever the order.

    Nothing may be added or removed while it is iterated.
    """

    def __init__(self, policy: Policy) -> None:
        self._order: SortedQueue | TenantQueue = (
            SortedQueue(policy.waiting_key)
            if policy.fair is None
            else TenantQueue(policy.waiting_key, policy.key_in_tenant)
        )
        self._by_age = SortedQueue(age_key)
        self._num_since_turn = 0

    @property
    def oldest(self) -> Sequence:
        """Whoever arrived first. There must be one."""
        return self._by_age.seqs[0]

    def add(self, seq: Sequence) -> None:
        """Put `seq` into its place."""
        self._order.add(seq)
        self._by_age.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands."""
        self._order.remove(seq)
        self._by_age.remove(seq)

    def admit(self, seq: Sequence) -> None:
        """Take out one that is admitted."""
        self._num_since_turn = 0 if seq is self.oldest else self._num_since_turn + 1
        self.remove(seq)

    def candidates(self) -> Iterator[Sequence]:
        """In the order in which they are to be admitted now."""
        if self._num_since_turn < ADMISSIONS_PER_TURN - 1 or not self._by_age:
            yield from self._order
            return
        oldest = self.oldest
        yield oldest
        for seq in self._order:
            if seq is not oldest:
                yield seq

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._by_age.seqs)
