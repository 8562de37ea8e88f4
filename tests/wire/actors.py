"""The parties of an interleaving: clients that read by the book, and workers that do one step at a time."""

import contextlib
import json
import random

from tests.wire.resp import RespClient, pairs
from tests.wire.workers import TestWorker
from worker.errors import cancelled
from worker.streams.errors import StreamsError
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.leases import Entry, Loss
from worker.streams.registry import CancelMarks
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import OpenStatus, SettleStatus

NUM_TOKENS = 12
RESULT_TTL_MS = 60_000
# How often a worker that runs a job renews its lease, and looks for a cancel mark, instead of going on with it.
RENEW_SHARE, LOOK_SHARE = 0.1, 0.1


class Reader:
    """A client by the book: appends, resets, and reads again from the start where the rules say so."""

    def __init__(self, raw: RespClient, key: str) -> None:
        self._raw = raw
        self._key = key
        self._last = "0-0"
        self.ids: list[int] = []
        self.text = ""
        self.terminals: list[str] = []

    def read(self) -> bool:
        """One XREAD and what follows from it. Whether anything came."""
        answer = self._raw.call("XREAD", "COUNT", 3, "STREAMS", self._key, self._last)
        for entry_id, flat in answer[0][1] if answer else []:
            if not self._take(entry_id.decode(), pairs(flat)):
                self._restart()
                return True
        return bool(answer)

    def read_all(self, most: int = 100) -> None:
        """Reads to the end, or so many times."""
        for _ in range(most):
            if not self.read():
                return

    def after_outage(self) -> None:
        """The connection was lost: is the last id still there?"""
        if self._last != "0-0" and not self._raw.call("XRANGE", self._key, self._last, self._last):
            self._restart()

    def _take(self, entry_id: str, event: dict[str, str]) -> bool:
        if event["e"] == "open" and int(event["from"]) < len(self.ids):
            return False
        if event["e"] == "reset":
            self.ids, self.text = [], ""
        if event["e"] == "token":
            ids = json.loads(event["ids"])
            if int(event["n"]) - len(ids) != len(self.ids):
                return False
            self.ids += ids
        self.text += event.get("text", "")
        if event["e"] in ("end", "error"):
            self.terminals.append(event.get("code", event["e"]))
        self._last = entry_id
        return True

    def _restart(self) -> None:
        self._last, self.ids, self.text, self.terminals = "0-0", [], "", []


class Actor:
    """One worker as a sequence of steps: take, open, recover, write, end, settle; or hand over, or be told of a loss.

    `must_hand_over`: it gives the job that it runs to a peer. `will_lose_settling`: the answer of its next settling is
    lost. After a fault in a step the next one goes on. `is_robbed`: since it asked for
    work last, its lease ran out or it gave the job away. `found` is what it came upon that no order may bring.
    """

    def __init__(self, worker: TestWorker, raw: RespClient) -> None:
        self.worker = worker
        self._raw = raw
        self.marks = CancelMarks(worker.commands, worker.keys)
        worker.leases.on_loss = self._on_loss
        self.begin(random.Random(0))

    def begin(self, rng: random.Random) -> None:
        """A new run: nothing is left of the last one, however it ended."""
        self.rng = rng
        self.entry: Entry | None = None
        self.writer: ReplyWriter | None = None
        self.is_recovered = self.is_over = self.was_ended = False
        self.outcome = ""
        self.found: list[str] = []
        self.must_hand_over = self.will_lose_settling = self.is_robbed = False

    async def step(self) -> None:
        """One step."""
        with contextlib.suppress(StreamsError):
            if self.entry is None:
                self.is_robbed = False
                found = await self.worker.source.reclaim(1)
                self.entry = found[0] if found else None
            elif self.was_ended:
                await self._leave(self.entry, ReplyStatus.ENDED)
            elif self.writer is None:
                await self._open(self.entry)
            elif self.writer.status is not ReplyStatus.LIVE:
                await self._leave(self.entry, self.writer.status)
            elif not self.is_recovered:
                await self.worker.replies.recover(self.writer)
                self.is_recovered = True
            else:
                await self._go_on(self.entry, self.writer)

    async def _open(self, entry: Entry) -> None:
        result, writer = await self.worker.replies.open(self.worker.envelope(entry))
        if writer is not None:
            self.writer, self.is_recovered, self.is_over = writer, False, False
            if result.cancel_reason is not None:
                self._cancel(writer)
        elif result.status is OpenStatus.ENDED:
            self.was_ended, self.outcome = True, result.terminal_code or "done"
        else:
            self._check_loss(f"its open says {result.status}")
            self.forget()

    async def _go_on(self, entry: Entry, writer: ReplyWriter) -> None:
        chance = self.rng.random()
        if chance < RENEW_SHARE:
            await self.worker.renew()
        elif chance < RENEW_SHARE + LOOK_SHARE and not self.is_over:
            job_id = writer.job_id
            if job_id in await self.marks.check([job_id]) and self.writer is writer:
                self._cancel(writer)
        elif self.must_hand_over and writer.is_drained:
            await self._hand_over(entry, writer)
        else:
            self._say(writer)
            await self.worker.replies.flush()

    def _say(self, writer: ReplyWriter) -> None:
        """A token or two for the next event, or the end."""
        if self.is_over or self.must_hand_over:
            return
        for _ in range(self.rng.choice([1, 1, 2])):
            if writer.num_tokens < NUM_TOKENS:
                writer.token([writer.num_tokens], f"{writer.num_tokens} ")
            else:
                writer.end("length", usage={}, receipt={})
                self.is_over, self.outcome = True, "done"
                return

    def _cancel(self, writer: ReplyWriter) -> None:
        writer.error(cancelled("by the test", "running"))
        self.is_recovered = self.is_over = True
        self.outcome = "cancelled"

    async def _hand_over(self, entry: Entry, writer: ReplyWriter) -> None:
        script, self.is_robbed = self.worker.scripts.hand_over, True
        status = await script(entry.lane, entry.entry_id, writer.job_id, idle_ms=60_000, is_urgent=False)
        self.must_hand_over = False
        if status is not SettleStatus.GONE and self.writer is writer:
            self.forget()

    async def _leave(self, entry: Entry, status: ReplyStatus) -> None:
        """Whoever is fenced doesn't settle; whoever settles is asked by the script whether the entry is theirs."""
        if status is not ReplyStatus.FENCED:
            if self.will_lose_settling:
                self.will_lose_settling, self.worker.commands.lose_after = False, True
            await self.worker.scripts.settle(
                entry.lane,
                entry.entry_id,
                self.worker.envelope(entry).id,
                outcome="abandoned" if status is ReplyStatus.ABANDONED else self.outcome,
                result_ttl_ms=RESULT_TTL_MS,
            )
        elif self.writer is not None:
            self._look_who_fences(entry, self.writer)
        self.forget()

    def _look_who_fences(self, entry: Entry, writer: ReplyWriter) -> None:
        """A later attempt is that of a later owner, unless the server forgot ours and the reply ended without us."""
        keys = self.worker.keys
        newest = self._raw.call("XREVRANGE", keys.reply(writer.job_id), "+", "-", "COUNT", 1)
        if newest and newest[0][0].endswith(f"-{TERMINAL_SEQ}".encode()):
            return
        self._check_loss(f"it was fenced in attempt {writer.attempt}")
        owner, _ = self._raw.pending(keys.jobs(entry.lane)).get(entry.entry_id, ("", 0))
        if owner == self.worker.name:
            self.found.append(f"{owner} has the entry and was fenced in attempt {writer.attempt}")

    def _check_loss(self, what: str) -> None:
        if not self.is_robbed:
            self.found.append(f"{self.worker.name} was not robbed, but {what}")

    def _on_loss(self, entry: Entry, loss: Loss) -> None:
        if loss is Loss.LOST:
            self._check_loss("it lost its lease")
            self.forget()
        elif self.writer is not None:
            self.worker.replies.doubt(self.writer)

    def forget(self) -> None:
        """Lets go of whatever it is at."""
        if self.writer is not None:
            self.worker.replies.discard(self.writer)
        if self.entry is not None:
            self.worker.leases.release(self.entry.key)
        self.entry = self.writer = None
        self.was_ended = False
