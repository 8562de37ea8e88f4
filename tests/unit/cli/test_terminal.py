"""What the terminal shows: progress, replies that grow, tables, and the lines to try."""

import io
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import platformdirs
import pytest
from pydantic import SecretStr

from ops.first_message import lines_to_try, without_password
from ops.progress import progress_reporter
from ops.server import own_command
from ops.streamed_text import StreamedText, print_reply
from ops.tables import age, print_table
from worker.client import AsyncClient
from worker.reply_events import ReplyEvent, parse_event
from worker.settings import Settings, load_settings


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_stage_is_a_line_at_its_start_and_one_at_its_end() -> None:
    stream = io.StringIO()
    with progress_reporter(stream) as progress:
        for done in range(11):
            progress("loading weights", done, 10)
        progress("loading weights", 10, 10)
        progress("compiling", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading weights: 0 %"
    assert lines[1].startswith("loading weights: done in ")
    assert lines[2:] == ["compiling: …"]


def test_on_a_terminal_a_stage_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress_reporter(stream) as progress:
        progress("loading weights", 5, 10)
        progress("loading weights", 10, 10)
        progress.close()
    assert "loading weights" in stream.getvalue()
    assert "100%" in stream.getvalue()


def test_a_reply_is_printed_as_it_grows() -> None:
    stream = io.StringIO()
    text = StreamedText(stream)
    text.add("Hel")
    assert stream.getvalue() == "Hel"
    text.add("lo")
    text.add("")
    text.finish()
    assert stream.getvalue() == "Hello\n"


class Told:
    """A client whose reply is these events."""

    def __init__(self, *events: dict[str, str]) -> None:
        self._events = events

    async def stream(self, job_id: str) -> AsyncIterator[ReplyEvent]:
        for number, fields in enumerate(self._events):
            flat = [word.encode() for pair in fields.items() for word in pair]
            yield parse_event(f"1-{number}".encode(), flat)


async def test_of_several_streamed_choices_the_first_is_printed_as_it_grows(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(
        {"e": "open"},
        {"e": "token", "text": "Par", "index": "0"},
        {"e": "token", "text": "Lon", "index": "1"},
        {"e": "token", "text": "is", "index": "0"},
        {"e": "token", "text": "don", "index": "1"},
        {"e": "end", "choices": '[{"index": 0, "finish": "eos"}, {"index": 1, "finish": "eos"}]'},
    )
    await print_reply(cast(AsyncClient, told), "id")
    assert capsys.readouterr().out == "Paris\n[choice 1]\nLondon\n"


async def test_choices_that_come_with_the_end_are_printed_then(capsys: pytest.CaptureFixture[str]) -> None:
    choices = [{"index": index, "finish": "eos", "text": text} for index, text in enumerate(["Paris", "London"])]
    await print_reply(cast(AsyncClient, Told({"e": "open"}, {"e": "end", "choices": json.dumps(choices)})), "id")
    assert capsys.readouterr().out == "Paris\n[choice 1]\nLondon\n"


def test_a_repeat_after_a_reset_prints_nothing_twice() -> None:
    stream = io.StringIO()
    text = StreamedText(stream)
    text.add("one two")
    text.reset()
    text.add("one ")
    text.add("two ")
    text.add("three")
    text.finish()
    assert stream.getvalue() == "one two three\n"


def test_another_reply_after_a_reset_is_told_apart() -> None:
    stream = io.StringIO()
    text = StreamedText(stream)
    text.add("wrong way")
    text.reset()
    text.add("wro")
    text.finish()
    assert stream.getvalue() == "wrong way\n[the reply began anew]\nwro\n"
    stream = io.StringIO()
    text = StreamedText(stream)
    text.add("wrong")
    text.reset()
    text.add("right")
    text.finish()
    assert stream.getvalue() == "wrong\n[the reply began anew]\nright\n"


def test_a_reply_sends_no_control_codes_to_a_terminal() -> None:
    stream = Terminal()
    StreamedText(stream).add("a\x1b[31mb\n\tc\x9b\x07")
    assert stream.getvalue() == "a[31mb\n\tc"


def test_a_table_in_a_pipe_is_tab_separated_and_each_row_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", ("a", "b"), [[b"x\ny", 1], ["\x1b[31m", ""]])
    assert capsys.readouterr().out == "a\tb\nx y\t1\n [31m\t\n"


@pytest.mark.parametrize(
    ("milliseconds", "words"),
    [(-5, "0 ms"), (1999, "1999 ms"), (12_000, "12 s"), (180_000, "3 min"), (18_000_000, "5 h"), (1.8e8, "2 d")],
)
def test_ages_are_told_in_the_unit_that_suits(milliseconds: float, words: str) -> None:
    assert age(milliseconds) == words


def serving(url: str, **flags: str) -> Settings:
    """The settings of a worker that stands, at `url`."""
    return load_settings(flags).model_copy(update={"redis_url": SecretStr(url)})


def commands(settings: Settings) -> list[list[str]]:
    return [shlex.split(line) for line in lines_to_try(settings) if line.startswith("  ")]


def test_the_lines_to_try_are_ready_to_paste_and_show_no_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "redis-cli").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PAGEMILL_DATA_DIR", raising=False)
    settings = serving("redis://:hunter2@127.0.0.1:7000/0")
    lines = "\n".join(lines_to_try(settings))
    assert "hunter2" not in lines
    enqueue, cli_add, cli_read, our_add, our_read = commands(settings)
    pagemill = own_command()
    assert enqueue == [pagemill, "enqueue", "--temperature", "0", "Name three primary colors."]
    assert cli_add[:3] == ["redis-cli", "-u", f"$(cat {platformdirs.user_data_path('pagemill')}/redis.url)"]
    assert our_add[:5] == [pagemill, "redis", "XADD", "pagemill:{smollm2}:jobs:normal", "*"]
    job_id = our_add[our_add.index("id") + 1]
    assert our_read[-2:] == [f"pagemill:{{smollm2}}:reply:{job_id}", "0-0"]
    assert cli_read[-2] != our_read[-2]
    elsewhere = serving("redis://:hunter2@127.0.0.1:7000/0", data_dir=str(tmp_path), queue="q")
    assert commands(elsewhere)[0] == [
        pagemill,
        "enqueue",
        "--data-dir",
        str(tmp_path),
        "--queue",
        "q",
        "--temperature",
        "0",
        "Name three primary colors.",
    ]


def test_the_lines_to_try_name_a_server_that_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    open_server = load_settings({"redis_url": "redis://host:6379"})
    assert commands(open_server)[1][:5] == [own_command(), "redis", "--redis-url", "redis://host:6379", "XADD"]
    closed_server = load_settings({"redis_url": "redis://:hunter2@host:6379"})
    lines = lines_to_try(closed_server)
    assert "hunter2" not in "\n".join(lines)
    assert lines[1].endswith("with the password in place of PASSWORD:")
    assert commands(closed_server)[0][1:4] == ["enqueue", "--redis-url", "redis://default:PASSWORD@host:6379"]


def test_the_lines_to_try_use_the_first_of_several_queues_and_name_all() -> None:
    settings = load_settings({"redis_url": "redis://host", "queue": "smollm2,other"})
    assert lines_to_try(settings)[1].startswith("Serving the queues smollm2, other. From another terminal")
    enqueue, *_ = commands(settings)
    assert enqueue[4:6] == ["--queue", "smollm2"]
    assert all("pagemill:{smollm2}:" in " ".join(words) for words in commands(settings)[1:])


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://alice@host:6379/0", "redis://alice@host:6379/0"),
        ("redis://alice:hunter2@host:6379/0", "redis://alice:PASSWORD@host:6379/0"),
        ("rediss://:hunter2@host/0?ssl_cert_reqs=none", "rediss://default:PASSWORD@host/0?ssl_cert_reqs=none"),
        ("redis://:hunter2@2/@host:6379", "redis://default:PASSWORD@host:6379"),
        ("unix:///run/redis.sock?db=1&password=hunter2", "unix:///run/redis.sock?db=1&password=PASSWORD"),
    ],
)
def test_a_password_in_a_url_is_replaced_by_a_word_to_fill_in(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_redis_cli_is_not_offered_a_url_that_it_cant_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis-cli").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    names = [words[0] for words in commands(load_settings({"redis_url": "unix:///run/redis.sock"}))]
    assert names == [own_command()] * 3
