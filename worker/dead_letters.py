"""Keeping the entries of jobs that can't be answered, or that were given up."""

from dataclasses import replace

import structlog

from worker.errors import ErrorCode
from worker.queue_links import QueueLinks
from worker.streams.errors import ServerError
from worker.streams.leases import Entry
from worker.streams.outcomes import persist
from worker.streams.recovery import read_workers
from worker.streams.registry import add_dead_letter

log = structlog.get_logger(__name__)


async def keep_dead_letter(
    links: QueueLinks, entry: Entry, code: ErrorCode, *, max_wait_s: float, opened_id: str | None = None
) -> bool:
    """Whether a dead letter of the entry is kept: not where its stream's key holds something else.

    `opened_id` is the job's id where its reply was opened for this entry: the reply says who has had the job, and each
    of them was a delivery, beside those since the last open. Repeated until it is answered, with waits up to
    `max_wait_s`. Raises ServerError.
    """
    try:
        workers: list[str] = []
        if opened_id is not None:
            workers = await persist(lambda: read_workers(links.commands, links.keys.reply(opened_id)), cap_s=max_wait_s)
        all_told = replace(entry, deliveries=entry.deliveries + max(0, len(workers) - 1))
        names = list(dict.fromkeys(workers))
        await persist(
            lambda: add_dead_letter(links.commands, links.keys, all_told, error=str(code), workers=names),
            cap_s=max_wait_s,
        )
    except ServerError as error:
        if not error.is_wrong_type:
            raise
        log.error("dead_letter_lost", key=links.keys.dead, lane=entry.lane, entry_id=entry.entry_id, code=str(code))
        return False
    return True
