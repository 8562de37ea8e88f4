"""What the protocol rests on: how the servers themselves behave. Raw commands only; none of our code is under test."""

import pytest

from tests.wire.resp import RespClient, RespError, encode
from worker.streams.keys import QueueKeys

MAX_SEQ = "18446744073709551615"


@pytest.fixture
def jobs(raw: RespClient, keys: QueueKeys) -> str:
    """A lane with its group."""
    raw.call("XGROUP", "CREATE", keys.jobs("normal"), "workers", "0", "MKSTREAM")
    return keys.jobs("normal")


def read(raw: RespClient, consumer: str, *streams: str, count: int = 10) -> list[str]:
    """Entry ids that a group read delivers."""
    answer = raw.call(
        "XREADGROUP", "GROUP", "workers", consumer, "COUNT", count, "STREAMS", *streams, *[">"] * len(streams)
    )
    return [entry_id.decode() for _, entries in answer or [] for entry_id, _ in entries]


def add(raw: RespClient, key: str, num: int = 1) -> list[str]:
    return [entry_id.decode() for entry_id in raw.pipeline(*[("XADD", key, "*", "prompt", "x")] * num)]


@pytest.mark.parametrize("later", ["5-1", "5-0", "4-9"])
def test_an_id_that_is_not_larger_than_the_last_is_refused(raw: RespClient, keys: QueueKeys, later: str) -> None:
    raw.call("XADD", keys.reply("a"), "5-1", "e", "token")
    with pytest.raises(RespError, match="equal or smaller"):
        raw.call("XADD", keys.reply("a"), "NOMKSTREAM", later, "e", "token")


def test_nothing_of_an_attempt_comes_after_its_terminal_id(raw: RespClient, keys: QueueKeys) -> None:
    raw.call("XADD", keys.reply("a"), f"5-{MAX_SEQ}", "e", "end")
    with pytest.raises(RespError, match="equal or smaller"):
        raw.call("XADD", keys.reply("a"), "5-7", "e", "token")


def test_nomkstream_answers_nil_where_the_stream_is_gone(raw: RespClient, keys: QueueKeys) -> None:
    assert raw.call("XADD", keys.reply("a"), "NOMKSTREAM", "5-1", "e", "token") is None
    assert raw.call("EXISTS", keys.reply("a")) == 0


def test_a_reader_behind_a_recreated_stream_sees_nothing(raw: RespClient, keys: QueueKeys) -> None:
    """Why attempts are times and not counted from 1."""
    raw.call("XADD", keys.reply("a"), "1-17", "e", "token")
    raw.call("DEL", keys.reply("a"))
    raw.call("XADD", keys.reply("a"), "1-12", "e", "token")
    assert raw.call("XREAD", "STREAMS", keys.reply("a"), "1-17") is None


def test_trimming_drops_unread_and_unacknowledged_jobs(raw: RespClient, jobs: str) -> None:
    add(raw, jobs, 4)
    first = read(raw, "w", jobs, count=2)
    raw.call("XTRIM", jobs, "MAXLEN", 1)
    assert len(raw.events(jobs)) == 1
    assert sorted(raw.pending(jobs)) == sorted(first)
    assert len(read(raw, "w", jobs)) == 1


def test_a_reader_behind_a_trim_skips_silently(raw: RespClient, keys: QueueKeys) -> None:
    for seq in range(1, 6):
        raw.call("XADD", keys.reply("a"), f"7-{seq}", "n", seq)
    raw.call("XTRIM", keys.reply("a"), "MAXLEN", 2)
    ((_, entries),) = raw.call("XREAD", "STREAMS", keys.reply("a"), "7-1")
    assert [entry_id for entry_id, _ in entries] == [b"7-4", b"7-5"]


def test_count_is_per_stream(raw: RespClient, keys: QueueKeys) -> None:
    for lane in ("high", "normal"):
        raw.call("XGROUP", "CREATE", keys.jobs(lane), "workers", "0", "MKSTREAM")
        add(raw, keys.jobs(lane), 2)
    assert len(read(raw, "w", keys.jobs("high"), keys.jobs("normal"), count=1)) == 2


def test_entry_ids_of_two_lanes_collide(raw: RespClient, keys: QueueKeys) -> None:
    """Why a job without an id is named after its lane as well."""
    commands = [("XADD", keys.jobs(lane), "*", "prompt", "x") for lane in ("high", "normal") for _ in range(100)]
    ids = raw.pipeline(*commands[::2], *commands[1::2])
    assert len(set(ids)) < len(ids)


def test_xack_checks_no_owner(raw: RespClient, jobs: str) -> None:
    (entry_id,) = add(raw, jobs)
    read(raw, "owner", jobs)
    assert raw.call("XACK", jobs, "workers", entry_id) == 1


def test_a_bare_xclaim_steals_a_job_back_and_force_recreates_a_settled_one(raw: RespClient, jobs: str) -> None:
    (entry_id,) = add(raw, jobs)
    read(raw, "first", jobs)
    raw.call("XCLAIM", jobs, "workers", "second", 0, entry_id)
    raw.call("XCLAIM", jobs, "workers", "first", 0, entry_id)
    assert raw.pending(jobs)[entry_id][0] == "first"
    raw.call("XACK", jobs, "workers", entry_id)
    raw.call("XCLAIM", jobs, "workers", "first", 0, entry_id, "FORCE")
    assert raw.pending(jobs)[entry_id][0] == "first"


def test_deleting_a_consumer_destroys_what_is_pending(raw: RespClient, jobs: str) -> None:
    add(raw, jobs)
    read(raw, "w", jobs)
    raw.call("XGROUP", "DELCONSUMER", jobs, "workers", "w")
    assert raw.pending(jobs) == {}
    assert read(raw, "w", jobs) == []


def test_a_blocked_readers_deleted_name_comes_back(raw: RespClient, redis_url: str, jobs: str) -> None:
    with RespClient(redis_url) as blocked:
        blocked.send(("CLIENT", "ID"))
        client_id = blocked.read()
        blocked.send(("XREADGROUP", "GROUP", "workers", "w", "BLOCK", 10_000, "STREAMS", jobs, ">"))
        while f"id={client_id} " not in blocked_clients(raw):
            pass
        raw.call("XGROUP", "DELCONSUMER", jobs, "workers", "w")
        (entry_id,) = add(raw, jobs)
        assert blocked.read() is not None
    assert raw.pending(jobs)[entry_id][0] == "w"


def blocked_clients(raw: RespClient) -> str:
    """Lines of clients that wait in a blocking read."""
    lines = raw.call("CLIENT", "LIST").decode().splitlines()
    return "\n".join(f"{line} " for line in lines if "cmd=xreadgroup" in line and " flags=b" in line)


def test_a_recreated_group_delivers_entries_in_flight_again(raw: RespClient, jobs: str) -> None:
    (entry_id,) = add(raw, jobs)
    read(raw, "first", jobs)
    raw.call("XGROUP", "DESTROY", jobs, "workers")
    with pytest.raises(RespError, match="NOGROUP"):
        read(raw, "first", jobs)
    raw.call("XGROUP", "CREATE", jobs, "workers", "0")
    assert read(raw, "second", jobs) == [entry_id]


def test_autoclaim_from_the_start_never_reaches_a_dead_entry_far_back(raw: RespClient, jobs: str) -> None:
    """A call looks at ten times COUNT entries: the cursor must be followed."""
    ids = add(raw, jobs, 40)
    read(raw, "dead", jobs, count=40)
    raw.call("XCLAIM", jobs, "workers", "dead", 0, ids[-1], "IDLE", 60_000, "JUSTID")
    claim = ("XAUTOCLAIM", jobs, "workers", "w", 30_000)
    cursor, claimed, *_ = raw.call(*claim, "0-0", "COUNT", 1)
    assert (claimed, cursor != b"0-0") == ([], True)
    for _ in range(4):
        cursor, claimed, *_ = raw.call(*claim, cursor, "COUNT", 1)
        if claimed:
            break
    assert claimed[0][0].decode() == ids[-1]


def test_a_claim_for_a_consumer_that_need_not_exist_sets_idle_and_count(raw: RespClient, jobs: str) -> None:
    """What handing over is made of; the count grows with the next claim from what RETRYCOUNT said."""
    (entry_id,) = add(raw, jobs)
    read(raw, "w", jobs)
    options = ("IDLE", 300_000, "RETRYCOUNT", 0, "JUSTID")
    raw.call("XCLAIM", jobs, "workers", "handover", 0, entry_id, *options)
    assert raw.pending(jobs)[entry_id] == ("handover", 0)
    _, claimed, *_ = raw.call("XAUTOCLAIM", jobs, "workers", "peer", 30_000, "0-0", "COUNT", 10)
    assert claimed[0][1] == [b"prompt", b"x"]
    assert raw.pending(jobs)[entry_id] == ("peer", 1)


def test_deleting_an_undelivered_entry_breaks_the_lag(raw: RespClient, jobs: str) -> None:
    """Why a cancelled job that is still queued is not deleted by the client. 6.2 has no lag at all."""
    ids = add(raw, jobs, 3)
    (info,) = raw.call("XINFO", "GROUPS", jobs)
    if b"lag" not in info:
        assert b"last-delivered-id" in info
        return
    assert info[info.index(b"lag") + 1] == 3
    raw.call("XDEL", jobs, ids[1])
    (info,) = raw.call("XINFO", "GROUPS", jobs)
    assert info[info.index(b"lag") + 1] is None


def test_multi_does_not_roll_back(raw: RespClient, keys: QueueKeys) -> None:
    """Why opening is one script: a refused open's expiry would outlive a finished reply's."""
    raw.call("XADD", keys.reply("a"), f"5-{MAX_SEQ}", "e", "end")
    raw.call("PEXPIRE", keys.reply("a"), 5_000)
    *_, (refused, _) = raw.pipeline(
        ("MULTI",), ("XADD", keys.reply("a"), "5-0", "e", "open"), ("PEXPIRE", keys.reply("a"), 86_400_000), ("EXEC",)
    )
    assert isinstance(refused, RespError)
    assert raw.call("PTTL", keys.reply("a")) > 5_000


def test_a_typed_entry_id_drags_later_ones_into_the_future(raw: RespClient, jobs: str) -> None:
    raw.call("XADD", jobs, "99999999999999-0", "prompt", "x")
    (later,) = add(raw, jobs)
    assert later.startswith("99999999999999-")


def test_a_command_is_sent_as_bulk_strings() -> None:
    assert encode(("GET", b"a\r\n", 1)) == b"*3\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n$1\r\n1\r\n"
