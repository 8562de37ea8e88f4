"""Signals that tell a worker to stop, while it serves."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP call `stop` inside the block; what handled them before does so again after it.

    SIGHUP stays ignored where it was, under nohup for instance. Outside the main thread nothing is changed.
    """
    loop = asyncio.get_running_loop()
    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    if former[signal.SIGHUP] is signal.SIG_IGN:
        del former[signal.SIGHUP]
    handled = []
    for number in former:
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, stop)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
            signal.signal(number, former[number])
