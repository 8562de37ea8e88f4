"""The compiled code on disk, complete and intact or not at all.

    ROOT/<digest>/
        */MODULE.NAME-*     numba's index and code of a body
        NAME.ready          the SHA-256 of each of them: written last, so a body without it is not complete
        NAME.lock           locked by the process that compiles the body, while others wait

numba believes what it finds: it unpickles its files and jumps into their code. So they are compared with their digests
before it sees them, and a body that a full disk or a crash has damaged is compiled anew.
"""

import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

log = logging.getLogger("pagemill.kernels")

_chosen_root: Path | None = None


def set_cache_root(root: Path | None) -> None:
    """Keep code that is compiled from here on in `root`; None: where `cache_root` says. What is loaded stays."""
    global _chosen_root  # noqa: PLW0603 - the process has one cache of compiled code
    _chosen_root = root


def cache_root() -> Path:
    """The folder that was chosen, else $NUMBA_CACHE_DIR, else <user cache>/pagemill/kernels."""
    if _chosen_root is not None:
        return _chosen_root
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pagemill" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagemill" / "kernels"


class CodeCache:
    """The folder of one version of the sources, compiler and processor. Made by `open_cache`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_damage_told = False
        self.is_read_only = False

    def is_intact(self, name: str, module: str) -> bool:
        """True where all files of a body are there, as they were written."""
        try:
            return self._ready(name).read_text(encoding="utf-8") == self._digests(name, module)
        except (OSError, UnicodeDecodeError):
            return False

    def is_damaged(self, name: str, module: str) -> bool:
        """True where a body was complete once and is not intact."""
        return self._ready(name).exists() and not self.is_intact(name, module)

    def seal(self, name: str, module: str) -> None:
        """Say that a body is complete. Raises OSError."""
        part = self.folder / f"{name}.part-{os.getpid()}"
        part.write_text(self._digests(name, module), encoding="utf-8")
        part.replace(self._ready(name))

    def forget(self, name: str, module: str) -> None:
        """Remove all files of a body. Raises OSError."""
        self._ready(name).unlink(missing_ok=True)
        for path in self.folder.glob(f"*/{module}.{name}-*"):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Be the one process that changes the files of a body. Raises OSError."""
        with (self.folder / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def tell_damage(self) -> None:
        """Log once that something here was damaged, however many bodies are."""
        if not self._is_damage_told:
            self._is_damage_told = True
            log.warning("the cache of compiled kernels in %s is damaged: they are compiled again", self.folder)

    def give_up(self, error: Exception) -> None:
        """Log once that nothing can be kept here, and write no more."""
        if not self.is_read_only:
            self.is_read_only = True
            _tell_unwritable(self.folder, error)

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"

    def _digests(self, name: str, module: str) -> str:
        paths = sorted(path for path in self.folder.glob(f"*/{module}.{name}-*") if path.suffix in (".nbi", ".nbc"))
        lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
        return "".join(lines) or "no files\n"


@cache
def open_cache(root: Path, digest: str) -> CodeCache | None:
    """The cache in `root`, made if need be; None, and a warning, where nothing can be written there."""
    folder = root / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        _tell_unwritable(folder, error)
        return None
    return CodeCache(folder)


def _tell_unwritable(folder: Path, error: Exception) -> None:
    reason = getattr(error, "strerror", None) or error
    log.warning(
        "compiled kernels can't be kept in %s (%s): they are compiled at every start; make room or set cache_dir",
        folder,
        reason,
    )
