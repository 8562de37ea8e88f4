"""Log lines: their shape, and what never gets into them."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.logging_state import logging_restored
from worker.logs import LogLevel, configure_logging, get_logger


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    with logging_restored():
        yield


def logged(level: str = "info", log_format: Literal["auto", "json"] = "json") -> io.StringIO:
    """Logging set up with a stream in memory."""
    stream = io.StringIO()
    configure_logging(level, log_format, stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The JSON objects written so far."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_the_bound_ids() -> None:
    stream = logged()
    get_logger(worker_id="w1", queue="q").bind(request_id="r1").info("job_taken", num_running=3)
    (event,) = lines(stream)
    assert list(event)[:3] == ["timestamp", "level", "event"]
    assert event.items() >= {"event": "job_taken", "worker_id": "w1", "queue": "q", "request_id": "r1"}.items()
    assert event["num_running"] == 3


def test_auto_writes_json_where_there_is_no_terminal_and_console_writes_for_people() -> None:
    stream = logged(log_format="auto")
    get_logger().info("started", port=1)
    assert lines(stream)[0]["port"] == 1
    people = io.StringIO()
    configure_logging("info", "console", people)
    get_logger().info("started", port=1)
    assert "port=1" in people.getvalue()
    assert "\x1b" not in people.getvalue()


def test_the_level_filters_ours_and_the_standard_librarys() -> None:
    stream = logged("warning")
    get_logger().info("quiet")
    logging.getLogger("other").info("quiet too")
    get_logger().warning("loud")
    logging.getLogger("other").error("louder %s", "still")
    assert [event["event"] for event in lines(stream)] == ["loud", "louder still"]


def test_text_of_users_and_of_the_model_is_cut_to_its_length() -> None:
    stream = logged()
    get_logger().info("odd_job", prompt="my secret", messages=[{"content": "my secret"}], text="answer", tokens=12)
    assert "secret" not in stream.getvalue()
    assert "answer" not in stream.getvalue()
    (event,) = lines(stream)
    assert (event["prompt"], event["messages"], event["tokens"]) == ("<9 hidden>", "<1 hidden>", 12)


def test_passwords_in_urls_are_masked_in_values_messages_and_tracebacks() -> None:
    stream = logged()
    url = "redis://user:hunter2@host:6379/0"
    get_logger().info("connecting", url=url)
    logging.getLogger("redis").warning("can't reach %s", url)
    try:
        raise ValueError(f"bad url {url}")
    except ValueError:
        get_logger().exception("failed")
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count("redis://user:***@host:6379/0") >= 3


URLS = {
    "user and password": "redis://user:{}@host:6379/0",
    "password alone": "rediss://:{}@[::1]:6379",
    "unix socket": "unix://user:{}@/run/redis.sock",
    "in a query": "unix:///run/redis.sock?db=1&password={}",
    "first in a query": "redis://host?PASSWORD={}&db=0",
    "another scheme": "redis+sentinel://user:{}@host",
}


@pytest.mark.parametrize("form", URLS)
@given(middle=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\n"), max_size=12))
@example(middle="/#?@:% &")
@example(middle=" with spaces ")
def test_a_password_is_masked_whatever_it_holds_and_wherever_it_is_logged(form: str, middle: str) -> None:
    """Nobody may have escaped it."""
    url = URLS[form].format(f"hunter{middle}2secret")
    with logging_restored():
        stream = logged()
        get_logger().info(
            f"can't reach {url}", url=url, urls=[url], by_name={"a": (url, 5), url: None}, raw=url.encode()
        )
        get_logger().info("odd", error=OSError(url))
        logging.getLogger("redis").warning("can't reach %s, trying again", url)
        try:
            raise ValueError(f"bad url {url}")
        except ValueError:
            get_logger().exception("failed")
        assert "hunter" not in stream.getvalue()
        assert "2secret" not in stream.getvalue()
        assert len(lines(stream)) == 4


def test_what_holds_no_password_is_logged_as_it_is() -> None:
    stream = logged()
    values = {"url": "http://127.0.0.1:9100", "names": ["a", "b"], "ratio": 0.5, "none": None, "is_up": True}
    get_logger().info("see http://host:80/metrics", **values)
    (event,) = lines(stream)
    assert event["event"] == "see http://host:80/metrics"
    assert {name: event[name] for name in values} == values


def test_a_logger_made_before_the_set_up_follows_it() -> None:
    logger = get_logger(worker_id="w1")
    stream = logged()
    logger.info("late")
    assert lines(stream)[0]["worker_id"] == "w1"


def test_stderr_is_looked_up_at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars replace stderr for a while, and what was there before may be closed by then."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    configure_logging("info", "json")
    first.close()
    monkeypatch.setattr("sys.stderr", second)
    get_logger().info("still_heard")
    assert lines(second)[0]["event"] == "still_heard"


def test_the_level_is_the_most_talkative_that_operators_want_for_any_queue() -> None:
    configure_logging("warning")
    root, level = logging.getLogger(), LogLevel()
    level.set("a", None)
    assert root.level == logging.WARNING
    level.set("a", "debug")
    level.set("b", None)
    assert root.level == logging.DEBUG, "a queue for which nothing is wanted takes nothing back"
    level.set("b", "info")
    level.set("a", None)
    assert root.level == logging.INFO
    level.set("b", "error")
    assert root.level == logging.ERROR
    level.set("b", None)
    assert root.level == logging.WARNING
