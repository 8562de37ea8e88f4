"""Lets one process at a time make a file, and others wait for it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path) -> Iterator[IO[str]]:
    """Hold an exclusive lock on the file `path` (made where missing, left behind). It ends with the process.

    A child that inherits the file's descriptor holds the lock as well, until it ends.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
