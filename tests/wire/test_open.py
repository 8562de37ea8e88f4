"""Opening a reply: only the owner can, each attempt fences the earlier ones, the record finds duplicates."""

import itertools

import pytest

from tests.wire.resp import RespClient, RespError
from tests.wire.workers import MakeWorker, TestWorker, push
from worker.protocol import parse_envelope
from worker.streams.keys import TERMINAL_SEQ
from worker.streams.leases import Entry
from worker.streams.scripts import OpenResult, OpenStatus

pytestmark = pytest.mark.every_topology


async def run_open(worker: TestWorker, entry: Entry, own_attempt: int = 0) -> OpenResult:
    envelope = worker.envelope(entry)
    return await worker.scripts.open(
        entry.lane,
        entry.entry_id,
        envelope.id,
        digest=envelope.digest,
        model="tiny",
        run_ttl_ms=60_000,
        tenant=envelope.tenant,
        own_attempt=own_attempt,
    )


def steal(raw: RespClient, entry: Entry, thief: TestWorker) -> None:
    """The lease ran out and a peer took the entry."""
    raw.call("XCLAIM", thief.keys.jobs(entry.lane), "workers", thief.name, 0, entry.entry_id)


async def taken(worker: TestWorker, **fields: str) -> Entry:
    await push(worker, **(fields or {"id": "a", "prompt": "x"}))
    (entry,) = await worker.take(1)
    return entry


async def test_an_open_writes_the_event_the_record_and_both_expiries(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker, id="a", prompt="x", tenant="acme")
    result = await run_open(worker, entry)
    ((entry_id, event),) = raw.events(worker.keys.reply("a"))
    assert entry_id == f"{result.attempt}-0"
    assert event == {"e": "open", "t": event["t"], "worker": "w", "model": "tiny", "from": "0"}
    record = raw.hash(worker.keys.state("a"))
    assert record["entry"] == f"normal/{entry.entry_id}"
    assert {name: record[name] for name in ("status", "worker", "attempt", "crashes", "solo", "tenant")} == {
        "status": "running",
        "worker": "w",
        "attempt": str(result.attempt),
        "crashes": "0",
        "solo": "0",
        "tenant": "acme",
    }
    for key in (worker.keys.reply("a"), worker.keys.state("a")):
        assert 0 < raw.call("PTTL", key) <= 60_000


async def test_an_attempt_is_the_servers_time(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    before, _ = raw.call("TIME")
    result = await run_open(worker, entry)
    after, _ = raw.call("TIME")
    assert int(before) <= result.attempt // 1000 <= int(after)


async def test_whoever_lost_the_entry_can_not_open(make_worker: MakeWorker, raw: RespClient) -> None:
    """A zombie that wakes up late must not fence the rightful owner."""
    zombie, owner = make_worker("zombie"), make_worker("owner")
    entry = await taken(zombie)
    steal(raw, entry, owner)
    assert (await run_open(owner, entry)).status is OpenStatus.OPENED
    assert (await run_open(zombie, entry)).status is OpenStatus.LOST
    assert len(raw.events(owner.keys.reply("a"))) == 1


async def test_of_two_claimants_only_the_owner_opens(make_worker: MakeWorker, raw: RespClient) -> None:
    """Both would otherwise take the stored id for their own."""
    first, second = make_worker("first"), make_worker("second")
    entry = await taken(first)
    steal(raw, entry, second)
    statuses = [(await run_open(worker, entry)).status for worker in (first, second)]
    assert statuses == [OpenStatus.LOST, OpenStatus.OPENED]


async def test_a_lost_group_is_a_lost_entry(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
    assert (await run_open(worker, entry)).status is OpenStatus.LOST


async def test_a_new_attempt_is_above_every_earlier_one_even_within_a_tick(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    attempts = [(await run_open(worker, entry)).attempt for _ in range(20)]
    assert sorted(set(attempts)) == attempts


async def test_a_lost_reply_does_not_let_an_attempt_come_again(make_worker: MakeWorker, raw: RespClient) -> None:
    """The record remembers the attempt where the stream was lost within one tick, or was written by a faster clock."""
    worker = make_worker("w")
    entry = await taken(worker)
    await run_open(worker, entry)
    far = 9_000_000_000_000
    raw.call("HSET", worker.keys.state("a"), "attempt", far)
    raw.call("DEL", worker.keys.reply("a"))
    assert (await run_open(worker, entry)).attempt == far + 1
    raw.call("DEL", worker.keys.state("a"))
    assert (await run_open(worker, entry)).attempt == far + 2
    raw.call("DEL", worker.keys.state("a"), worker.keys.reply("a"))
    assert (await run_open(worker, entry, own_attempt=far + 2)).attempt == far + 3


async def test_a_zombie_can_not_write_into_a_stream_that_was_lost_and_opened_again(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    zombie, owner = make_worker("zombie"), make_worker("owner")
    entry = await taken(zombie)
    old = await run_open(zombie, entry)
    raw.call("DEL", zombie.keys.reply("a"))
    steal(raw, entry, owner)
    new = await run_open(owner, entry)
    with pytest.raises(RespError, match="equal or smaller"):
        raw.call("XADD", owner.keys.reply("a"), "NOMKSTREAM", f"{old.attempt}-18", "e", "token")
    assert raw.call("XADD", owner.keys.reply("a"), "NOMKSTREAM", f"{new.attempt}-1", "e", "token")


async def test_an_open_says_how_many_tokens_are_stored(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    first = await run_open(worker, entry)
    assert (first.covered, first.is_resumed) == (0, False)
    raw.call("XADD", worker.keys.reply("a"), f"{first.attempt}-1", "e", "token", "ids", "[1,2,3]", "n", "3")
    second = await run_open(worker, entry)
    assert (second.covered, second.is_resumed) == (3, True)
    third = await run_open(worker, entry)
    assert third.covered == 3, "an open with no token after it passes its own `from` on"
    raw.call("XADD", worker.keys.reply("a"), f"{third.attempt}-1", "e", "reset", "why", "x", "n", "0")
    assert (await run_open(worker, entry)).covered == 0
    assert [event["from"] for _, event in raw.events(worker.keys.reply("a")) if event["e"] == "open"] == list("0330")


@pytest.mark.parametrize(("kind", "code"), [("end", ""), ("error", "poison")])
async def test_a_reply_that_has_ended_is_only_settled(
    make_worker: MakeWorker, raw: RespClient, kind: str, code: str
) -> None:
    """The crash came between the terminal event and the settling, or the event slipped in before the open."""
    worker = make_worker("w")
    entry = await taken(worker)
    first = await run_open(worker, entry)
    fields = ("code", code) if code else ()
    raw.call("XADD", worker.keys.reply("a"), f"{first.attempt}-{TERMINAL_SEQ}", "e", kind, *fields)
    result = await run_open(worker, entry)
    assert (result.status, result.terminal, result.terminal_code) == (OpenStatus.ENDED, kind, code)
    assert len(raw.events(worker.keys.reply("a"))) == 2


async def test_a_refused_open_leaves_a_finished_replys_expiry_alone(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    first = await run_open(worker, entry)
    raw.call("XADD", worker.keys.reply("a"), f"{first.attempt}-{TERMINAL_SEQ}", "e", "end")
    raw.call("PEXPIRE", worker.keys.reply("a"), 5_000)
    assert (await run_open(worker, entry)).status is OpenStatus.ENDED
    assert raw.call("PTTL", worker.keys.reply("a")) <= 5_000


async def test_a_worker_that_died_while_running_is_one_crash(make_worker: MakeWorker, raw: RespClient) -> None:
    """A claimant that dies before its open hides nobody: the record still names the one that ran."""
    first, second, third = make_worker("first"), make_worker("second"), make_worker("third")
    entry = await taken(first)
    await run_open(first, entry)
    steal(raw, entry, second)
    steal(raw, entry, third)
    result = await run_open(third, entry)
    assert (result.crashes, result.solo) == (1, 0)
    assert (await run_open(third, entry)).crashes == 1, "opening again is no crash of one's own"


async def test_a_crash_while_alone_counts_as_solo_once(make_worker: MakeWorker, raw: RespClient) -> None:
    workers = [make_worker(name) for name in ("first", "second", "third")]
    entry = await taken(workers[0])
    await run_open(workers[0], entry)
    raw.call("HSET", workers[0].keys.state("a"), "alone", "1")
    steal(raw, entry, workers[1])
    assert (await run_open(workers[1], entry)).solo == 1
    steal(raw, entry, workers[2])
    result = await run_open(workers[2], entry)
    assert (result.crashes, result.solo) == (2, 1), "the second attempt was not alone any more"


async def test_handing_over_is_never_a_crash(make_worker: MakeWorker, raw: RespClient) -> None:
    workers = [make_worker(f"w{number}") for number in range(4)]
    entry = await taken(workers[0])
    for giver, taker in itertools.pairwise(workers):
        assert (await run_open(giver, entry)).crashes == 0
        assert await giver.scripts.hand_over(entry.lane, entry.entry_id, "a", idle_ms=99_999)
        steal(raw, entry, taker)
    assert (await run_open(workers[-1], entry)).crashes == 0


async def test_opening_forgets_the_deliveries_before_it(make_worker: MakeWorker, raw: RespClient) -> None:
    """So that the count says how often an entry was delivered and never opened."""
    worker = make_worker("w")
    entry = await taken(worker)
    for _ in range(3):
        steal(raw, entry, worker)
    assert raw.pending(worker.keys.jobs("normal"))[entry.entry_id] == ("w", 4)
    await run_open(worker, entry)
    assert raw.pending(worker.keys.jobs("normal"))[entry.entry_id] == ("w", 0)


@pytest.mark.parametrize(("prompt", "status"), [("x", OpenStatus.DUPLICATE), ("other", OpenStatus.CONFLICT)])
async def test_a_known_id_in_another_lane_is_a_duplicate_or_a_conflict(
    make_worker: MakeWorker, raw: RespClient, prompt: str, status: OpenStatus
) -> None:
    worker = make_worker("w")
    first = await taken(worker)
    await run_open(worker, first)
    await push(worker, "high", id="a", prompt=prompt)
    (second,) = await worker.take(1)
    assert (await run_open(worker, second)).status is status
    assert raw.hash(worker.keys.state("a"))["entry"] == f"normal/{first.entry_id}"


async def test_a_duplicate_of_an_ended_job_is_still_a_duplicate(make_worker: MakeWorker, raw: RespClient) -> None:
    """The client reads the one reply that is there."""
    worker = make_worker("w")
    first = await taken(worker)
    result = await run_open(worker, first)
    raw.call("XADD", worker.keys.reply("a"), f"{result.attempt}-{TERMINAL_SEQ}", "e", "end")
    await worker.outcomes.settle(worker.envelope(first), "done")
    second = await taken(worker)
    assert (await run_open(worker, second)).status is OpenStatus.DUPLICATE


async def test_a_job_whose_reply_was_deleted_while_nobody_had_it_is_told_so_once(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """Only the open can tell: afterwards its own event is there, and the server may lose and get back any of them."""
    first, second = make_worker("first"), make_worker("second")
    entry = await taken(first)
    assert not (await run_open(first, entry)).is_reply_gone
    assert not (await run_open(first, entry)).is_reply_gone, "opened again, since the answer was lost"
    raw.call("DEL", first.keys.reply("a"))
    steal(raw, entry, second)
    result = await run_open(second, entry)
    assert (result.is_resumed, result.is_reply_gone, result.covered) == (True, True, 0)
    assert not (await run_open(second, entry)).is_reply_gone


async def test_an_id_whose_reply_is_gone_is_a_new_job(make_worker: MakeWorker, raw: RespClient) -> None:
    """Settling such an entry in silence would leave the client waiting for ever."""
    worker = make_worker("w")
    first = await taken(worker)
    old = await run_open(worker, first)
    raw.call("XADD", worker.keys.reply("a"), f"{old.attempt}-{TERMINAL_SEQ}", "e", "end")
    await worker.outcomes.settle(worker.envelope(first), "done")
    raw.call("DEL", worker.keys.reply("a"))
    second = await taken(worker)
    new = await run_open(worker, second)
    assert (new.status, new.is_resumed) == (OpenStatus.OPENED, False)
    assert new.attempt > old.attempt
    assert raw.hash(worker.keys.state("a"))["entry"] == f"normal/{second.entry_id}"


async def test_a_resend_goes_on_where_an_entry_that_vanished_stopped(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    first = await taken(worker)
    old = await run_open(worker, first)
    raw.call("XADD", worker.keys.reply("a"), f"{old.attempt}-1", "e", "token", "ids", "[7]", "n", "1")
    raw.call("XDEL", worker.keys.jobs("normal"), first.entry_id)
    second = await taken(worker)
    assert (await run_open(worker, second)).covered == 1
    with pytest.raises(RespError, match="equal or smaller"):
        raw.call("XADD", worker.keys.reply("a"), "NOMKSTREAM", f"{old.attempt}-2", "e", "token")


async def test_another_job_under_a_stale_id_does_not_go_on_with_the_first_ones_tokens(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    first = await taken(worker)
    old = await run_open(worker, first)
    raw.call("XADD", worker.keys.reply("a"), f"{old.attempt}-1", "e", "token", "ids", "[7]", "n", "1")
    raw.call("XDEL", worker.keys.jobs("normal"), first.entry_id)
    second = await taken(worker, id="a", prompt="something else")
    new = await run_open(worker, second)
    assert (new.status, new.covered) == (OpenStatus.OPENED, 0)
    assert new.attempt > old.attempt
    assert [event["e"] for _, event in raw.events(worker.keys.reply("a"))] == ["open"]


async def test_a_stale_record_keeps_no_crashes(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    first = await taken(worker)
    await run_open(worker, first)
    raw.call("HSET", worker.keys.state("a"), "crashes", "2", "usage", "{}")
    raw.call("XDEL", worker.keys.jobs("normal"), first.entry_id)
    second = await taken(worker)
    assert (await run_open(worker, second)).crashes == 0
    assert "usage" not in raw.hash(worker.keys.state("a"))


async def test_an_open_sees_the_cancel_mark_and_its_reason(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    assert (await run_open(worker, entry)).cancel_reason is None
    raw.call("SET", worker.keys.cancel("a"), "", "EX", 86400)
    assert (await run_open(worker, entry)).cancel_reason == ""
    raw.call("SET", worker.keys.cancel("a"), "user left", "EX", 86400)
    assert (await run_open(worker, entry)).cancel_reason == "user left"
    raw.call("DEL", worker.keys.cancel("a"))
    raw.call("LPUSH", worker.keys.cancel("a"), "a mark of a wrong type")
    assert (await run_open(worker, entry)).cancel_reason == ""


async def test_jobs_without_an_id_in_two_lanes_have_two_replies(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.pipeline(*[("XADD", worker.keys.jobs(lane), "77-0", "prompt", lane) for lane in ("high", "low")])
    entries = await worker.take(2)
    for entry in entries:
        assert (await run_open(worker, entry)).status is OpenStatus.OPENED
    for name in ("high-77-0", "low-77-0"):
        assert raw.call("EXISTS", worker.keys.reply(name)) == 1


async def test_scripts_survive_a_server_that_forgot_them(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    raw.call("SCRIPT", "FLUSH")
    assert (await run_open(worker, entry)).status is OpenStatus.OPENED


async def test_an_entrys_own_time_and_the_scripts_time_are_one_clock(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await taken(worker)
    result = await run_open(worker, entry)
    entry_ms = int(entry.entry_id.partition("-")[0])
    assert entry_ms <= result.attempt
    envelope = parse_envelope("normal", "99999999999999-0", {b"ttl_ms": b"100"}, now_ms=result.attempt)
    assert envelope.deadline_ms == result.attempt + 100


@pytest.mark.parametrize("was_opened", [True, False])
@pytest.mark.parametrize("command", [("DEL", "LANE"), ("XGROUP", "DESTROY", "LANE", "workers"), ("SET", "LANE", "x")])
async def test_an_entry_that_nobody_has_goes_on_with_whoever_was_given_it(
    make_worker: MakeWorker, raw: RespClient, command: tuple[str, ...], was_opened: bool
) -> None:
    """A peer that was given it just before the lane went, for instance: its first holder has let go by then.

    One that was never opened, or has ended, goes with its lane.
    """
    first, second = make_worker("first"), make_worker("second")
    entry = await taken(first)
    earlier = await run_open(first, entry) if was_opened else None
    steal(raw, entry, second)
    raw.call(*(first.keys.jobs("normal") if word == "LANE" else word for word in command))
    result = await run_open(second, entry)
    if earlier is None:
        assert result.status is OpenStatus.LOST
        return
    assert result.status is OpenStatus.OPENED
    assert result.attempt > earlier.attempt
    raw.call("XADD", first.keys.reply("a"), f"{result.attempt}-{TERMINAL_SEQ}", "e", "end")
    await second.outcomes.settle(second.envelope(entry), "done")
    raw.call("DEL", first.keys.reply("a"))
    assert (await run_open(first, entry)).status is OpenStatus.LOST
