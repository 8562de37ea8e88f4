"""Names keys of a queue that hold something else than the protocol says. Whoever uses such a key goes on without it."""

import time

import structlog

from worker.streams.connection import Command, Link
from worker.streams.errors import ServerError
from worker.streams.keys import LANES, QueueKeys

log = structlog.get_logger(__name__)

# Seconds until the same key is named again.
SAY_AGAIN_S = 60.0


class KeyCheck:
    """Looks at the keys that all jobs share. Per-job keys are named by whoever stumbles over them.

    A worker has no right to TYPE, so each key gets a command that only its own type answers, and that costs nothing.
    """

    def __init__(self, keys: QueueKeys, worker_id: str) -> None:
        self._probes: list[tuple[str, str, str, Command]] = [
            *((keys.jobs(lane), "stream", "its jobs are not taken", ("XLEN", keys.jobs(lane))) for lane in LANES),
            (keys.control, "stream", "hints are not heard, so cancelling takes longer", ("XLEN", keys.control)),
            (keys.dead, "stream", "dead letters are lost", ("XLEN", keys.dead)),
            (keys.workers, "zset", "workers are not listed", ("ZRANGE", keys.workers, 0, 0)),
            (keys.worker(worker_id), "hash", "this worker is not shown", ("HGET", keys.worker(worker_id), "beat")),
            (keys.config, "hash", "what operators set last goes on to apply", ("HGET", keys.config, "paused")),
        ]
        self._said_at: dict[str, float] = {}

    async def look(self, link: Link) -> list[str]:
        """The keys that hold something else; each is logged now and then. Raises ConnectionLostError."""
        answers = await link.batch([command for *_, command in self._probes])
        wrong = []
        for (key, wanted, effect, _), answer in zip(self._probes, answers, strict=True):
            if not (isinstance(answer, ServerError) and answer.is_wrong_type):
                self._said_at.pop(key, None)
                continue
            wrong.append(key)
            now = time.monotonic()
            if now - self._said_at.get(key, -SAY_AGAIN_S) >= SAY_AGAIN_S:
                self._said_at[key] = now
                advice = "look at what it holds, then RENAME or DEL it"
                log.error("key_of_wrong_type", key=key, wanted=wanted, effect=effect, advice=advice)
        return wrong
