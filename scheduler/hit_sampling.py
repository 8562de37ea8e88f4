"""Keeps the prefix cache's bookkeeping small where nothing hits."""

from scheduler.sequence import Sequence

# One beginning in so many is followed while nothing hits.
SAMPLED_SHARE = 8
# So many sequences are looked up before anything is concluded; what is older than about this many counts little.
WINDOW = 512
# Below this share of tokens hit, only samples are followed; from it on, all are.
MIN_HIT_RATE = 0.005


class HitSampler:
    """Decides, when a sequence is first looked up, whether its blocks are looked up and entered at all.

        following all ──── hit rate below MIN_HIT_RATE ────► following one beginning in SAMPLED_SHARE
              ▲                                                              │
              └───────────── hit rate of the samples at or above it ◄────────┘

    A sample is chosen by the hash of its first block: sequences that begin alike are all in it, or none is. So samples
    hit one another as often as all would, and the way back is found. Sequences without a full block are not counted.

    The numbers are sums in which each lookup fades by 1 / WINDOW with every later one.
    """

    def __init__(self, *, window: int = WINDOW, min_hit_rate: float = MIN_HIT_RATE) -> None:
        self.is_sampling = False
        self._keep = 1 - 1 / window
        self._window = window
        self._min_hit_rate = min_hit_rate
        self._num_lookups = 0
        self._queried = 0.0
        self._hit = 0.0

    def follows(self, first_block_hash: int) -> bool:
        """Whether a sequence that begins with this block is followed."""
        return not self.is_sampling or first_block_hash % SAMPLED_SHARE == 0

    def observe(self, seq: Sequence, num_hit_tokens: int) -> None:
        """Take in the first lookup of a sequence that is followed."""
        self._queried = self._queried * self._keep + seq.num_tokens
        self._hit = self._hit * self._keep + num_hit_tokens
        self._num_lookups += 1
        if self._num_lookups < self._window:
            return
        is_low = self._hit < self._min_hit_rate * self._queried
        if is_low != self.is_sampling:
            self.is_sampling = is_low
            # What was seen so far says nothing of the other way of looking.
            self._num_lookups, self._queried, self._hit = 0, 0.0, 0.0
