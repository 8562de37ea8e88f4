"""Several workers, two clients and an adversary, one Redis command at a time, in an order that a seed decides.

Each run is one job, from its XADD until it is settled. The workers are the real parts on a real server, without an
engine. Only the server's clock, which the ids of events are made of, is not the seed's.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Self

from tests.wire.actors import NUM_TOKENS, Actor, Reader
from tests.wire.adversary import Adversary
from tests.wire.resp import RespClient
from tests.wire.stepped import SteppedLink
from tests.wire.workers import TestWorker
from worker.streams.keys import GROUP, QueueKeys

NUM_WORKERS = 3
# After so many rounds the adversary rests, so that the job can end; it has so many for that.
NUM_HARMFUL_ROUNDS = 60
NUM_QUIET_ROUNDS = 200


class World:
    """Workers of one queue, and the one client that all they do goes through."""

    def __init__(self, raw: RespClient, url: str, keys: QueueKeys) -> None:
        self._raw = raw
        self._keys = keys
        self._jobs = keys.jobs("normal")
        self._links: list[SteppedLink] = []
        self._actors = [Actor(TestWorker(url, keys, f"w{n}", self._make_link), raw) for n in range(NUM_WORKERS)]

    @classmethod
    async def make(cls, raw: RespClient, url: str, keys: QueueKeys) -> Self:
        """A queue that no other test uses, and its workers."""
        world = cls(raw, url, keys)
        await world._actors[0].worker.source.ensure_groups()
        return world

    def _make_link(self, url: str, name: str, queue: str) -> SteppedLink:
        self._links.append(SteppedLink(self._raw, url, name, queue))
        return self._links[-1]

    async def run(self, seed: int, deeds: Sequence[str]) -> list[str]:
        """One job among `deeds`; what is wrong once it is settled, or has to be by now."""
        rng, job_id = random.Random(seed), f"job{seed}"
        for link in self._links:
            link.rng = rng
            link.lose_after = link.lose_before = link.is_refusing = False
        for actor in self._actors:
            actor.begin(rng)
        self._raw.call("XADD", self._jobs, "*", "id", job_id, "prompt", "x")
        self._raw.call("XREADGROUP", "GROUP", GROUP, "nobody", "STREAMS", self._jobs, ">")
        follower = Reader(self._raw, self._keys.reply(job_id))
        adversary = Adversary(self._raw, self._actors, follower, job_id, deeds, rng)
        await adversary.claim()
        is_settled = await self._take_turns(adversary, follower, rng)
        found = self._judge(job_id, follower, is_cancelled=adversary.is_cancelled)
        found += [each for actor in self._actors for each in actor.found]
        if not is_settled:
            found.append(f"not settled: {self._raw.pending(self._jobs)}")
        if found:
            self._clear(job_id)
        return [f"seed {seed}: {each}" for each in found]

    async def _take_turns(self, adversary: Adversary, follower: Reader, rng: random.Random) -> bool:
        """Rounds until the job is settled and nobody is at it. False: there were too many."""
        for round_number in range(NUM_HARMFUL_ROUNDS + NUM_QUIET_ROUNDS):
            some = rng.sample(self._actors, rng.randint(1, len(self._actors)))
            is_harmful = round_number < NUM_HARMFUL_ROUNDS
            await asyncio.gather(*(actor.step() for actor in some), *([adversary.act()] if is_harmful else []))
            if rng.random() < 0.5:
                follower.read()
            if any(actor.entry is not None for actor in self._actors):
                continue
            if not self._raw.pending(self._jobs):
                return True
            if not is_harmful:
                await adversary.claim()  # a fenced owner's lease runs out
        return False

    def _judge(self, job_id: str, follower: Reader, *, is_cancelled: bool) -> list[str]:
        """Both clients have seen each token once and in order, and one end; nothing is left."""
        found: list[str] = []
        late = Reader(self._raw, self._keys.reply(job_id))
        for name, reader in (("the follower", follower), ("a late reader", late)):
            reader.read_all()
            num = len(reader.ids)
            wanted = list(range(num)), "".join(f"{token} " for token in range(num))
            whole = (NUM_TOKENS, ["end"])
            is_ended = (num, reader.terminals) == whole or (is_cancelled and reader.terminals == ["cancelled"])
            if (reader.ids, reader.text) != wanted or not is_ended:
                found.append(f"{name} saw {reader.ids}, {reader.text!r}, {reader.terminals}")
        if follower.ids != late.ids:
            found.append(f"the follower saw {follower.ids}, a late reader {late.ids}")
        record = self._raw.hash(self._keys.state(job_id))
        if [{"done": "end"}.get(record.get("status", ""), record.get("status"))] != late.terminals:
            found.append(f"the record says {record.get('status')} where the reply has {late.terminals}")
        if self._raw.call("EXISTS", self._keys.cancel(job_id)) or self._raw.call("XLEN", self._jobs):
            found.append("a cancel mark, or an entry, is left")
        if found:
            found.append(f"the reply: {self._raw.events(self._keys.reply(job_id))}")
        return found

    def _clear(self, job_id: str) -> None:
        """Nothing of a run that went wrong stays for the next one."""
        for actor in self._actors:
            actor.forget()
        self._raw.call("XGROUP", "DESTROY", self._jobs, GROUP)
        self._raw.call("DEL", self._jobs, self._keys.reply(job_id), self._keys.state(job_id))
        self._raw.call("XGROUP", "CREATE", self._jobs, GROUP, "0", "MKSTREAM")
