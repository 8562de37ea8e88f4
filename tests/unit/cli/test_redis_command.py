"""`pagemill redis`: what is typed goes out as it is, and the answer looks as redis-cli shows it."""

import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from ops.resp import Answer, ErrorReply, Status, encode, plain, pretty
from tests.unit.cli.conftest import Pagemill, Server

pytestmark = pytest.mark.usefixtures("at_server")


def test_each_type_of_answer_looks_as_in_redis_cli(pagemill: Pagemill) -> None:
    def shown(*words: str) -> str:
        return pagemill("redis", "--pretty", *words).out

    assert shown("PING") == "PONG\n"
    assert shown("SET", "k", 'a "b"\n\tc') == "OK\n"
    assert shown("GET", "k") == '"a \\"b\\"\\n\\tc"\n'
    assert shown("GET", "none") == "(nil)\n"
    assert shown("STRLEN", "k") == "(integer) 8\n"
    assert shown("KEYS", "none*") == "(empty array)\n"
    assert shown("SET", "k", "é") + shown("GET", "k") == 'OK\n"\\xc3\\xa9"\n'


def test_nested_answers_are_numbered_and_indented(pagemill: Pagemill) -> None:
    for number in range(10):
        pagemill("redis", "XADD", "s", f"1-{number}", "e", "token", "n", str(number))
    out = pagemill("redis", "--pretty", "XREAD", "COUNT", "10", "STREAMS", "s", "0-0").out
    assert out.splitlines()[:5] == [
        '1) 1) "s"',
        '   2)  1) 1) "1-0"',
        '          2) 1) "e"',
        '             2) "token"',
        '             3) "n"',
    ]
    assert '      10) 1) "1-9"' in out.splitlines()


def test_in_a_pipe_the_values_come_bare_one_a_line(pagemill: Pagemill) -> None:
    pagemill("redis", "RPUSH", "l", "one", "two words")
    assert pagemill("redis", "LRANGE", "l", "0", "-1").out == "one\ntwo words\n"
    assert pagemill("redis", "GET", "none").out == "\n"
    assert pagemill("redis", "LLEN", "l").out == "2\n"


def test_an_error_answer_ends_with_code_1(pagemill: Pagemill) -> None:
    result = pagemill("redis", "--pretty", "NONSENSE", "x")
    assert result.code == 1
    assert result.out.startswith("(error) ERR unknown command 'NONSENSE'")
    assert result.err == ""


def test_words_that_look_like_options_go_to_the_server(pagemill: Pagemill, server: Server) -> None:
    assert pagemill("redis", "SET", "--help", "--plain").code == 0
    assert server.get("--help") == b"--plain"
    assert pagemill("redis", "ZADD", "z", "-1", "m").out == "1\n"


def test_bytes_pass_through_unchanged_both_ways(server_url: str, server: Server) -> None:
    command = [sys.executable.encode(), b"-m", b"ops.cli", b"redis"]
    environment = {**os.environ, "PAGEMILL_REDIS_URL": server_url}
    subprocess.run([*command, b"SET", b"k", b"\xff\xfe\x01"], check=True, env=environment, timeout=60)
    assert server.get("k") == b"\xff\xfe\x01"
    result = subprocess.run([*command, b"GET", b"k"], check=True, env=environment, timeout=60, capture_output=True)
    assert result.stdout == b"\xff\xfe\x01\n"


def test_a_url_with_user_password_and_database_logs_in(pagemill: Pagemill, server: Server, server_url: str) -> None:
    server.execute_command("ACL", "SETUSER", "ann", "on", ">p@ss word", "~*", "+@all")
    address = urlsplit(server_url).netloc.rpartition("@")[2]
    result = pagemill("redis", "--redis-url", f"redis://ann:p%40ss%20word@{address}/3", "CLIENT", "LIST")
    assert "user=ann" in result.out
    assert "db=3" in result.out
    wrong = pagemill("redis", "--redis-url", f"redis://ann:password@{address}/3", "PING")
    assert (wrong.code, wrong.out) == (2, "")
    assert "WRONGPASS" in wrong.err


def test_a_url_that_can_not_be_read_shows_nothing_of_its_password(
    pagemill: Pagemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser's own words would: it takes what stands before a slash for a port."""
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "redis://user:hunter/2@host:6379/0")
    result = pagemill("redis", "PING")
    assert result.code == 2
    assert "is no Redis URL" in result.err
    assert "hunter" not in result.err


def test_a_command_is_encoded_by_its_bytes() -> None:
    assert encode(["GET", "é", b"\xff"]) == b"*3\r\n$3\r\nGET\r\n$2\r\n\xc3\xa9\r\n$1\r\n\xff\r\n"


def test_answers_that_hold_errors_and_nothing() -> None:
    answer: list[Answer] = [Status("OK"), ErrorReply("ERR no"), None, [], 7]
    assert pretty(answer).splitlines() == [
        "1) OK",
        "2) (error) ERR no",
        "3) (nil)",
        "4) (empty array)",
        "5) (integer) 7",
    ]
    assert plain(answer) == "OK\nERR no\n\n\n7"
