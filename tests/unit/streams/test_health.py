"""What a worker waits for: one line for each kind of trouble, and a reason that goes when the trouble does."""

from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from worker.streams import health
from worker.streams.errors import ConnectionLostError, ServerError
from worker.streams.health import ServerHealth, tell


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only item is the time."""
    now = [1000.0]
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def _seen(state: ServerHealth) -> tuple[str | None, bool]:
    return state.trouble, state.is_cut_off


def test_a_lost_connection_lasts_until_an_answer_comes_over_a_new_one() -> None:
    state = ServerHealth()
    with capture_logs() as logs:
        for _ in range(50):
            state.lost("jobs", ConnectionLostError("Redis can't be reached: refused"))
        seen = [_seen(state)]
        state.heard("events")
        seen.append(_seen(state))  # another connection says nothing of this one
        state.heard("jobs")
        seen.append(_seen(state))
    assert seen == [("Redis can't be reached: refused", True)] * 2 + [(None, False)]
    assert [log["event"] for log in logs] == ["redis_waited_for", "redis_serves_again"]


def test_a_refusal_lasts_until_the_same_command_is_done() -> None:
    state = ServerHealth()
    state.refused("events", "XADD", ServerError("OOM command not allowed"))
    state.heard("events")
    state.answered("events", "XLEN")
    assert state.trouble is not None
    assert "memory is full" in state.trouble
    assert not state.is_cut_off
    state.answered("events", "XADD")
    assert state.trouble is None


def test_errors_of_a_command_are_no_trouble_of_the_servers() -> None:
    state = ServerHealth()
    for words in ("WRONGTYPE x", "NOGROUP x", "ERR The ID specified in XADD is equal or smaller", "BUSYGROUP x"):
        state.refused("jobs", "XADD", ServerError(words))
    assert state.trouble is None


def test_what_nobody_tries_again_is_forgotten(clock: list[float]) -> None:
    """A job that went elsewhere would else keep the worker from being ready."""
    state = ServerHealth()
    state.refused("commands", "EVALSHA", ServerError("OOM x"))
    state.lost("events", ConnectionLostError("lost"))
    clock[0] += health.FORGET_LINK_S + 1
    state.heard("jobs")
    assert state.trouble is not None
    assert not state.is_cut_off, "others have had answers since"
    clock[0] += health.FORGET_COMMAND_S
    assert state.trouble is None


def test_a_lost_connection_is_not_forgotten_while_nobody_has_answers(clock: list[float]) -> None:
    state = ServerHealth()
    state.lost("events", ConnectionLostError("lost"))
    clock[0] += 10 * health.FORGET_COMMAND_S
    assert state.trouble == "lost"


def test_silence_is_as_bad_as_no_connection(clock: list[float]) -> None:
    state = ServerHealth()
    seen = [_seen(state)]
    clock[0] += health.SILENT_S + 1
    seen.append(_seen(state))
    state.heard("control")
    seen.append(_seen(state))
    assert seen == [(None, False), (None, True), (None, False)]


def test_what_lasts_is_said_again_and_each_kind_by_itself(clock: list[float]) -> None:
    state = ServerHealth()
    with capture_logs() as logs:
        for number in range(100):
            state.lost("jobs", ConnectionLostError(f"the connection was lost: reason {number}"))
            state.refused("events", "XADD", ServerError("OOM x"))
            clock[0] += 1
    waited_for = [log for log in logs if log["event"] == "redis_waited_for"]
    assert len(waited_for) == 2 * (1 + int(99 // health.SAY_AGAIN_S))
    assert waited_for[-1]["seconds"] == 90


def test_parts_leave_it_to_the_health_to_say_what_it_knows() -> None:
    class Logger:
        said: list[str] = []  # noqa: RUF012 - one test

        def debug(self, event: str, **_: object) -> None:
            self.said.append(f"debug {event}")

        def warning(self, event: str, **_: object) -> None:
            self.said.append(f"warning {event}")

    for error in (ConnectionLostError("x"), ServerError("LOADING x"), ServerError("MOVED 1 h:1"), ServerError("ERR x")):
        tell(Logger(), "unread", error)
    assert Logger.said == ["debug unread"] * 3 + ["warning unread"]
