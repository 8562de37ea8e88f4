"""How a job leaves this worker: settled, dropped, or handed to a peer. And the large prompts that jobs name."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from worker.errors import ErrorCode, JobError
from worker.protocol_envelope import JobEnvelope
from worker.streams.connection import Backoff, Link
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.health import tell
from worker.streams.keys import QueueKeys, lot_of
from worker.streams.leases import Entry, Leases
from worker.streams.scripts import Scripts, SettleStatus

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")


class Outcomes:
    """Ends this worker's hold on entries and releases their leases.

    Each call is repeated until it is answered, across lost connections and a full server, since each may be: a second
    settle finds GONE. Cancel the task to give up; the lease then runs out and a peer finds the reply ended.
    """

    def __init__(self, scripts: Scripts, leases: Leases, lease_ms: int) -> None:
        self._scripts = scripts
        self._leases = leases
        self._lease_ms = lease_ms
        # Called whenever an entry is held no longer.
        self.on_released: Callable[[], None] = lambda: None

    async def settle(
        self,
        envelope: JobEnvelope,
        outcome: str,
        *,
        record: Mapping[str, str] | None = None,
        keep_prompt: bool = False,
    ) -> SettleStatus:
        """Takes the job off the queue. Its terminal event must be written (or its reply deleted by the client).

        UNENDED: the server has lost that event. The job is not held any more, and is taken again after its lease.

        `outcome` is `done`, an error code, or "" to leave the record's; `keep_prompt` where a dead letter names it.
        """
        held = self._held(envelope)
        status = await self._persist(
            lambda: self._scripts.settle(
                envelope.lane,
                envelope.entry_id,
                envelope.id,
                outcome=outcome,
                result_ttl_ms=envelope.result_ttl_ms,
                prompt_ref=None if keep_prompt else envelope.prompt_ref,
                record=record,
            )
        )
        self._release(held)
        return status

    async def blame(self, envelope: JobEnvelope, *, crashes: int, solo: int, is_alone: bool) -> SettleStatus:
        """Writes into the job's record how often it died, and whether it runs alone. It stays ours."""
        return await self._persist(
            lambda: self._scripts.blame(
                envelope.lane, envelope.entry_id, envelope.id, crashes=crashes, solo=solo, is_alone=is_alone
            )
        )

    async def drop(self, entry: Entry) -> bool:
        """Takes a duplicate or a conflict off the queue and touches nothing of the first entry's."""
        held = self._leases.held(entry.key)
        is_done = await self._persist(lambda: self._scripts.drop(entry.lane, entry.entry_id))
        self._release(held)
        return is_done

    async def hand_over(self, envelope: JobEnvelope, *, wait_ms: int | None = None) -> SettleStatus:
        """Gives the job to a peer at once, or not before `wait_ms` (at most a lease).

        Everything of its reply that is gathered must be written before, and nothing may be written after, but for
        GONE: no peer can take it, so it is still held, and has to end here.
        """
        idle_ms = 10 * self._lease_ms if wait_ms is None else max(0, self._lease_ms - wait_ms)
        held = self._held(envelope)
        status = await self._persist(
            lambda: self._scripts.hand_over(
                envelope.lane, envelope.entry_id, envelope.id, idle_ms=idle_ms, is_urgent=wait_ms is None
            )
        )
        if status is not SettleStatus.GONE:
            self._release(held)
        return status

    async def put_aside(self, envelope: JobEnvelope) -> None:
        """Lets a job that was not opened wait in its tenant's lot, without a mark against it.

        It has been idle for no time there, and is touched before it looks dead (see `Backlog`).
        """
        held = self._held(envelope)
        await self._persist(
            lambda: self._scripts.hand_over(
                envelope.lane,
                envelope.entry_id,
                envelope.id,
                idle_ms=0,
                is_urgent=False,
                consumer=lot_of(envelope.tenant.encode()),
            )
        )
        self._release(held)

    def _held(self, envelope: JobEnvelope) -> Entry | None:
        return self._leases.held((envelope.lane, envelope.entry_id))

    def _release(self, held: Entry | None) -> None:
        """What was held when the server was asked: by now the entry may have come anew, from whoever got it."""
        if held is not None:
            self._leases.forget(held)
        self.on_released()

    async def _persist(self, call: Callable[[], Awaitable[_Answer]]) -> _Answer:
        return await persist(call, cap_s=self._lease_ms / 6000)


async def persist(call: Callable[[], Awaitable[_Answer]], *, cap_s: float) -> _Answer:
    """Repeats `call` until it is answered, with waits up to `cap_s`. Raises ServerError for lasting errors.

    Only for calls that may be carried out twice.
    """
    backoff = Backoff(cap_s)
    while True:
        try:
            return await call()
        except ConnectionLostError as error:
            tell(log, "redis_call_repeated", error)
        except ServerError as error:
            if not error.is_temporary:
                raise
            tell(log, "redis_call_repeated", error)
        await backoff.wait()


async def fetch_prompt(link: Link, keys: QueueKeys, name: str, max_bytes: int) -> bytes:
    """The prompt that a job's `prompt_ref` names. Raises JobError, or StreamsError where Redis can't be asked.

    Its length is asked first, so that nothing huge is ever read; the answers are one after the other, so a longer
    string that is put there in between is refused as well.
    """
    length, value = 0, None
    try:
        length = await link.call("STRLEN", keys.prompt(name))
        if 0 < length <= max_bytes:
            value = await link.call("GET", keys.prompt(name))
            length = len(value or b"")
    except ServerError as error:
        if not error.is_wrong_type:
            raise
        raise JobError(ErrorCode.BAD_REQUEST, f"prompt_ref {name} names no string: SET it (with EX)") from error
    if length > max_bytes:
        raise JobError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"the prompt of prompt_ref {name} has {length} bytes, {max_bytes} are allowed: shorten it",
            {"bytes": length, "max_bytes": max_bytes},
        )
    if value is None:
        raise JobError(
            ErrorCode.BAD_REQUEST,
            f"prompt_ref {name} names no prompt, or an empty one: SET it (with EX) before the XADD",
        )
    return bytes(value)
