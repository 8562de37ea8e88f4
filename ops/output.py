"""Standard output and standard error of all commands, and what happens where they can't be written.

A full disk, a closed descriptor or a reader that left is told like any other mistake: by one named error, raised where
the text was written. What can't be written to stderr is dropped: nobody is left to be told.
"""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from worker.errors import PagemillError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(PagemillError):
    """Standard output can't be written. `is_reader_gone`: whoever read it has left, as `head` does."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output can't be written: {error.strerror}")
        self.is_reader_gone = error.errno == errno.EPIPE


class _Stdout(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from error


class _Stderr(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


@contextmanager
def checked_output() -> Iterator[None]:
    """Inside the block stdout raises OutputError and stderr never fails. Streams that a test put there are left."""
    former = sys.stdin, sys.stdout, sys.stderr
    _open_closed()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open like any standard stream
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.__stderr__)
    try:
        yield
    finally:
        _flush()
        sys.stdin, sys.stdout, sys.stderr = former


def _open_closed() -> None:
    """Give each closed standard descriptor a null device, or the next file or socket would get its number.

    stdout's can only be read: what is written there fails, and is told.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest number that is free


def _text(raw: io.FileIO, like: TextIO | None) -> TextIO:
    """A text stream over `raw` with the ways of the stream that it replaces."""
    if like is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", write_through=True)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=bool(like.line_buffering),
    )


def discard_output() -> None:
    """Drop what waits to be written to stdout, and what comes: it failed, and that was told."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout.flush()


def _flush() -> None:
    """Write out what is left; where that fails, drop it, or the interpreter complains later."""
    try:
        sys.stdout.flush()
    except OutputError:
        discard_output()
    sys.stderr.flush()
