"""What tenants have used of the engine, so that the one that has had least comes first."""

from collections import Counter
from collections.abc import Iterable

from scheduler.beam_blocks import each_beam
from scheduler.output import Chunk
from scheduler.sequence import Sequence

# Accounts of tenants that are gone are kept while they are over their share, but no more than so many.
MAX_GONE = 1024


class FairShare:
    """Accounts of the tenants that have unfinished sequences, in tokens; a rule of `Policy` by them.

    A tenant pays for the tokens of its prompts when they are admitted (but for those found in the prefix cache), for
    each token generated, and for each block it holds through a step: the whole pool held for a second costs as many
    tokens as the engine computes in a second. What is computed again after a preemption costs nothing: the
    tenant did not ask for it.

    Accounts only grow. A tenant that comes, or comes back, begins no lower than the one that has used least of those
    that are here: having been away is no credit (Sheng et al., Fairness in Serving Large Language Models, 2024).

    num_blocks: blocks of the pool.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._used: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._num_seqs: Counter[str] = Counter()
        # What whoever left last had used: the level at which the next one begins where nobody is here.
        self._last_level = 0.0
        self._busy_s = 0.0
        self._num_tokens = 0

    def __call__(self, seq: Sequence) -> float:
        """What the tenant of `seq`, which is unfinished, has used, in tokens."""
        return self._used[seq.tenant]

    @property
    def used(self) -> dict[str, float]:
        """A copy of the accounts of those that are here."""
        return dict(self._used)

    def arrive(self, seq: Sequence) -> None:
        """A sequence was taken on."""
        tenant = seq.tenant
        self._num_seqs[tenant] += 1
        if tenant not in self._used:
            self._used[tenant] = max(self._gone.pop(tenant, 0.0), self._level())

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended, however it did."""
        tenant = seq.tenant
        self._num_seqs[tenant] -= 1
        if self._num_seqs[tenant]:
            return
        del self._num_seqs[tenant]
        used = self._used.pop(tenant)
        self._last_level = max(self._last_level, used) if not self._used else self._last_level
        level = self._level()
        if used > level:
            self._gone[tenant] = used
        if len(self._gone) > MAX_GONE:
            self._gone = {name: value for name, value in self._gone.items() if value > level}
            while len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]

    def charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """`seq` was admitted for the first time, and has so many tokens to compute."""
        self._used[seq.tenant] += num_tokens

    def charge_step(self, running: Iterable[Sequence], work: Iterable[tuple[Sequence, Chunk]], step_s: float) -> None:
        """A step of `step_s` seconds is over: `work` was computed while `running` held their blocks."""
        used = self._used
        num_tokens = 0
        for seq, chunk in work:
            num_tokens += chunk.num_tokens
            if chunk.is_sampled and not seq.is_finished:
                used[seq.tenant] += 1
        self._busy_s += step_s
        self._num_tokens += num_tokens
        if step_s <= 0:
            return
        price = step_s * self._num_tokens / (self._busy_s * self._num_blocks)
        for seq in each_beam(running):
            used[seq.tenant] += price * len(seq.block_table)

    def _level(self) -> float:
        return min(self._used.values()) if self._used else self._last_level
