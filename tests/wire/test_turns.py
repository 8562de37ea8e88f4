"""Whose turn it is: tenants that wait in one lane, and tenants that have to wait."""

from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker
from worker.errors import ErrorCode
from worker.streams.admission import Admission
from worker.streams.keys import LANES, lot_of
from worker.streams.leases import Entry
from worker.streams.overload import OldestWatch
from worker.streams.queue_config import parse_config
from worker.streams.turns import Turns

LONG_MS = 1_000_000


def with_turns(
    worker: TestWorker, config: Mapping[str, str] | None = None, *, is_fair: bool = True, lease_ms: int = LONG_MS
) -> Admission:
    """Has the worker's source ask whose turn it is."""
    oldest = OldestWatch(
        *(worker.commands, worker.scripts, worker.keys, worker.clock, worker.leases), touch_ms=LEASE_MS // 3
    )
    admission = Admission(worker.scripts, lease_ms=lease_ms, run_ttl_ms=60_000)
    admission.configure(parse_config(config or {}))
    worker.source.picker = Turns(oldest, admission, worker.leases, is_fair=is_fair)
    return admission


def flood(raw: RespClient, worker: TestWorker, tenant: str, num: int, lane: str = "normal") -> list[str]:
    """Jobs of one tenant, all at once."""
    command = ("XADD", worker.keys.jobs(lane), "*", "prompt", "x", "tenant", tenant)
    return [entry_id.decode() for entry_id in raw.pipeline(*[command] * num)]


async def serve(worker: TestWorker, num_slots: int, until: Callable[[Entry], bool]) -> list[Entry]:
    """Takes work into slots and ends the oldest job whenever all are in use; answers what was begun, in order."""
    begun: list[Entry] = []
    held: list[Entry] = []
    for _ in range(10_000):
        taken = await worker.source.take(num_slots - len(held))
        begun += taken
        held += taken
        if any(until(entry) for entry in taken):
            return begun
        if len(held) >= num_slots:
            await worker.outcomes.drop(held.pop(0))
    raise AssertionError(f"not in {len(begun)} jobs")


async def test_one_job_behind_a_flood_comes_next(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    with_turns(worker)
    flood(raw, worker, "a", 1000)
    flood(raw, worker, "b", 1)
    begun = await serve(worker, 4, lambda entry: entry.fields[b"tenant"] == b"b")
    num_completions = len(begun) - 4
    assert num_completions <= 2 * 4
    assert [entry.fields[b"tenant"] for entry in begun].count(b"b") == 1


async def test_without_fair_share_a_lane_is_first_in_first_out(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    with_turns(worker, is_fair=False)
    flood(raw, worker, "a", 30)
    flood(raw, worker, "b", 1)
    begun = await serve(worker, 4, lambda entry: entry.fields[b"tenant"] == b"b")
    assert Counter(entry.fields[b"tenant"] for entry in begun) == {b"a": 30, b"b": 1}


async def test_places_are_shared_by_weight_and_each_tenants_jobs_keep_their_order(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    with_turns(worker, {"tenant:a:weight": "3"})
    sent = {tenant: flood(raw, worker, tenant, 100) for tenant in ("a", "b")}
    begun = await serve(worker, 8, lambda entry: entry.entry_id == sent["a"][-1])
    counts = Counter(entry.fields[b"tenant"] for entry in begun)
    assert counts[b"a"] == 100
    assert 25 <= counts[b"b"] <= 42
    for tenant, ids in sent.items():
        served = [entry.entry_id for entry in begun if entry.fields[b"tenant"] == tenant.encode()]
        assert served == ids[: len(served)]
    assert {entry.deliveries for entry in begun} == {1}


async def test_what_was_passed_over_is_served_by_all_workers_and_lost_by_none(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    workers = [make_worker("w1"), make_worker("w2")]
    for worker in workers:
        with_turns(worker)
    ids = [entry_id for tenant in ("a", "b", "c") for entry_id in flood(raw, workers[0], tenant, 50)]
    served: list[str] = []
    for round_ in range(1000):
        worker = workers[round_ % 2]
        for entry in await worker.source.take(3):
            served.append(entry.entry_id)
            await worker.outcomes.drop(entry)
        if len(served) == len(ids):
            break
    assert sorted(served) == sorted(ids)
    key = workers[0].keys.jobs("normal")
    assert raw.call("XLEN", key) == 0
    names = {flat[1] for flat in raw.call("XINFO", "CONSUMERS", key, "workers")}
    assert names == {b"w1", b"w2"}, "an empty lot is gone"


async def test_a_lane_of_one_tenant_is_just_read(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    with_turns(worker)
    ids = flood(raw, worker, "a", 20)
    entries = await worker.take(8)
    assert [entry.entry_id for entry in entries] == ids[:8]
    consumers = raw.call("XINFO", "CONSUMERS", worker.keys.jobs("normal"), "workers")
    assert lot_of(b"a").encode() not in [flat[1] for flat in consumers]


async def admit(admission: Admission, worker: TestWorker, entry: Entry) -> str:
    refusal = await admission.admit(worker.envelope(entry))
    return "begins" if refusal is None else refusal.limit


async def test_no_more_jobs_of_a_tenant_run_than_it_may_whoever_runs_them(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    first, second = make_worker("w1"), make_worker("w2")
    limits = {"tenant:a:concurrency": "2"}
    one, two = with_turns(first, limits), with_turns(second, limits)
    flood(raw, first, "a", 4)
    mine, theirs = await first.take(2, room=2), await second.take(2, room=2)
    assert await admit(one, first, mine[0]) == "begins"
    assert await admit(two, second, theirs[0]) == "begins"
    assert await admit(one, first, mine[1]) == "concurrency"
    assert await admit(one, first, mine[0]) == "begins", "an answer may have been lost"
    assert await admit(two, second, theirs[1]) == "concurrency"
    await second.outcomes.drop(theirs[0])
    assert await admit(one, first, mine[1]) == "begins"
    flood(raw, first, "b", 1)
    assert await admit(two, second, (await second.take(1))[0]) == "begins"
    assert raw.call("PTTL", first.keys.running("a")) > 0


async def test_a_dead_workers_jobs_do_not_count(make_worker: MakeWorker, raw: RespClient) -> None:
    """Nor do those that were put back or handed over: nothing is counted up that a crash could leave."""
    dead, worker = make_worker("dead"), make_worker("w")
    limits = {"tenant:a:concurrency": "1"}
    admission = with_turns(worker, limits, lease_ms=LEASE_MS)
    flood(raw, dead, "a", 2)
    (lost,) = await dead.take(1, room=1)
    assert await admit(with_turns(dead, limits), dead, lost) == "begins"
    (entry,) = await worker.take(1, room=1)
    assert await admit(admission, worker, entry) == "concurrency"
    raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", "dead", 0, lost.entry_id, "IDLE", 2 * LEASE_MS, "JUSTID")
    assert await admit(admission, worker, entry) == "begins"
    await worker.outcomes.hand_over(worker.envelope(entry))
    (again,) = await worker.take(1, room=1)
    assert await admit(admission, worker, again) == "begins"


async def test_what_was_begun_goes_on_whatever_the_limits(make_worker: MakeWorker, raw: RespClient) -> None:
    former, worker = make_worker("former"), make_worker("w")
    admission = with_turns(worker, {"tenant:a:rate": "0.001", "tenant:a:concurrency": "1"})
    flood(raw, former, "a", 1)
    (entry,) = await former.take(1)
    await former.open(entry)
    flood(raw, worker, "a", 1)
    (other,) = await worker.take(1)
    assert await admit(admission, worker, other) == "begins"
    await former.outcomes.hand_over(former.envelope(entry))
    (again,) = await worker.take(1)
    assert await admit(admission, worker, again) == "begins"


async def test_a_rate_lets_a_seconds_worth_begin_at_once_and_tells_the_wait(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:rate": "4"})
    flood(raw, worker, "a", 8)
    verdicts = [await admission.admit(worker.envelope(entry)) for entry in await worker.take(8)]
    num_begun = sum(verdict is None for verdict in verdicts)
    assert 4 <= num_begun <= 8
    refused = [verdict for verdict in verdicts if verdict is not None]
    assert all(verdict.limit == "rate" and 0 < verdict.retry_after_ms <= 250 for verdict in refused)
    assert 0 < raw.call("PTTL", worker.keys.rate("a")) <= 3000


async def test_a_slow_rate_lets_one_begin(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:rate": "0.01"})
    flood(raw, worker, "a", 2)
    first, second = await worker.take(2)
    assert await admission.admit(worker.envelope(first)) is None
    refusal = await admission.admit(worker.envelope(second))
    assert refusal is not None
    assert 90_000 < refusal.retry_after_ms <= 100_000


async def test_tokens_are_paid_for_afterwards(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:token_rate": "100"})
    flood(raw, worker, "a", 2)
    first, second = await worker.take(2)
    assert await admission.admit(worker.envelope(first)) is None
    await admission.ended(worker.envelope(first), 1000)
    refusal = await admission.admit(worker.envelope(second))
    assert refusal is not None
    assert refusal.limit == "tokens"
    assert 8000 < refusal.retry_after_ms <= 9000
    assert 9000 < raw.call("PTTL", worker.keys.token_rate("a")) <= 11_000


async def test_a_tenant_that_has_to_wait_keeps_nobody_else_waiting(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:concurrency": "1"})
    sent = flood(raw, worker, "a", 100)
    running, *refused = await worker.take(3, room=3)
    assert await admit(admission, worker, running) == "begins"
    for entry in refused:
        assert await admit(admission, worker, entry) == "concurrency"
        await worker.outcomes.put_aside(worker.envelope(entry))
    assert await worker.source.take(4) == []
    assert await worker.source.take(4) == []
    (other,) = flood(raw, worker, "b", 1)
    assert [entry.entry_id for entry in await worker.take(1, room=4)] == [other]
    pending = raw.pending(worker.keys.jobs("normal"))
    assert pending == {running.entry_id: ("w", 1), other: ("w", 1)} | dict.fromkeys(sent[1:], (lot_of(b"a"), 0))
    await worker.outcomes.drop(running)
    await admission.ended(worker.envelope(running), 0)
    (next_,) = await worker.take(1, room=4)
    assert (next_.entry_id, next_.deliveries) == (sent[1], 1)


async def test_a_worker_with_room_sheds_only_what_has_to_wait(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:concurrency": "1"})
    waiting = flood(raw, worker, "a", 3)
    await worker.scripts.set_aside("normal", waiting[-1])
    admission._blocked_until[lot_of(b"a")] = float("inf")
    free = flood(raw, worker, "b", 3)
    assert isinstance(worker.source.picker, Turns)
    worker.source.picker._oldest.max_depth = 2
    taken = {entry.entry_id: entry.must_end for entry in await worker.take(6, room=8)}
    assert taken == dict.fromkeys(waiting, ErrorCode.OVERLOADED) | dict.fromkeys(free)


async def test_what_waits_in_a_lot_never_looks_dead_while_a_worker_lives(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    admission = with_turns(worker, {"tenant:a:concurrency": "1"})
    (entry_id,) = flood(raw, worker, "a", 1)
    (entry,) = await worker.take(1)
    await worker.outcomes.put_aside(worker.envelope(entry))
    key = worker.keys.jobs("normal")
    raw.call("XCLAIM", key, "workers", lot_of(b"a"), 0, entry_id, "IDLE", 15_000, "JUSTID")
    admission._blocked_until[lot_of(b"a")] = float("inf")
    assert await worker.source.take(4) == []
    ((_, consumer, idle_ms, count),) = raw.call("XPENDING", key, "workers", "-", "+", 10)
    assert (consumer, count) == (lot_of(b"a").encode(), 0)
    assert idle_ms < 15_000


async def test_a_lots_deleted_entries_are_passed(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    with_turns(worker)
    ids = flood(raw, worker, "a", 3)
    await worker.scripts.set_aside("normal", ids[-1])
    raw.call("XDEL", worker.keys.jobs("normal"), ids[0])
    assert await worker.scripts.take_waiting("normal", ids[0]) is None
    entries = [entry for _ in range(3) for entry in await worker.source.take(3)]
    assert [entry.entry_id for entry in entries] == ids[1:]


@pytest.mark.parametrize("lane", LANES)
async def test_a_lane_of_another_type_is_left_to_the_plain_read(
    make_worker: MakeWorker, raw: RespClient, lane: str
) -> None:
    worker = make_worker("w")
    with_turns(worker)
    raw.call("DEL", worker.keys.jobs(lane))
    raw.call("SET", worker.keys.jobs(lane), "x")
    others = [other for other in LANES if other != lane]
    for other in others:
        flood(raw, worker, "a", 1, other)
    assert {entry.lane for entry in await worker.take(2)} == set(others)
    raw.call("DEL", worker.keys.jobs(lane))
    flood(raw, worker, "a", 1, lane)
    assert [entry.lane for entry in await worker.take(1)] == [lane]
