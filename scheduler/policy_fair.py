"""What tenants have used of the engine, so that the one that has had least comes first."""

from collections import Counter
from collections.abc import Iterable

from scheduler.account import Account
from scheduler.beam_blocks import each_beam
from scheduler.sequence import Sequence, SequenceStatus

# Accounts of tenants that are gone are kept while they are over their share, but no more than so many.
MAX_GONE = 1024


class FairShare:
    """Accounts of the tenants that have unfinished sequences, in tokens; `Policy` has a rule by them.

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
        self._accounts: dict[str, Account] = {}
        self._gone: dict[str, float] = {}
        self._num_seqs: Counter[str] = Counter()
        # What whoever left last had used: the level at which the next one begins where nobody is here.
        self._last_level = 0.0
        self._busy_s = 0.0
        self._num_tokens = 0

    @property
    def used(self) -> dict[str, float]:
        """What those that are here have used, in tokens."""
        return {tenant: account.used for tenant, account in self._accounts.items()}

    def arrive(self, seq: Sequence) -> None:
        """A sequence was taken on: from now on its account is that of its tenant."""
        tenant = seq.tenant
        self._num_seqs[tenant] += 1
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(max(self._gone.pop(tenant, 0.0), self._level()))
            self._accounts[tenant] = account
        seq.account = account

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended, however it did."""
        tenant = seq.tenant
        self._num_seqs[tenant] -= 1
        if self._num_seqs[tenant]:
            return
        del self._num_seqs[tenant]
        used = self._accounts.pop(tenant).used
        self._last_level = max(self._last_level, used) if not self._accounts else self._last_level
        level = self._level()
        if used > level:
            self._gone[tenant] = used
        if len(self._gone) > MAX_GONE:
            self._gone = {name: value for name, value in self._gone.items() if value > level}
            while len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]

    def charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """`seq` was admitted for the first time, and has so many tokens to compute."""
        seq.account.used += num_tokens

    def charge_step(
        self, running: Iterable[Sequence], sampled: Iterable[Sequence], num_tokens: int, step_s: float
    ) -> None:
        """A step of `step_s` seconds is over: it computed so many tokens while `running` held their blocks.

        `sampled` get a token each; whoever of them has ended meanwhile does not.
        """
        for seq in sampled:
            if seq.status is not SequenceStatus.FINISHED:
                seq.account.used += 1
        self._busy_s += step_s
        self._num_tokens += num_tokens
        if step_s <= 0:
            return
        price = step_s * self._num_tokens / (self._busy_s * self._num_blocks)
        for seq in each_beam(running):
            seq.account.used += price * len(seq.block_table.blocks)

    def _level(self) -> float:
        return min([account.used for account in self._accounts.values()], default=self._last_level)
