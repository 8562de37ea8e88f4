"""The embedded server: private, durable, one per folder, and gone with whoever started it."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import SERVER_BINARIES, server_command
from tests.wire.resp import RespClient, RespError
from tests.wire.workers import eventually
from worker import embedded
from worker.embedded import EmbeddedServer, is_in_use
from worker.errors import StartupError

# Starts a server in the folder of argument 1 with the command of argument 2, says so, and waits.
PARENT = """
import sys, time
from pathlib import Path
from worker.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]), [sys.argv[2]])
server.start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=list(SERVER_BINARIES))
def command(request: pytest.FixtureRequest) -> list[str]:
    return server_command(request.param)


@pytest.fixture
def parent(tmp_path: Path, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that has started a server and waits to be killed."""
    arguments = [sys.executable, "-c", PARENT, str(tmp_path), command[0]]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any(line.strip() == "ready" for line in process.stdout), "it ended before it was ready"
            yield process
        finally:
            process.kill()


def server_pid(data_dir: Path) -> int:
    return int((data_dir / "server.pid").read_text())


def files_of(folder: Path) -> list[Path]:
    """Files that hold anything."""
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


async def test_it_answers_to_its_password_alone(tmp_path: Path, command: list[str]) -> None:
    with EmbeddedServer(tmp_path, command) as server:
        with RespClient(server.url) as client:
            assert client.call("PING") == b"PONG"
        with RespClient(f"redis://127.0.0.1:{server.port}") as client, pytest.raises(RespError, match="NOAUTH"):
            client.call("PING")


async def test_it_listens_on_loopback_keeps_jobs_and_evicts_nothing(tmp_path: Path, command: list[str]) -> None:
    with EmbeddedServer(tmp_path, command) as server, RespClient(server.url) as client:
        expected = {"bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "everysec", "save": ""}
        for name, value in (expected | {"maxmemory-policy": "noeviction"}).items():
            assert client.call("CONFIG", "GET", name) == [name.encode(), value.encode()]


async def test_its_password_is_on_no_command_line_and_in_no_file_that_others_can_read(
    tmp_path: Path, command: list[str]
) -> None:
    with EmbeddedServer(tmp_path, command) as server:
        password = server.url.split("@")[0].rpartition(":")[2]
        for process in psutil.Process().children(recursive=True):
            assert password not in " ".join(process.cmdline())
        assert server.url_file.read_text().strip() == server.url
        assert [path for path in files_of(tmp_path) if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


async def test_jobs_survive_a_restart_in_a_folder_with_any_name(tmp_path: Path, command: list[str]) -> None:
    folder = tmp_path / 'a folder "ö" with spaces'
    with EmbeddedServer(folder, command) as server, RespClient(server.url) as client:
        entry_id = client.call("XADD", "jobs", "*", "prompt", "x")
    assert not server.url_file.exists()
    with EmbeddedServer(folder, command) as server, RespClient(server.url) as client:
        assert client.call("XRANGE", "jobs", "-", "+") == [[entry_id, [b"prompt", b"x"]]]


async def test_stopping_leaves_no_process_and_frees_the_folder(tmp_path: Path, command: list[str]) -> None:
    server = EmbeddedServer(tmp_path, command)
    server.start()
    watcher = psutil.Process(server_pid(tmp_path)).parent()
    assert watcher is not None
    processes = [watcher, *watcher.children(recursive=True)]
    server.stop()
    server.stop()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    with EmbeddedServer(tmp_path, command) as again:
        assert again.url_file.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_dies_with_its_parent(tmp_path: Path, parent: subprocess.Popen[str], how: signal.Signals) -> None:
    pid = server_pid(tmp_path)
    assert psutil.pid_exists(pid)
    parent.send_signal(how)
    parent.wait()
    await eventually(lambda: not psutil.pid_exists(pid))


async def test_it_can_be_started_again_at_once_after_its_parent_was_killed(
    tmp_path: Path, parent: subprocess.Popen[str], command: list[str]
) -> None:
    """The old server holds the folder's lock until it is really gone."""
    with RespClient((tmp_path / "redis.url").read_text().strip()) as client:
        client.call("XADD", "jobs", "*", "prompt", "x")
    parent.kill()
    parent.wait()
    with EmbeddedServer(tmp_path, command) as server, RespClient(server.url) as client:
        assert client.call("XLEN", "jobs") == 1


async def test_a_server_whose_watcher_is_killed_still_ends_with_the_pipe(tmp_path: Path, command: list[str]) -> None:
    server = EmbeddedServer(tmp_path, command)
    server.start()
    pid = server_pid(tmp_path)
    watcher = psutil.Process(pid).parent()
    assert watcher is not None
    assert watcher.pid != os.getpid()
    watcher.kill()
    server.stop()
    await eventually(lambda: not psutil.pid_exists(pid))


async def test_ctrl_c_in_the_terminal_is_for_the_worker(tmp_path: Path, command: list[str]) -> None:
    """The server is stopped last, so it must not hear the terminal's signal: it has a session of its own."""
    with EmbeddedServer(tmp_path, command):
        assert os.getsid(server_pid(tmp_path)) != os.getsid(0)


async def test_two_servers_in_one_folder_are_refused_by_name(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "LOCK_TIMEOUT_S", 0.1)
    with EmbeddedServer(tmp_path, command) as first:
        with pytest.raises(StartupError, match="another Pagemill uses the folder") as caught:
            EmbeddedServer(tmp_path, command).start()
        assert str(first.url_file) in str(caught.value)
        with RespClient(first.url) as client:
            assert client.call("PING") == b"PONG"


async def test_a_port_that_is_taken_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = [taken.getsockname()[1], probe.getsockname()[1]]
        probe.close()
        monkeypatch.setattr(embedded, "_free_port", lambda: ports.pop(0))
        monkeypatch.setattr(embedded, "PROBE_TIMEOUT_S", 0.05)
        with EmbeddedServer(tmp_path, server_command("valkey-9.1")) as server, RespClient(server.url) as client:
            assert client.call("PING") == b"PONG"
    assert ports == []


async def test_a_server_that_ends_at_once_is_explained_in_its_own_words(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(StartupError, match="ended at once") as caught:
        EmbeddedServer(tmp_path, command, {"no-such-setting": "1"}).start()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["no-such-binary", "/etc/passwd"])
async def test_a_command_that_can_not_run_is_explained(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match="ended at once"):
        EmbeddedServer(tmp_path, [name]).start()


async def test_a_folder_that_can_not_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="--data-dir"):
        EmbeddedServer(tmp_path / "file" / "data").start()


async def test_a_parent_that_is_killed_leaves_no_address(tmp_path: Path, parent: subprocess.Popen[str]) -> None:
    assert (tmp_path / "redis.url").exists()
    assert is_in_use(tmp_path)
    parent.kill()
    parent.wait()
    await eventually(lambda: not is_in_use(tmp_path))
    assert not (tmp_path / "redis.url").exists()


async def test_a_server_that_is_killed_comes_back_at_the_same_address_with_its_data(
    tmp_path: Path, command: list[str]
) -> None:
    with EmbeddedServer(tmp_path, command, {"appendfsync": "always"}) as server:
        keeping = asyncio.create_task(server.keep_running())
        for number in range(2):
            with RespClient(server.url) as client:
                client.call("XADD", "jobs", "*", "number", number)
            pid = server_pid(tmp_path)
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: answers(server.url))
            assert server_pid(tmp_path) != pid
        with RespClient(server.url_file.read_text().strip()) as client:
            assert client.call("XLEN", "jobs") == 2
        keeping.cancel()
        await asyncio.wait({keeping})
        pid = server_pid(tmp_path)
    assert not psutil.pid_exists(pid)
    assert not server.url_file.exists()


def answers(url: str) -> bool:
    try:
        with RespClient(url) as client:
            return bool(client.call("PING") == b"PONG")
    except (OSError, RespError):
        return False


async def test_a_server_that_keeps_ending_is_given_up_with_one_line(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WATCH_S", 0.01)
    monkeypatch.setattr(embedded, "MAX_ENDS", 2)
    with EmbeddedServer(tmp_path, command) as server:
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            os.kill(server_pid(tmp_path), signal.SIGKILL)
            await eventually(lambda: bind(thief, server.port))
            thief.listen()
            thief.settimeout(0)
            monkeypatch.setattr(embedded, "PROBE_TIMEOUT_S", 0.05)
            with pytest.raises(StartupError, match=r"ended 3 times within a minute: .*taken its port") as caught:
                await server.keep_running()
        assert "\n" not in str(caught.value)


def bind(thief: socket.socket, port: int) -> bool:
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


async def test_a_start_that_reads_for_long_is_told(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(embedded, "TELL_AFTER_S", 0.0)
    slow = tmp_path / "slow-server"
    slow.write_text(f'#!/bin/sh\nsleep 0.3\nexec {command[0]} "$@"\n')
    slow.chmod(0o755)
    with EmbeddedServer(tmp_path, [str(slow)], progress=lambda *at: told.append(at)):
        assert told[0] == ("reading the stored jobs", 0, 0)
        assert told[-1] == ("reading the stored jobs", 1, 1)
