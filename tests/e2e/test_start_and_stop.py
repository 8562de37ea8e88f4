"""A stop in each phase of a start, and what happens to the embedded server: exit codes, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.workers import PAGEMILL, assert_gone, eventually
from tests.wire.resp import RespClient

Served = tuple[psutil.Popen, Callable[[], str]]


@contextmanager
def serving(folder: Path, *flags: str | Path, **variables: str) -> Iterator[Served]:
    """`pagemill serve` with data in `folder`/data, and what it has printed so far; killed at the end.

    Compiled kernels come from the user's cache.
    """
    log_path = folder / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PAGEMILL_"))}
    command = [PAGEMILL, "serve", "--data-dir", folder / "data", *flags]
    with log_path.open("wb") as log:
        process = psutil.Popen(command, stdout=log, stderr=log, env=environment | variables)
    try:
        yield process, log_path.read_text
    finally:
        if process.poll() is None:
            family = [process, *process.children(recursive=True)]
            process.kill()
            process.wait()
            assert_gone(family)


def stop(process: psutil.Popen, number: int) -> int:
    """Send a signal; the exit code, once nothing of the worker is left."""
    family = process.children(recursive=True)
    process.send_signal(number)
    code: int = process.wait(60)
    assert_gone(family)
    return code


def test_a_stop_before_the_command_is_even_loaded_is_a_clean_end() -> None:
    code = (
        "import importlib, os, signal, sys, ops.cli\n"
        "importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(ops.cli.main(['serve']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_while_the_demo_model_is_fetched_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """pip waits for an index that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        url = f"http://127.0.0.1:{index.getsockname()[1]}/"
        empty_cache = ("--cache-dir", tmp_path / "cache")
        with serving(tmp_path, *empty_cache, PIP_INDEX_URL=url, PIP_CONFIG_FILE=os.devnull) as (process, printed):
            index.accept()[0].close()
            assert stop(process, number) == 0
            assert "Traceback" not in printed()
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [
        "SmolLM2-135M-Instruct.Q4_1.lock"
    ]
    assert not (tmp_path / "data").exists()


def test_a_stop_while_the_embedded_server_starts_is_a_clean_end(tmp_path: Path, tiny_model: Path) -> None:
    """A server that never answers."""
    server = tmp_path / "bin" / "valkey-server"
    server.parent.mkdir()
    server.write_text(f'#!/bin/sh\n[ "$1" != --version ] || exit 0\ntouch {tmp_path}/started\nexec sleep 300\n')
    server.chmod(0o755)
    path = f"{server.parent}:{os.environ['PATH']}"
    with serving(tmp_path, "--model", tiny_model, PATH=path) as (process, printed):
        eventually((tmp_path / "started").exists, "the server to start")
        eventually(lambda: "reading the stored jobs" in printed(), "a start that takes long to be told")
        assert stop(process, signal.SIGINT) == 0
        assert "Traceback" not in printed()


def test_a_stop_while_the_engine_starts_is_a_clean_end(tmp_path: Path, tiny_model: Path) -> None:
    with serving(tmp_path, "--model", tiny_model) as (process, printed):
        eventually(lambda: "importing torch" in printed(), "the engine to start")
        assert stop(process, signal.SIGINT) == 0
        assert "worker_ready" not in printed()
        assert "Stopping.\n" in printed()
        assert "Traceback" not in printed()
    assert not (tmp_path / "data" / "redis.url").exists()


def test_a_stop_in_the_middle_of_the_first_message_tells_what_it_waits_for(tmp_path: Path, tiny_model: Path) -> None:
    flags = ["--first-message", "Hello", "--num-kv-blocks", "64", "--num-threads", "1", "--queue", "q"]
    with serving(tmp_path, "--model", tiny_model, *flags) as (process, printed):
        eventually(lambda: "> Hello\n" in printed(), "the first message")
        with RespClient((tmp_path / "data" / "redis.url").read_text().strip()) as client:
            eventually(lambda: client.call("KEYS", "*:reply:*"), "the job to be taken")
        engine = next(each for each in process.children() if "worker.engine_process" in each.cmdline())
        engine.suspend()  # so that the reply can't end in between
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "Stopping: 1 running job may take 30 s more. Ctrl-C again ends now" in printed(), "a word")
        engine.resume()
        assert stop(process, signal.SIGINT) == 0
        assert "From another terminal" not in printed()
    assert not (tmp_path / "data" / "redis.url").exists()


def test_an_embedded_server_that_is_killed_comes_back_until_its_data_are_gone(tmp_path: Path, tiny_model: Path) -> None:
    flags = ["--num-kv-blocks", "64", "--num-threads", "1", "--queue", "q"]
    with serving(tmp_path, "--model", tiny_model, *flags) as (process, printed):
        eventually(lambda: "worker_ready" in printed(), "the worker to be ready")
        data = tmp_path / "data"
        url = (data / "redis.url").read_text().strip()
        kill_server(data)
        eventually(lambda: "embedded_redis_restarted" in printed(), "the server to come back")
        with RespClient(url) as client:
            client.call("XADD", "pagemill:{q}:jobs:normal", "*", "id", "after", "prompt", "abc", "max_tokens", 3)
            state = "pagemill:{q}:state:after"
            eventually(lambda: client.call("HGET", state, "status") == b"done", "a job to be served")
        manifest = next(data.glob("appendonlydir/*.manifest"))
        manifest.write_text("no manifest\n")
        kill_server(data)
        assert process.wait(60) == 2
        (last,) = [line for line in printed().splitlines() if line.startswith("pagemill: ")]
        assert "the embedded server ended 6 times within a minute: " in last
        assert str(data / "server.log") in last
    assert not (data / "redis.url").exists()


def kill_server(data_dir: Path) -> None:
    os.kill(int((data_dir / "server.pid").read_text()), signal.SIGKILL)
