"""Several workers, two clients and an adversary, one Redis command at a time in random order.

The adversary claims the entry away from whoever has it (who lives on as a zombie), loses connections before and after
a command, deletes the reply between owners, and cuts the reply back to a prefix, as a promoted replica does. Whatever
the order: a client that follows from the start and one that reads at the end both see tokens 0 to 11 once, in order,
and one terminal event; nothing stays pending.
"""

import asyncio
import contextlib
import json
import random

import pytest

from tests.wire.resp import RespClient, pairs
from tests.wire.workers import MakeWorker, TestWorker
from worker.streams.errors import StreamsError
from worker.streams.leases import Entry
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import OpenStatus

NUM_TOKENS = 12
NUM_WORKERS = 3
# After so many rounds the adversary rests, so that the job can end.
NUM_HARMFUL_ROUNDS = 60

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


class Reader:
    """A client by the book: appends, resets, and reads again from the start where the rules say so."""

    def __init__(self, raw: RespClient, key: str) -> None:
        self._raw = raw
        self._key = key
        self.last = "0-0"
        self.ids: list[int] = []
        self.num_terminal = 0

    def read(self) -> None:
        """One XREAD and what follows from it."""
        answer = self._raw.call("XREAD", "COUNT", 3, "STREAMS", self._key, self.last)
        for entry_id, flat in answer[0][1] if answer else []:
            if not self._take(entry_id.decode(), pairs(flat)):
                self._restart()
                return

    def after_outage(self) -> None:
        """The connection was lost: is the last id still there?"""
        if self.last != "0-0" and not self._raw.call("XRANGE", self._key, self.last, self.last):
            self._restart()

    def _take(self, entry_id: str, event: dict[str, str]) -> bool:
        if event["e"] == "open" and int(event["from"]) < len(self.ids):
            return False
        if event["e"] == "reset":
            self.ids = []
        if event["e"] == "token":
            ids = json.loads(event["ids"])
            if int(event["n"]) - len(ids) != len(self.ids):
                return False
            self.ids += ids
        self.num_terminal += event["e"] in ("end", "error")
        self.last = entry_id
        return True

    def _restart(self) -> None:
        self.last, self.ids, self.num_terminal = "0-0", [], 0


class Actor:
    """One worker as a sequence of steps: take, open, recover, write token by token, end, settle."""

    def __init__(self, worker: TestWorker) -> None:
        self.worker = worker
        self.entry: Entry | None = None
        self.writer: ReplyWriter | None = None

    async def step(self) -> None:
        """One step; after a fault in it the next step goes on."""
        with contextlib.suppress(StreamsError):
            if self.entry is None:
                found = await self.worker.source.reclaim(1)
                self.entry = found[0] if found else None
            elif self.writer is None:
                await self._open(self.entry)
            elif self.writer.status is not ReplyStatus.LIVE:
                await self._leave(self.entry, self.writer.status)
            else:
                await self._write(self.writer)

    async def _open(self, entry: Entry) -> None:
        result, writer = await self.worker.replies.open(self.worker.envelope(entry))
        if writer is not None:
            await self.worker.replies.recover(writer)
            self.writer = writer
        else:
            await self._leave(entry, ReplyStatus.ENDED if result.status is OpenStatus.ENDED else ReplyStatus.FENCED)

    async def _write(self, writer: ReplyWriter) -> None:
        if writer.num_tokens < NUM_TOKENS:
            writer.token([writer.num_tokens], f"{writer.num_tokens} ")
        else:
            writer.end("length", usage={}, receipt={})
        await self.worker.replies.flush()

    async def _leave(self, entry: Entry, status: ReplyStatus) -> None:
        """Whoever is fenced doesn't acknowledge; whoever settles is asked by the script whether the entry is theirs."""
        if status is not ReplyStatus.FENCED:
            envelope = self.worker.envelope(entry)
            await self.worker.scripts.settle(
                entry.lane, entry.entry_id, envelope.id, outcome=status.value, result_ttl_ms=60_000
            )
        if self.writer is not None:
            self.worker.replies.discard(self.writer)
        self.worker.leases.release(entry.key)
        self.entry = self.writer = None


class Adversary:
    """Does one harmful thing at a time to one job."""

    def __init__(self, raw: RespClient, actors: list[Actor], reader: Reader, job_id: str, rng: random.Random) -> None:
        self._raw = raw
        self._actors = actors
        self._reader = reader
        self._rng = rng
        self._jobs = actors[0].worker.keys.jobs("normal")
        self._reply = actors[0].worker.keys.reply(job_id)
        self._snapshots: list[bytes] = []

    async def act(self, deeds: list[str]) -> None:
        """One of `deeds`, now and then, somewhere among the workers' commands."""
        dump = self._raw.call("DUMP", self._reply)
        if dump is not None and self._rng.random() < 0.3:
            self._snapshots.append(dump)
        if self._rng.random() < 0.35:
            await dawdle(self._rng)
            await getattr(self, self._rng.choice(deeds))()

    async def claim(self) -> None:
        """The lease ran out, whether or not the owner lives."""
        for entry_id in self._raw.pending(self._jobs):
            self._raw.call("XCLAIM", self._jobs, "workers", "nobody", 0, entry_id, "IDLE", 60_000, "JUSTID")

    async def lose(self) -> None:
        """A connection is lost before or after a command."""
        worker = self._rng.choice(self._actors).worker
        link = self._rng.choice([worker.commands, worker.reply_link, worker.jobs_link])
        link.lose_after = self._rng.random() < 0.5
        link.lose_before = not link.lose_after

    async def expire(self) -> None:
        """The reply is gone between two owners. (Gone under an owner is a client that left.)"""
        self._raw.call("EVAL", UNLESS_ENDED, 2, self._reply, self._jobs, "expire", "")

    async def fail_over(self) -> None:
        """All connections are lost, and the new primary has only a beginning of the reply."""
        if self._snapshots:
            for actor in self._actors:
                for link in (actor.worker.commands, actor.worker.reply_link, actor.worker.jobs_link):
                    await link.reset()
            snapshot = self._rng.choice(self._snapshots)
            self._raw.call("EVAL", UNLESS_ENDED, 2, self._reply, self._jobs, "restore", snapshot)
            self._reader.after_outage()


async def dawdle(rng: random.Random) -> None:
    """Lets other tasks go first, or not."""
    for _ in range(rng.randrange(6)):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "deeds",
    [
        pytest.param(["claim"], id="claims"),
        pytest.param(["claim", "lose"], id="claims-and-lost-connections"),
        pytest.param(["claim", "expire"], id="claims-and-lost-replies"),
        pytest.param(["claim", "fail_over"], id="claims-and-failovers"),
        pytest.param(["claim", "lose", "expire", "fail_over"], id="everything"),
    ],
)
@pytest.mark.parametrize("num_seeds", [8, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.two_servers
async def test_in_every_order_every_client_sees_one_whole_reply(
    make_worker: MakeWorker, raw: RespClient, deeds: list[str], num_seeds: int
) -> None:
    actors = [Actor(make_worker(f"w{number}")) for number in range(NUM_WORKERS)]
    for seed in range(num_seeds):
        rng = random.Random(seed)
        await run_once(actors, raw, rng, deeds, job_id=f"job{seed}")


async def run_once(actors: list[Actor], raw: RespClient, rng: random.Random, deeds: list[str], job_id: str) -> None:
    """One job from XADD to settled, then what both clients saw."""
    keys = actors[0].worker.keys
    for actor in actors:
        for link in (actor.worker.commands, actor.worker.reply_link, actor.worker.jobs_link):
            link.rng = rng
            link.lose_after = link.lose_before = False
    raw.call("XADD", keys.jobs("normal"), "*", "id", job_id, "prompt", "x")
    raw.call("XREADGROUP", "GROUP", "workers", "nobody", "STREAMS", keys.jobs("normal"), ">")
    follower = Reader(raw, keys.reply(job_id))
    adversary = Adversary(raw, actors, follower, job_id, rng)
    await adversary.claim()
    for round_number in range(1000):
        some = rng.sample(actors, rng.randint(1, len(actors)))
        is_harmful = round_number < NUM_HARMFUL_ROUNDS
        await asyncio.gather(*(actor.step() for actor in some), *([adversary.act(deeds)] if is_harmful else []))
        if rng.random() < 0.5:
            follower.read()
        if not raw.pending(keys.jobs("normal")) and all(actor.entry is None for actor in actors):
            break
        if not is_harmful and all(actor.entry is None for actor in actors):
            await adversary.claim()  # a fenced owner's lease runs out
    late = Reader(raw, keys.reply(job_id))
    for reader in (follower, late):
        for _ in range(100):
            reader.read()
        told = (reader.ids, reader.num_terminal)
        assert told == (list(range(NUM_TOKENS)), 1), f"{job_id}, {raw.events(keys.reply(job_id))}"
    assert raw.pending(keys.jobs("normal")) == {}, job_id
    assert raw.call("XLEN", keys.jobs("normal")) == 0, job_id
