"""Which server runs on which data: nothing that was stored may vanish because another program is found first."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import server_command
from tests.wire.resp import RespClient
from worker import server_choice
from worker.embedded import EmbeddedServer
from worker.errors import StartupError
from worker.server_choice import ServerVersion, can_read, choose_server, find_servers, version_of, writer_of

VALKEY, REDIS_6 = ServerVersion("valkey", (9, 1)), ServerVersion("redis", (6, 2))


def add_job(data_dir: Path, command: list[str], word: str) -> list[bytes]:
    """Start that server on the folder, add a job, and answer all that it holds then."""
    with EmbeddedServer(data_dir, command) as server, RespClient(server.url) as client:
        client.call("XADD", "jobs", "*", "prompt", word)
        return [fields[1] for _, fields in client.call("XRANGE", "jobs", "-", "+")]


def test_a_newer_server_takes_over_the_data_of_an_older_one_which_is_refused_from_then_on(tmp_path: Path) -> None:
    older, newer = server_command("redis-6.2"), server_command("valkey-9.1")
    assert add_job(tmp_path, older, "first") == [b"first"]
    assert writer_of(tmp_path) == REDIS_6
    assert add_job(tmp_path, newer, "second") == [b"first", b"second"]
    assert writer_of(tmp_path) == VALKEY
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StartupError, match=r"valkey 9\.1 wrote the data in .*redis-server is redis 6\.2") as caught:
        add_job(tmp_path, older, "lost")
    for advice in ("install valkey 9.1 or newer", "--data-dir", "move this one away"):
        assert advice in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert add_job(tmp_path, newer, "third") == [b"first", b"second", b"third"]


def test_data_without_a_record_are_judged_by_their_layout(tmp_path: Path) -> None:
    add_job(tmp_path, server_command("valkey-9.1"), "first")
    (tmp_path / "written-by").unlink()
    with pytest.raises(StartupError, match=r"redis 7\.0 wrote the data"):
        add_job(tmp_path, server_command("redis-6.2"), "lost")
    assert add_job(tmp_path, server_command("valkey-9.1"), "second") == [b"first", b"second"]


def test_of_the_servers_at_hand_the_first_that_reads_the_data_is_taken(tmp_path: Path) -> None:
    older, newer = server_command("redis-6.2"), server_command("valkey-9.1")
    assert choose_server(tmp_path, [older, newer]) == (older, REDIS_6)
    add_job(tmp_path, newer, "first")
    assert choose_server(tmp_path, [older, newer]) == (newer, VALKEY)


@pytest.mark.parametrize(
    ("server", "writer", "reads"),
    [
        (VALKEY, None, True),
        (None, None, True),
        (None, VALKEY, False),
        (VALKEY, VALKEY, True),
        (VALKEY, ServerVersion("valkey", (9, 2)), False),
        (VALKEY, ServerVersion("redis", (7, 2)), True),
        (VALKEY, ServerVersion("redis", (7, 4)), False),
        (ServerVersion("redis", (8, 0)), VALKEY, False),
        (ServerVersion("redis", (8, 0)), REDIS_6, True),
        (REDIS_6, ServerVersion("redis", (7, 0)), False),
    ],
)
def test_a_server_reads_what_is_older_and_what_valkey_was_forked_from(
    server: ServerVersion | None, writer: ServerVersion | None, reads: bool
) -> None:
    assert can_read(server, writer) is reads


def test_a_program_that_is_no_server_has_no_version() -> None:
    assert version_of(["/etc/passwd"]) is None
    assert version_of(["/no/such"]) is None
    assert version_of([sys.executable]) is None


def test_servers_on_the_path_go_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = server_command("valkey-9.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_servers() == [wheel]
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_servers() == [[str(tmp_path / "valkey-server")], [str(tmp_path / "redis-server")], wheel]


def test_a_server_beside_the_interpreter_is_not_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An activated environment has its scripts on the PATH; a package for tests puts an old server there."""
    scripts = sysconfig.get_path("scripts")
    (tmp_path / "link").symlink_to(scripts)
    monkeypatch.setenv("PATH", os.pathsep.join([scripts, str(tmp_path / "link")]))
    assert find_servers() == [server_command("valkey-9.1")]


def test_no_server_at_all_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server_choice, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match="install valkey-server or redis-server"):
        find_servers()
