"""How a command that runs until it is told to stop ends by a signal, in whatever it is just doing."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP came. Like Ctrl-C it passes through every `except Exception`, asyncio's too."""


@contextmanager
def stops_by_signal() -> Iterator[None]:
    """Inside the block the first signal raises StopSignal; later ones don't disturb the clearing up.

    SIGHUP stays ignored where it was, under nohup for instance. Outside the main thread nothing is changed.
    """
    former = {number: signal.getsignal(number) for number in SIGNALS}
    if former[signal.SIGHUP] is signal.SIG_IGN:
        del former[signal.SIGHUP]
    try:
        for number in former:
            signal.signal(number, _stop)
    except ValueError:
        former = {}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def clearing_up() -> None:
    """From here on signals are ignored: what is left takes seconds, and must not be cut short."""
    for number in SIGNALS:
        with suppress(ValueError):
            signal.signal(number, signal.SIG_IGN)


def _stop(_number: int, _frame: FrameType | None) -> None:
    clearing_up()
    raise StopSignal
