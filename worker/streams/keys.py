"""All key names of one queue. `{Q}` is a Cluster hash tag, so the keys of a queue share a slot."""

import hashlib
import re
from dataclasses import dataclass

from worker.errors import StartupError

LANES = ("high", "normal", "low")
GROUP = "workers"
# The consumer that handed-over entries wait under; never deleted, since deleting a consumer destroys what it holds.
HANDOVER = "handover"
# A tenant's entries wait under this and 16 hex digits of its name's SHA-1; no worker's id is like that.
LOT_PREFIX = "tenant."
# The sequence number of a reply's terminal event: the largest there is, so Redis refuses anything after it.
TERMINAL_SEQ = 18446744073709551615

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Key names of the queue `queue`. Raises StartupError where that name can't be part of a key."""

    queue: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.queue):
            raise StartupError(f"queue name {self.queue[:80]!r} can't be used: use 1 to 64 of A-Z a-z 0-9 _ . -")

    def _key(self, rest: str) -> str:
        return f"pagemill:{{{self.queue}}}:{rest}"

    def jobs(self, lane: str) -> str:
        """Stream of one lane."""
        return self._key(f"jobs:{lane}")

    @property
    def lanes(self) -> list[str]:
        """Streams of all lanes, in the order of LANES."""
        return [self.jobs(lane) for lane in LANES]

    def reply(self, job_id: str) -> str:
        """Stream of one job's events."""
        return self._key(f"reply:{job_id}")

    def cancel(self, job_id: str) -> str:
        """Cancel mark: a string, its value the reason."""
        return self._key(f"cancel:{job_id}")

    def prompt(self, name: str) -> str:
        """A large prompt, named by a job's `prompt_ref`."""
        return self._key(f"prompt:{name}")

    def state(self, job_id: str) -> str:
        """Hash of one job's record."""
        return self._key(f"state:{job_id}")

    def running(self, tenant: str) -> str:
        """Sorted set of a tenant's entries that were begun, LANE/ENTRYID, where their number is limited."""
        return self._key(f"tenant:running:{tenant}")

    def rate(self, tenant: str) -> str:
        """String: the server's time up to which a tenant's jobs use its rate up."""
        return self._key(f"tenant:rate:{tenant}")

    def token_rate(self, tenant: str) -> str:
        """String: the same for its tokens."""
        return self._key(f"tenant:tokens:{tenant}")

    @property
    def control(self) -> str:
        """Stream of wake-ups."""
        return self._key("control")

    @property
    def dead(self) -> str:
        """Stream of dead letters."""
        return self._key("dead")

    @property
    def workers(self) -> str:
        """Sorted set of worker ids, scored with the server's time of the last beat."""
        return self._key("workers")

    def worker(self, worker_id: str) -> str:
        """Hash of one worker's last beat."""
        return self._key(f"worker:{worker_id}")

    @property
    def config(self) -> str:
        """Hash that operators write."""
        return self._key("config")


def lot_of(tenant: bytes) -> str:
    """The consumer's name that a tenant's entries wait under where it is not their turn."""
    return LOT_PREFIX + hashlib.sha1(tenant, usedforsecurity=False).hexdigest()[:16]


def is_waiting_name(consumer: str) -> bool:
    """Whether what is pending under this name waits for a worker: in a tenant's lot, or handed over."""
    return consumer == HANDOVER or re.fullmatch(r"tenant\.[0-9a-f]+", consumer) is not None
