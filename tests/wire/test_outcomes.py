"""How a job leaves a worker: settled, dropped or handed over, and nothing of it while another owns it."""

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import LEASE_MS, MakeWorker, TestWorker, push
from worker.errors import ErrorCode, JobError
from worker.streams.keys import HANDOVER
from worker.streams.leases import Entry
from worker.streams.outcomes import fetch_prompt
from worker.streams.scripts import SettleStatus

pytestmark = pytest.mark.every_topology


async def running(worker: TestWorker, **fields: str) -> Entry:
    """A job of this worker that is opened."""
    await push(worker, **({"id": "a", "prompt": "x"} | fields))
    (entry,) = await worker.take(1)
    await worker.open(entry)
    return entry


async def ended(worker: TestWorker, **fields: str) -> Entry:
    """A job of this worker whose terminal event is written."""
    await push(worker, **({"id": "a", "prompt": "x"} | fields))
    (entry,) = await worker.take(1)
    writer = await worker.open(entry)
    writer.end("length", usage={}, receipt={})
    await worker.replies.flush()
    return entry


async def test_settling_takes_the_entry_off_and_lets_the_reply_expire(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await ended(worker, result_ttl_ms="9000")
    raw.call("SET", worker.keys.cancel("a"), "late", "EX", 86400)
    status = await worker.outcomes.settle(worker.envelope(entry), "done", record={"usage": "{}"})
    assert status is SettleStatus.DONE
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 0
    assert raw.pending(worker.keys.jobs("normal")) == {}
    assert raw.call("EXISTS", worker.keys.cancel("a")) == 0
    record = raw.hash(worker.keys.state("a"))
    assert (record["status"], record["usage"]) == ("done", "{}")
    for key in (worker.keys.reply("a"), worker.keys.state("a")):
        assert 0 < raw.call("PTTL", key) <= 9000
    assert not worker.leases.is_held(entry.key)


async def test_settling_again_after_a_lost_answer_finds_it_gone(make_worker: MakeWorker) -> None:
    worker = make_worker("w")
    await worker.outcomes.settle(
        worker.envelope(await ended(worker, id="first")), "done"
    )  # the server knows the script
    entry = await ended(worker)
    worker.commands.lose_after = True
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.GONE


async def test_settling_what_another_owns_touches_nothing(make_worker: MakeWorker, raw: RespClient) -> None:
    """XACK itself checks no owner: a stale worker's exit would lose the job."""
    stale, owner = make_worker("stale"), make_worker("owner")
    entry = await ended(stale)
    raw.call("XCLAIM", stale.keys.jobs("normal"), "workers", "owner", 0, entry.entry_id)
    raw.call("SET", stale.keys.cancel("a"), "x")
    assert await stale.outcomes.settle(stale.envelope(entry), "done") is SettleStatus.OTHER
    assert raw.pending(stale.keys.jobs("normal"))[entry.entry_id][0] == "owner"
    assert raw.hash(stale.keys.state("a"))["status"] == "running"
    assert raw.call("EXISTS", stale.keys.cancel("a")) == 1
    assert await owner.outcomes.settle(owner.envelope(entry), "done") is SettleStatus.DONE


async def test_a_settled_jobs_prompt_is_removed_unless_a_dead_letter_names_it(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    for keep in (True, False):
        entry = await ended(worker, id=f"a-{keep}", prompt_ref="big")
        raw.call("SET", worker.keys.prompt("big"), "x")
        await worker.outcomes.settle(worker.envelope(entry), "bad_request", keep_prompt=keep)
        assert raw.call("EXISTS", worker.keys.prompt("big")) == keep


async def test_a_prompt_ref_can_not_name_another_key(make_worker: MakeWorker, raw: RespClient) -> None:
    """A free key name would let a client have any key of the slot read and deleted."""
    worker = make_worker("w")
    entry = await ended(worker, prompt_ref=worker.keys.jobs("normal"))
    envelope = worker.envelope(entry)
    assert envelope.prompt_ref is None
    assert envelope.error is not None
    await worker.outcomes.settle(envelope, "bad_request")
    assert raw.call("TYPE", worker.keys.jobs("normal")) == b"stream"


async def test_a_job_whose_entry_was_deleted_under_us_still_gets_its_outcome(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    entry = await ended(worker)
    raw.call("XACK", worker.keys.jobs("normal"), "workers", entry.entry_id)
    raw.call("XDEL", worker.keys.jobs("normal"), entry.entry_id)
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.GONE
    assert raw.hash(worker.keys.state("a"))["status"] == "done"
    assert raw.call("PTTL", worker.keys.reply("a")) <= worker.envelope(entry).result_ttl_ms


async def test_settling_a_job_without_a_record_makes_none(make_worker: MakeWorker, raw: RespClient) -> None:
    """A hash without expiry would stay for ever."""
    worker = make_worker("w")
    entry = await ended(worker)
    raw.call("DEL", worker.keys.state("a"))
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.DONE
    assert raw.call("EXISTS", worker.keys.state("a")) == 0


async def test_a_record_whose_time_is_over_at_once_does_not_stay_for_ever(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """To write to it after its expiry would make one that has none."""
    worker = make_worker("w")
    entry = await ended(worker)
    settled = await worker.scripts.settle(entry.lane, entry.entry_id, "a", outcome="done", result_ttl_ms=0)
    assert settled is SettleStatus.DONE
    assert raw.call("EXISTS", worker.keys.state("a"), worker.keys.reply("a")) == 0


async def test_a_job_whose_reply_its_client_deleted_is_settled(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await running(worker)
    raw.call("DEL", worker.keys.reply("a"))
    assert await worker.outcomes.settle(worker.envelope(entry), "abandoned") is SettleStatus.DONE
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 0


@pytest.mark.parametrize("lost", ["the end", "everything"])
async def test_a_job_whose_end_the_server_lost_is_not_settled_but_ended_again(
    make_worker: MakeWorker, raw: RespClient, lost: str
) -> None:
    """A server that was killed comes back without the last second: a reply without its end must not stay so."""
    worker, peer = make_worker("w"), make_worker("peer")
    entry = await ended(worker)
    last_id, _ = raw.events(worker.keys.reply("a"))[-1]
    raw.call("XDEL", worker.keys.reply("a"), last_id)
    if lost == "everything":
        raw.call("DEL", worker.keys.reply("a"), worker.keys.state("a"))
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.UNENDED
    assert not worker.leases.is_held(entry.key)
    raw.call("XCLAIM", worker.keys.jobs("normal"), "workers", "w", 0, entry.entry_id, "IDLE", LEASE_MS, "JUSTID")
    (again,) = await peer.source.reclaim(1)
    writer = await peer.open(again)
    writer.end("length", usage={}, receipt={})
    await peer.replies.flush()
    assert await peer.outcomes.settle(peer.envelope(again), "done") is SettleStatus.DONE
    assert [fields["e"] for _, fields in raw.events(worker.keys.reply("a"))].count("end") == 1


async def test_dropping_a_duplicate_leaves_everything_of_the_first(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    first = await running(worker, prompt_ref="big", prompt="")
    raw.call("SET", worker.keys.prompt("big"), "x")
    await push(worker, id="a", prompt_ref="big")
    (second,) = await worker.take(1)
    assert await worker.outcomes.drop(second)
    assert raw.call("EXISTS", worker.keys.prompt("big"), worker.keys.state("a"), worker.keys.reply("a")) == 3
    assert list(raw.pending(worker.keys.jobs("normal"))) == [first.entry_id]
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 1


async def test_only_the_owner_drops(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await running(worker)
    assert not await make_worker("other").outcomes.drop(entry)
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 1


async def test_a_peer_takes_a_handed_over_job_at_once_with_its_body(make_worker: MakeWorker, raw: RespClient) -> None:
    giver, peer = make_worker("giver"), make_worker("peer")
    entry = await running(giver)
    assert await giver.outcomes.hand_over(giver.envelope(entry)) is SettleStatus.DONE
    assert raw.hash(giver.keys.state("a"))["status"] == "queued"
    assert raw.events(giver.keys.control)[-1][1] == {"op": "reclaim"}
    (taken,) = await peer.source.reclaim(8)
    assert (taken.key, taken.fields, taken.deliveries) == (entry.key, entry.fields, 1)
    assert raw.pending(giver.keys.jobs("normal"))[entry.entry_id][0] == "peer"


async def test_a_handed_over_job_may_have_to_wait(make_worker: MakeWorker, raw: RespClient) -> None:
    """What ends the ping-pong of jobs that nobody may run yet."""
    giver, peer = make_worker("giver"), make_worker("peer")
    entry = await running(giver)
    assert await giver.outcomes.hand_over(giver.envelope(entry), wait_ms=LEASE_MS // 2) is SettleStatus.DONE
    assert raw.call("EXISTS", giver.keys.control) == 0
    _, consumer, idle_ms, _ = raw.call("XPENDING", giver.keys.jobs("normal"), "workers", "-", "+", 1)[0]
    assert consumer.decode() == HANDOVER
    assert LEASE_MS // 2 <= idle_ms < LEASE_MS
    assert await peer.source.reclaim(8) == []


async def test_handing_over_a_job_that_was_never_opened_makes_no_record(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker = make_worker("w")
    await push(worker, id="a", prompt="x")
    (entry,) = await worker.take(1)
    assert await worker.outcomes.hand_over(worker.envelope(entry)) is SettleStatus.DONE
    assert raw.call("EXISTS", worker.keys.state("a")) == 0


async def test_only_the_owner_hands_over(make_worker: MakeWorker, raw: RespClient) -> None:
    stale = make_worker("stale")
    entry = await running(stale)
    raw.call("XCLAIM", stale.keys.jobs("normal"), "workers", "owner", 0, entry.entry_id)
    assert await stale.outcomes.hand_over(stale.envelope(entry)) is SettleStatus.OTHER
    assert raw.pending(stale.keys.jobs("normal"))[entry.entry_id][0] == "owner"
    assert raw.hash(stale.keys.state("a"))["status"] == "running"


LOSSES: dict[str, tuple[str, ...]] = {
    "entry": ("XDEL", "LANE", "ENTRY"),
    "group": ("XGROUP", "DESTROY", "LANE", "workers"),
    "lane": ("DEL", "LANE"),
    "type": ("SET", "LANE", "something else"),
}


def lose(raw: RespClient, worker: TestWorker, entry: Entry, what: str) -> None:
    """Deletes what makes an entry one that somebody can take."""
    words = {"LANE": worker.keys.jobs("normal"), "ENTRY": entry.entry_id}
    raw.call(*(words.get(word, word) for word in LOSSES[what]))


@pytest.mark.parametrize("what", LOSSES)
async def test_a_job_that_no_peer_can_take_is_not_handed_over(
    make_worker: MakeWorker, raw: RespClient, what: str
) -> None:
    worker = make_worker("w")
    entry = await running(worker)
    lose(raw, worker, entry, what)
    assert await worker.outcomes.hand_over(worker.envelope(entry)) is SettleStatus.GONE
    assert worker.leases.is_held(entry.key)
    assert raw.hash(worker.keys.state("a"))["status"] == "running"


@pytest.mark.parametrize("what", LOSSES)
async def test_an_orphan_is_settled_like_any_other_and_never_comes_again(
    make_worker: MakeWorker, raw: RespClient, what: str
) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    entry = await ended(worker, prompt_ref="big", prompt="")
    raw.call("SET", worker.keys.prompt("big"), "x")
    lose(raw, worker, entry, what)
    await worker.outcomes.settle(worker.envelope(entry), "done", record={"usage": "{}"})
    record = raw.hash(worker.keys.state("a"))
    assert (record["status"], record["usage"]) == ("done", "{}")
    assert 0 < raw.call("PTTL", worker.keys.reply("a")) <= worker.envelope(entry).result_ttl_ms
    assert raw.call("EXISTS", worker.keys.prompt("big")) == 0
    await peer.source.ensure_groups()
    assert await peer.source.take(8) == []


async def test_a_settled_entry_never_comes_again_though_its_record_is_lost(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    worker, peer = make_worker("w"), make_worker("peer")
    entry = await ended(worker)
    raw.call("DEL", worker.keys.state("a"))
    raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.GONE
    await peer.source.ensure_groups()
    assert await peer.source.take(8) == []


async def test_a_job_of_which_the_server_has_only_the_entry_left_comes_again(
    make_worker: MakeWorker, raw: RespClient
) -> None:
    """The last second that a killed server loses may hold all of a short job, its delivery included."""
    worker, peer = make_worker("w"), make_worker("peer")
    entry = await ended(worker)
    raw.call("DEL", worker.keys.state("a"), worker.keys.reply("a"))
    raw.call("XGROUP", "DESTROY", worker.keys.jobs("normal"), "workers")
    await peer.source.ensure_groups()
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.UNENDED
    assert [again.key for again in await peer.take(1)] == [entry.key]


async def test_a_record_of_another_type_keeps_no_job_on_the_queue(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    entry = await ended(worker)
    raw.call("SET", worker.keys.state("a"), "something else")
    assert await worker.outcomes.settle(worker.envelope(entry), "done") is SettleStatus.UNRECORDED
    assert raw.call("XLEN", worker.keys.jobs("normal")) == 0


async def test_hints_that_can_not_be_given_keep_no_job_from_a_peer(make_worker: MakeWorker, raw: RespClient) -> None:
    giver, peer = make_worker("giver"), make_worker("peer")
    entry = await running(giver)
    for key in (giver.keys.control, giver.keys.state("a")):
        raw.call("SET", key, "something else")
    assert await giver.outcomes.hand_over(giver.envelope(entry)) is SettleStatus.DONE
    assert [taken.key for taken in await peer.source.reclaim(8)] == [entry.key]


async def test_a_large_prompt_is_fetched_by_name(make_worker: MakeWorker, raw: RespClient) -> None:
    worker = make_worker("w")
    raw.call("SET", worker.keys.prompt("big"), b"\xffany bytes")
    assert await fetch_prompt(worker.commands, worker.keys, "big", 1000) == b"\xffany bytes"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ((), ErrorCode.BAD_REQUEST),
        (("SET", ""), ErrorCode.BAD_REQUEST),
        (("LPUSH", "x"), ErrorCode.BAD_REQUEST),
        (("SET", "x" * 1001), ErrorCode.PAYLOAD_TOO_LARGE),
    ],
)
async def test_a_large_prompt_that_can_not_be_used_is_refused_by_name(
    make_worker: MakeWorker, raw: RespClient, command: tuple[str, ...], code: ErrorCode
) -> None:
    worker = make_worker("w")
    if command:
        raw.call(command[0], worker.keys.prompt("big"), *command[1:])
    with pytest.raises(JobError, match="prompt_ref big") as caught:
        await fetch_prompt(worker.commands, worker.keys, "big", 1000)
    assert caught.value.code is code
