"""The registry of workers, wake-ups, cancel marks, the operators' settings and dead letters."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import structlog

from worker.streams.clock import ServerClock
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ServerError, StreamsError
from worker.streams.health import tell
from worker.streams.key_check import KeyCheck
from worker.streams.keys import LANES, QueueKeys
from worker.streams.leases import Entry
from worker.streams.scripts import Scripts

log = structlog.get_logger(__name__)

NUM_BEATS_UNTIL_FORGOTTEN = 3
UNUSED_CONSUMER_MS = 3600 * 1000
MAX_FORGOTTEN_PER_BEAT = 1000
CONTROL_BLOCK_MS = 2000
MAX_DEAD_LETTERS = 1000
MAX_DEAD_FIELD_BYTES = 64 * 1024

Beat = Mapping[str, str | int | float]


class Registry:
    """This worker's entry in the registry, and the housekeeping that goes with a beat."""

    def __init__(
        self, link: Link, scripts: Scripts, keys: QueueKeys, worker_id: str, clock: ServerClock, beat_ms: int
    ) -> None:
        self._link = link
        self._scripts = scripts
        self._keys = keys
        self._worker_id = worker_id
        self._clock = clock
        self._beat_ms = beat_ms
        self._key_check = KeyCheck(keys, worker_id)

    async def beat(self, fields: Beat) -> None:
        """Writes `fields` (model, version, slots, running, ...); they expire after three missed beats.

        Workers that missed as many are forgotten; keys of the queue that hold something else are named in the log.
        """
        await self._clock.sync(self._link)
        await self._key_check.look(self._link)
        await self._scripts.beat(expiry_ms=NUM_BEATS_UNTIL_FORGOTTEN * self._beat_ms, fields=fields)
        await self._forget_silent_workers()

    async def leave(self) -> None:
        """Takes this worker out of the registry, and what told it to stop out of the config: no other has its name."""
        await self._link.batch(
            [
                ("ZREM", self._keys.workers, self._worker_id),
                ("DEL", self._keys.worker(self._worker_id)),
                ("HDEL", self._keys.config, f"drain:{self._worker_id}"),
            ]
        )

    async def sweep(self) -> None:
        """Removes consumer names that were silent for an hour."""
        for lane in LANES:
            await self._scripts.sweep_consumers(lane, idle_ms=UNUSED_CONSUMER_MS)

    async def _forget_silent_workers(self) -> None:
        """Removes workers whose hash has expired from the registry: the expiry knows how often that worker beats."""
        oldest = self._clock.now_ms() - NUM_BEATS_UNTIL_FORGOTTEN * self._beat_ms
        late = ("ZRANGEBYSCORE", self._keys.workers, "-inf", oldest, "LIMIT", 0, MAX_FORGOTTEN_PER_BEAT)
        try:
            names = await self._link.call(*late)
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            return
        if not names:
            return
        prefix = self._keys.worker("").encode()
        exist = await self._link.batch([("EXISTS", prefix + name) for name in names])
        silent = [name for name, is_there in zip(names, exist, strict=True) if is_there == 0]
        if silent:
            await self._link.call("ZREM", self._keys.workers, *silent)

    async def run(self, collect: Callable[[], Beat]) -> None:
        """Beats until cancelled, and sweeps now and then."""
        backoff = Backoff(self._beat_ms / 1000)
        num_beats = 0
        while True:
            try:
                await self.beat(collect())
                if num_beats % 100 == 1:
                    await self.sweep()
                num_beats += 1
                backoff.reset()
                await asyncio.sleep(self._beat_ms / 1000)
            except StreamsError as error:
                tell(log, "heartbeat_failed", error, worker=self._worker_id)
                await backoff.wait()


@dataclass(frozen=True, slots=True)
class Hint:
    """A wake-up: `op` is cancel, reclaim or config; it does nothing but make a worker look. `job_id` may be empty."""

    op: str
    job_id: str = ""


class ControlReader:
    """Reads the control stream over a link of its own, without a group: every worker sees every hint."""

    def __init__(self, link: Link, keys: QueueKeys, block_ms: int = CONTROL_BLOCK_MS) -> None:
        self._link = link
        self._keys = keys
        self._block_ms = block_ms
        self._last_id: bytes | None = None

    async def read(self) -> list[Hint]:
        """The next hints; waits up to `block_ms`. The first call begins at the stream's end. Raises StreamsError."""
        try:
            if self._last_id is None:
                newest = await self._link.call("XREVRANGE", self._keys.control, "+", "-", "COUNT", 1)
                self._last_id = newest[0][0] if newest else b"0-0"
            answer = await self._link.call(
                *("XREAD", "COUNT", 256, "BLOCK", self._block_ms, "STREAMS", self._keys.control, self._last_id)
            )
        except ServerError as error:
            if not error.is_wrong_type:
                raise
            # Hints only hasten what is looked at anyway, so without them nothing is lost.
            await asyncio.sleep(self._block_ms / 1000)
            return []
        if not answer:
            return []
        entries = answer[0][1]
        self._last_id = entries[-1][0]
        return [_hint_of(flat) for _, flat in entries]


class CancelMarks:
    """Looks for the durable cancel marks of jobs."""

    def __init__(self, link: Link, keys: QueueKeys) -> None:
        self._link = link
        self._keys = keys

    async def check(self, job_ids: Collection[str]) -> dict[str, str]:
        """Reasons by job id, for those of `job_ids` that have a mark; one pipeline. Raises StreamsError."""
        ids = list(job_ids)
        if not ids:
            return {}
        answers = await self._link.batch([("GET", self._keys.cancel(job_id)) for job_id in ids])
        marks: dict[str, str] = {}
        for job_id, answer in zip(ids, answers, strict=True):
            if isinstance(answer, ServerError):
                if not answer.is_wrong_type:
                    raise answer
                # A mark of another type is a mark all the same.
                log.warning("cancel_mark_of_wrong_type", key=self._keys.cancel(job_id), advice="use SET with EX")
                marks[job_id] = ""
            elif answer is not None:
                marks[job_id] = answer.decode("utf-8", "replace")
        return marks


async def read_config(link: Link, keys: QueueKeys) -> dict[str, str]:
    """The operators' settings of this queue, names to values. Raises StreamsError, as where its key is no hash."""
    flat = await link.call("HGETALL", keys.config)
    return {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, value in zip(flat[::2], flat[1::2], strict=False)
    }


async def add_dead_letter(
    link: Link, keys: QueueKeys, entry: Entry, *, error: str, workers: Collection[str] = ()
) -> None:
    """Keeps a job that can't be answered, or that was given up: its own fields, and why. Raises StreamsError.

    Each field is cut at 64 KiB; the names of those that were cut are in `cut`. The oldest letters go beyond 1000.
    """
    fields: list[bytes | str | int] = []
    cut: list[bytes] = []
    for name, value in entry.fields.items():
        short_name = name[:256]
        if len(value) > MAX_DEAD_FIELD_BYTES or short_name != name:
            cut.append(short_name)
        fields += [short_name, value[:MAX_DEAD_FIELD_BYTES]]
    fields += ["error", error, "deliveries", entry.deliveries, "workers", ",".join(workers)]
    fields += ["source_id", f"{entry.lane}/{entry.entry_id}"]
    if cut:
        fields += ["cut", b",".join(cut)]
    await link.call("XADD", keys.dead, "MAXLEN", MAX_DEAD_LETTERS, "*", *fields)


def _hint_of(flat: list[bytes]) -> Hint:
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    return Hint(fields.get(b"op", b"").decode("ascii", "replace"), fields.get(b"id", b"").decode("ascii", "replace"))
