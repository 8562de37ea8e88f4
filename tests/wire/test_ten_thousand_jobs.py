"""Nothing of a job stays on the server: neither its entry, nor anything that grows with the number of jobs."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import SERVER_BINARIES, server_command
from tests.wire.resp import RespClient
from tests.wire.stepped import SteppedLink
from tests.wire.workers import TestWorker
from worker.embedded import EmbeddedServer
from worker.streams.keys import LANES, QueueKeys
from worker.streams.reply_writer import ReplyStatus, ReplyWriter
from worker.streams.scripts import SettleStatus

NUM_JOBS = 10_000
# So many make what stays whatever the number of jobs: streams, group, consumer, scripts.
NUM_BEFORE = 1_000
MAX_GROWTH = 1.05
PATIENCE_S = 30.0


@pytest.fixture(params=list(SERVER_BINARIES))
def own_raw(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, RespClient]]:
    """A server that nobody else uses, whose memory says something: its URL and a client."""
    extra = {"appendonly": "no"}
    with EmbeddedServer(tmp_path, server_command(request.param), extra) as server, RespClient(server.url) as raw:
        yield server.url, raw


async def run_jobs(worker: TestWorker, raw: RespClient, num_jobs: int) -> None:
    """Send so many jobs, on all lanes, and do all that a worker does, but for computing."""
    for start in range(0, num_jobs, 100):
        jobs = [(LANES[n % 3], f"{num_jobs}-{start + n}") for n in range(100)]
        raw.pipeline(
            *(
                ("XADD", worker.keys.jobs(lane), "*", "id", each, "prompt", "x", "result_ttl_ms", 1)
                for lane, each in jobs
            )
        )
        num_settled = 0
        while num_settled < len(jobs):
            entries = await worker.source.take(8)
            writers: list[ReplyWriter] = [await worker.open(entry) for entry in entries]
            for writer in writers:
                writer.token([1, 2], "ab")
            await worker.replies.flush()
            for writer in writers:
                writer.end("length", usage={}, receipt={})
            await worker.replies.flush()
            for entry, writer in zip(entries, writers, strict=True):
                assert writer.status is ReplyStatus.ENDED
                assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.DONE
            num_settled += len(entries)


def resting_bytes(raw: RespClient, keys: QueueKeys, enough: float = 0.0) -> int:
    """The memory in use when the replies have expired; waits a while for what is `enough`."""
    deadline = time.monotonic() + PATIENCE_S
    while raw.call("DBSIZE") > len(LANES) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(raw.call("KEYS", "*")) == sorted(key.encode() for key in keys.lanes)
    while True:
        lines = raw.call("INFO", "memory").decode().splitlines()
        used = int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])
        if used <= enough or not enough or time.monotonic() > deadline:
            return used
        time.sleep(0.01)


async def test_after_ten_thousand_jobs_the_lanes_are_empty_and_the_memory_is_what_it_was(
    own_raw: tuple[str, RespClient], keys: QueueKeys
) -> None:
    url, raw = own_raw
    worker = TestWorker(url, keys, "w", lambda url, name, queue: SteppedLink(raw, url, name, queue))
    await worker.source.ensure_groups()
    await run_jobs(worker, raw, NUM_BEFORE)
    before = resting_bytes(raw, keys)
    await run_jobs(worker, raw, NUM_JOBS)
    assert [raw.call("XLEN", key) for key in keys.lanes] == [0, 0, 0]
    assert [raw.pending(key) for key in keys.lanes] == [{}, {}, {}]
    after = resting_bytes(raw, keys, enough=MAX_GROWTH * before)
    assert after <= MAX_GROWTH * before, f"{before} bytes before, {after} after"
