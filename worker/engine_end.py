"""How an engine ended, in words for the log and in one word for the metrics."""

import signal
from enum import StrEnum
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


class EngineEnd(StrEnum):
    """What ended an engine.

    OUT_OF_MEMORY: the kernel, by all appearances. SIGNAL: any other signal, from outside or of its own. EXIT: an exit
    code. ERROR: an exception, which it has told of. HUNG: the watchdog. CLOSED: its pipe closed, and it didn't end.
    """

    OUT_OF_MEMORY = "out_of_memory"
    SIGNAL = "signal"
    EXIT = "exit"
    ERROR = "error"
    HUNG = "hung"
    CLOSED = "closed"


def describe_end(code: int | None, *, has_oom_kill: bool) -> tuple[EngineEnd, str]:
    """What became of an engine process; `code` as Popen tells it, None where it still runs.

    `has_oom_kill`: the kernel has killed some process for lack of memory since this one was started.
    """
    if code is None:
        return EngineEnd.CLOSED, "the engine process closed its pipe"
    if code >= 0:
        return EngineEnd.EXIT, f"the engine process ended with exit code {code}"
    words = f"the engine process was ended by signal {-code}{_name_of(-code)}"
    if -code == signal.SIGKILL and has_oom_kill:
        return EngineEnd.OUT_OF_MEMORY, f"{words}, most likely the kernel's out-of-memory killer"
    return EngineEnd.SIGNAL, words


def num_oom_kills(vmstat: Path = VMSTAT) -> int:
    """How many processes the kernel has killed for lack of memory since it started; 0 where it doesn't tell."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _name_of(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return ""
