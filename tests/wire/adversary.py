"""What may happen to a job between any two commands of its workers."""

import random
from collections.abc import Sequence

from tests.wire.actors import Actor, Reader
from tests.wire.resp import RespClient
from tests.wire.stepped import dawdle
from worker.streams.keys import GROUP

# How often it strikes in a round, and how often calling the job off is what it does then.
STRIKE_SHARE, CANCEL_SHARE, SNAPSHOT_SHARE = 0.35, 0.2, 0.3

# The adversary touches no reply that has ended: that is a server which forgets what it acknowledged at the worst
# moment, against which the client's resend helps. Check and deed are one step.
UNLESS_ENDED = """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last and (last[2][2] == 'end' or last[2][2] == 'error') then return 0 end
if ARGV[1] == 'expire' then
  for _, entry in ipairs(redis.call('XPENDING', KEYS[2], 'workers', '-', '+', 10)) do
    redis.call('XCLAIM', KEYS[2], 'workers', 'nobody', 0, entry[1], 'IDLE', 60000, 'JUSTID')
  end
  redis.call('DEL', KEYS[1])
else
  redis.call('RESTORE', KEYS[1], 0, ARGV[2], 'REPLACE')
end
return 1
"""


class Adversary:
    """Does one of `deeds`, its methods' names, at a time, to one job. `is_cancelled`: it was called off."""

    def __init__(
        self,
        raw: RespClient,
        actors: Sequence[Actor],
        reader: Reader,
        job_id: str,
        deeds: Sequence[str],
        rng: random.Random,
    ) -> None:
        keys = actors[0].worker.keys
        self._raw = raw
        self._actors = actors
        self._reader = reader
        self._deeds = deeds
        self._rng = rng
        self._jobs = keys.jobs("normal")
        self._reply = keys.reply(job_id)
        self._mark = keys.cancel(job_id)
        self._snapshots: list[bytes] = []
        self.is_cancelled = False

    async def act(self) -> None:
        """One deed, now and then, somewhere among the workers' commands."""
        if "fail_over" in self._deeds and self._rng.random() < SNAPSHOT_SHARE:
            dump = self._raw.call("DUMP", self._reply)
            if dump is not None:
                self._snapshots.append(dump)
        if self._rng.random() < STRIKE_SHARE:
            await dawdle(self._rng)
            await getattr(self, self._rng.choice(self._deeds))()

    async def claim(self) -> None:
        """The lease ran out, whether or not the owner lives."""
        self._rob(self._owners())
        for entry_id in self._raw.pending(self._jobs):
            self._raw.call("XCLAIM", self._jobs, GROUP, "nobody", 0, entry_id, "IDLE", 60_000, "JUSTID")

    async def lose(self) -> None:
        """A connection is lost before a command, or after the server has carried it out."""
        link = self._rng.choice(self._rng.choice(self._actors).worker.links)
        link.lose_after = self._rng.random() < 0.5
        link.lose_before = not link.lose_after

    async def lose_settling(self) -> None:
        """The answer of a settling is lost."""
        self._rng.choice(self._actors).will_lose_settling = True

    async def refuse(self) -> None:
        """The server is full when the next event of a reply comes."""
        self._rng.choice(self._actors).worker.reply_link.is_refusing = True  # type: ignore[attr-defined]

    async def hand_over(self) -> None:
        """A worker is told to stop."""
        self._rng.choice(self._actors).must_hand_over = True

    async def cancel(self) -> None:
        """The client calls the job off while it is pending."""
        if self._rng.random() < CANCEL_SHARE and self._raw.pending(self._jobs):
            self._raw.call("SET", self._mark, "by the test", "EX", 86_400)
            self.is_cancelled = True

    async def expire(self) -> None:
        """The reply is gone between two owners. (Gone under an owner is a client that left.)"""
        owners = self._owners()
        if self._raw.call("EVAL", UNLESS_ENDED, 2, self._reply, self._jobs, "expire", ""):
            self._rob(owners)

    async def fail_over(self) -> None:
        """All connections are lost, and the new primary has only a beginning of the reply."""
        if self._snapshots:
            for actor in self._actors:
                for link in actor.worker.links:
                    await link.reset()
            snapshot = self._rng.choice(self._snapshots)
            self._raw.call("EVAL", UNLESS_ENDED, 2, self._reply, self._jobs, "restore", snapshot)
            self._reader.after_outage()

    def _owners(self) -> set[str]:
        return {owner for owner, _ in self._raw.pending(self._jobs).values()}

    def _rob(self, owners: set[str]) -> None:
        for actor in self._actors:
            actor.is_robbed = actor.is_robbed or actor.worker.name in owners
