"""A thousand mixed jobs through one worker: one end each, nothing left over, and no memory that grows."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.test_bad_input import BAD_JOBS
from tests.e2e.workers import Queue, WorkerProcess, eventually, rss_bytes
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.streams.keys import LANES

SEED = 314159
# But for those that are too long, since a larger KV cache holds some of them.
SMALL_BAD_JOBS = [
    flat
    for flat, code in BAD_JOBS.values()
    if sum(len(str(part)) for part in flat) < 10_000 and code != "context_too_long"
]


class Mix:
    """Sends jobs of every kind; remembers what must become of each."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self._queue = queue
        self._random = random.Random(seed)
        self.sent: dict[str, str] = {}

    def send(self, count: int) -> list[str]:
        """Enqueue `count` jobs: seven in ten good, one long and cancelled, two bad."""
        ids = []
        for _ in range(count):
            kind = self._random.choices(["good", "cancelled", "bad"], [7, 1, 2])[0]
            job_id = self._send_one(kind, self._random.choice(LANES))
            self.sent[job_id] = kind
            ids.append(job_id)
        return ids

    def _send_one(self, kind: str, lane: str) -> str:
        if kind == "bad":
            return self._queue.enqueue_fields(self._random.choice(SMALL_BAD_JOBS), lane)
        number = len(self.sent)
        if kind == "cancelled":
            job_id = self._queue.enqueue(lane, id=f"cancel-{number}", prompt="x", max_tokens=1900, ignore_eos=1)
            self._queue.cancel(job_id)
            return job_id
        shared = "You are a helpful assistant. " if self._random.random() < 0.5 else ""
        job: dict[str, Any] = {
            "prompt": shared + f"{number} " * self._random.randint(1, 60),
            "max_tokens": self._random.randint(1, 30),
            "temperature": self._random.choice(["0", "0.7", "1.3"]),
            "stream": self._random.choice([0, 1, 1]),
        }
        return self._queue.enqueue(lane, **job)


def used_blocks(worker: WorkerProcess) -> float:
    """Blocks that sequences own, by the worker's own metrics."""
    lines = worker.get("/metrics")[1].splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith('pagemill_kv_blocks{state="used"}')))


# Blocks of 32 KiB: of the default pool a thousand jobs use a part only, so memory that is taken as blocks are first
# written would grow by a quarter between the two marks.
LARGE_BLOCKS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
BLOCK_BYTES = 32 << 10
DEFAULTS: dict[str, Any] = {"num_kv_blocks": None, "max_num_seqs": None, "check_invariants": "idle"}


@pytest.mark.timeout(300)
def test_a_thousand_mixed_jobs_leave_nothing_behind(
    start_server: Callable[[str], str], own_queue: Queue, tmp_path: Path
) -> None:
    """With the pool that is made where nobody says how large."""
    model = write_tiny_checkpoint(tmp_path / "model", **LARGE_BLOCKS)
    url, keys = start_server("valkey-9.1"), own_queue.keys
    with WorkerProcess(model, url, keys.queue, tmp_path, metrics_port=0, **DEFAULTS) as worker:
        send_a_thousand(worker, own_queue)


def is_resident(pid: int, num_bytes: int) -> bool:
    """Whether one area of the process's memory, as large as that but for pages at its ends, is all there."""
    return any(area.rss >= 0.99 * num_bytes for area in psutil.Process(pid).memory_maps(grouped=False))


def send_a_thousand(worker: WorkerProcess, queue: Queue) -> None:
    """A thousand jobs, each with the end that it should have; resident memory after 300 and after all is the same."""
    pool_bytes = worker.wait_until_ready()["num_blocks"] * BLOCK_BYTES
    pids = (worker.process.pid, worker.engine().pid)
    if psutil.LINUX:  # elsewhere all of it is there from the start
        eventually(
            lambda: is_resident(pids[1], pool_bytes), f"{pool_bytes} bytes of KV cache to be there before any job"
        )
    mix = Mix(queue, SEED)
    after: dict[int, list[int]] = {}
    for total, wave in ((300, 100), (1000, 100)):
        while len(mix.sent) < total:
            for job_id in mix.send(wave):
                queue.wait(job_id)
        queue.assert_settled()
        after[total] = [rss_bytes(pid) for pid in pids]
    assert len(mix.sent) == 1000
    for job_id, kind in mix.sent.items():
        terminal = queue.reply(job_id).terminal
        if kind == "good":
            assert terminal["e"] == "end", f"{job_id} (seed {SEED}): {terminal}"
        elif kind == "bad":
            assert terminal["e"] == "error", f"{job_id} (seed {SEED}): {terminal}"
            assert terminal["code"] != "internal", f"{job_id} (seed {SEED}): {terminal}"
        else:
            assert terminal.get("code") == "cancelled", f"{job_id} (seed {SEED}): {terminal}"
    eventually(lambda: used_blocks(worker) == 0, "all blocks to be free or cached")
    for before, now in zip(after[300], after[1000], strict=True):
        assert now <= 1.05 * before, f"resident memory went from {before} to {now} bytes (seed {SEED})"
    assert pool_bytes > after[300][1] / 3, f"the pool of {pool_bytes} bytes is too small to tell growth by"
