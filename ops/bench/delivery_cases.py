"""What is measured of delivery: each function one experiment, with a queue and workers of its own."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ops.bench.delivery_parts import PATIENCE_S, Client, ScriptedWorker
from ops.bench.errors import BenchError
from ops.bench.scripted_engine import BLOCK_SIZE
from worker.streams.connection import Link
from worker.streams.jobs import SourceOptions
from worker.streams.keys import GROUP, QueueKeys
from worker.streams.leases import Entry, Leases
from worker.streams.scripts import Scripts

NUM_LEASES: Final = 256
# Sequences whose events a step writes in one pipeline, and how long such a step takes.
STREAMING_SEQS: Final = 256
STREAMING_STEP_MS: Final = 40.0
# More than any of them says while it is measured.
STREAMING_TOKENS: Final = 4000
# A job's reply in the experiment about memory expires this long after its end.
SHORT_TTL_MS: Final = 1
# How many jobs are in the queue at a time there, and when its memory is looked at first.
MAX_WAITING: Final = 256
SETTLE_S: Final = 20.0
TAKEOVER_STEP_MS: Final = 40.0
# Tokens that each job must have said before its worker is killed, and says afterwards.
TAKEOVER_TOKENS: Final = 5
TAKEOVER_MAX_TOKENS: Final = 800
# Tokens of its prompt where there is a model to compute them: what chats have in the mean.
TAKEOVER_PROMPT: Final = 120


@dataclass(frozen=True, slots=True)
class Place:
    """Where the experiments are made: a server that serves nobody else, a checkpoint for its tokenizer, a folder."""

    url: str
    model: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Streaming:
    """Token events that one worker wrote: their number, seconds on the wall, and its service's processor time."""

    num_events: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The server's memory before and after so many jobs, with all of their keys gone, and how long they took."""

    num_jobs: int
    num_left: int
    before_bytes: int
    after_bytes: int
    jobs_s: float


@dataclass(frozen=True, slots=True)
class Takeover:
    """A worker killed with jobs in flight. Seconds from the kill to a peer's first and last open; of each job the
    longest time between two of its events, as its client sees them."""

    first_claim_s: float
    last_claim_s: float
    gaps_s: list[float]
    bound_s: float


def measure_pickup(place: Place, num_jobs: int, seed: int = 0) -> list[float]:
    """Milliseconds from just before XADD to the first schedule, of jobs that an idle worker gets one by one."""
    rng = random.Random(seed)
    sent_ns: dict[str, int] = {}
    with ScriptedWorker(place.url, "pickup", place.model, place.folder, step_ms=1) as worker:
        with Client(place.url, "pickup") as client:
            for number in range(num_jobs):
                time.sleep(rng.uniform(0.005, 0.03))  # no rhythm, or all would come at the same point of its reads
                sent_ns[f"p{number}"] = time.monotonic_ns()
                client.send(f"p{number}", max_tokens=1)
                client.wait(f"p{number}")
        scheduled_ns = worker.scheduled_ns()
    return [(scheduled_ns[job_id] - at_ns) / 1e6 for job_id, at_ns in sent_ns.items()]


def measure_streaming(place: Place, seconds: float, num_seqs: int = STREAMING_SEQS) -> Streaming:
    """For so long, what a worker writes with `num_seqs` jobs in every step, none of which ends meanwhile."""
    num_blocks = num_seqs * (1 + STREAMING_TOKENS // BLOCK_SIZE)
    options = {"step_ms": STREAMING_STEP_MS, "max_num_seqs": num_seqs, "num_kv_blocks": num_blocks}
    job_ids = [f"s{number}" for number in range(num_seqs)]
    with (
        ScriptedWorker(place.url, "streaming", place.model, place.folder, **options) as worker,
        Client(place.url, "streaming") as client,
    ):
        for job_id in job_ids:
            client.send(job_id, max_tokens=STREAMING_TOKENS)
        client.follow(job_ids, lambda _, event: event["e"] == "token")
        num_before, began, cpu_before_s = _num_events(client, job_ids), time.monotonic(), worker.service_cpu_s()
        time.sleep(seconds)
        num_events = _num_events(client, job_ids) - num_before
        wall_s, cpu_s = time.monotonic() - began, worker.service_cpu_s() - cpu_before_s
        worker.kill()
    return Streaming(num_events, wall_s, cpu_s)


def _num_events(client: Client, job_ids: list[str]) -> int:
    return sum(client.call("XLEN", client.keys.reply(job_id)) for job_id in job_ids)


def measure_renewal(place: Place, num_rounds: int) -> list[float]:
    """Milliseconds that renewing NUM_LEASES leases takes, each round."""
    return asyncio.run(_renew(place.url, num_rounds))


async def _renew(url: str, num_rounds: int) -> list[float]:
    keys, link, times = QueueKeys("renewal"), Link(url, "leases"), []
    try:
        await link.call("XGROUP", "CREATE", keys.jobs("normal"), GROUP, "0", "MKSTREAM")
        leases = Leases(Scripts(link, keys, "worker"), lease_ms=30_000)
        await link.batch([("XADD", keys.jobs("normal"), "*", "prompt", "x")] * NUM_LEASES)
        read = ("XREADGROUP", "GROUP", GROUP, "worker", "COUNT", NUM_LEASES, "STREAMS", keys.jobs("normal"), ">")
        ((_, entries),) = await link.call(*read)
        leases.hold_new(Entry("normal", entry_id.decode(), {}) for entry_id, _ in entries)
        for _ in range(num_rounds + 1):  # the first loads the script
            began = time.perf_counter()
            if losses := await leases.renew():
                raise BenchError(f"{len(losses)} leases could not be renewed")
            times.append((time.perf_counter() - began) * 1000)
    finally:
        await link.close()
    return times[1:]


def measure_memory(place: Place, num_jobs: int) -> Memory:
    """Run `num_jobs` jobs after a tenth as many, and wait until nothing of them is left. Empties the server first."""
    with Client(place.url, "memory") as client:
        client.call("FLUSHALL")
    with (
        ScriptedWorker(place.url, "memory", place.model, place.folder, step_ms=0, max_num_seqs=64),
        Client(place.url, "memory") as client,
    ):
        _run_jobs(client, "warm-up", num_jobs // 10)
        before = _resting_bytes(client, None)
        began = time.monotonic()
        _run_jobs(client, "measured", num_jobs)
        jobs_s = time.monotonic() - began
        after = _resting_bytes(client, before)
        return Memory(num_jobs, client.num_queued(), before, after, jobs_s)


def _run_jobs(client: Client, name: str, num_jobs: int) -> None:
    for number in range(num_jobs):
        client.send(f"{name}-{number}", max_tokens=2, result_ttl_ms=SHORT_TTL_MS)
        if number % (MAX_WAITING // 2) == 0:
            _wait_until(lambda: client.num_queued() < MAX_WAITING, "the queue to become shorter")
    _wait_until(lambda: client.num_queued() == 0, "the queue to become empty")


def _resting_bytes(client: Client, enough: int | None) -> int:
    """The memory in use once no key of a job is left: the least within a while, or what is not above `enough`."""
    _wait_until(lambda: client.call("DBSIZE") <= len(_lasting(client)), "replies to expire")
    least, deadline = client.info("memory", "used_memory"), time.monotonic() + (SETTLE_S if enough else 2.0)
    while time.monotonic() < deadline and not (enough and least <= enough):
        time.sleep(0.05)  # the server counts buffers of its clients, which come and go
        least = min(least, client.info("memory", "used_memory"))
    return least


def _lasting(client: Client) -> list[bytes]:
    """Keys that don't belong to a job."""
    return [key for key in client.call("KEYS", "*") if b":reply:" not in key and b":state:" not in key]


def measure_takeover(place: Place, num_jobs: int, lease_ms: int, *, has_model: bool = False) -> Takeover:
    """Kill the worker of `num_jobs` jobs while an idle peer is there.

    With the model each prompt, of TAKEOVER_PROMPT tokens, is computed by the peer in a step of its own: quarantine.
    """
    settings = {"lease_ms": lease_ms, "max_num_seqs": max(8, num_jobs), "num_kv_blocks": 64 * num_jobs}
    options: dict[str, Any] = {"step_ms": None if has_model else TAKEOVER_STEP_MS, **settings}
    rng = random.Random(0)
    job_ids = [f"t{number}" for number in range(num_jobs)]
    seen_s: dict[str, list[float]] = {job_id: [] for job_id in job_ids}
    claimed_s: list[float] = []
    with (
        ScriptedWorker(place.url, "takeover", place.model, place.folder, **options) as first,
        Client(place.url, "takeover") as client,
    ):
        for job_id in job_ids:
            prompt = [rng.randrange(1, 250) for _ in range(TAKEOVER_PROMPT if has_model else 3)]
            client.send(job_id, max_tokens=TAKEOVER_MAX_TOKENS, tokens=prompt)
        client.follow(job_ids, lambda _, event: int(event.get("n", 0)) >= TAKEOVER_TOKENS)
        with ScriptedWorker(place.url, "takeover", place.model, place.folder, shutdown_grace_s=0, **options) as peer:
            first.kill()
            killed_s = time.monotonic()
            num_later = dict.fromkeys(job_ids, -1)

            def on_event(job_id: str, event: dict[str, str]) -> bool:
                seen_s[job_id].append(time.monotonic())
                if event["e"] == "open" and event["worker"] == peer.worker_id:
                    claimed_s.append(time.monotonic() - killed_s)
                    num_later[job_id] = 0
                elif num_later[job_id] >= 0:
                    num_later[job_id] += 1
                return num_later[job_id] > TAKEOVER_TOKENS

            client.follow(job_ids, on_event)
    gaps_s = [max(late - early for early, late in pairwise(at)) for at in seen_s.values()]
    scan_s = SourceOptions(lease_ms=lease_ms).scan_ms / 1000
    return Takeover(min(claimed_s), max(claimed_s), gaps_s, lease_ms / 1000 + scan_s)


def _wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise BenchError(f"waited {PATIENCE_S:.0f} s for {what}")
        time.sleep(0.005)
