"""A child process that doesn't outlive this one, however this one ends.

A small shell watches a pipe from this process. When the pipe closes, be it by `end_watched`, by an exit or by SIGKILL,
the shell ends the child. That works on Linux and macOS alike, unlike a parent-death signal, which is Linux's alone and
fires when the *thread* that started the child ends.

    this process ──pipe──► sh ──starts──► child
                           └── reader of the pipe: end of file ──SIGTERM──► child

The write end must not leak into other children: start those by spawn, not by fork.
"""

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from worker.errors import StartupError

# Seconds from the end of the pipe until a child that ignores SIGTERM gets SIGKILL; WATCHER counts it in tenths.
KILL_AFTER_S: Final = 15.0

# Standard input is the pipe. The first word is a file that goes when the pipe closes, before the child does.
_WATCHER: Final = """
umask 077
goes_too=$1
shift
exec 3<&0 </dev/null
"$@" 3<&- &
child=$!
(
  read -r _ <&3
  [ -z "$goes_too" ] || rm -f "$goes_too"
  kill -TERM "$child" 2>/dev/null
  tries=0
  while kill -0 "$child" 2>/dev/null && [ "$tries" -lt 150 ]; do sleep 0.1; tries=$((tries + 1)); done
  kill -KILL "$child" 2>/dev/null
) >/dev/null 2>&1 &
reader=$!
exec 3<&-
wait "$child"
status=$?
kill -KILL "$reader" 2>/dev/null
exit "$status"
"""


def start_watched(
    command: Sequence[str],
    *,
    output: IO[bytes] | None = None,
    keep_open: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    goes_too: Path | None = None,
) -> subprocess.Popen[bytes]:
    """The watcher of a new child, in a session of its own: a Ctrl-C in the terminal is for this process alone.

    It ends with the child, with its exit code (128 and the number of the signal that ended it). The child writes to
    `output` (nowhere where left out) and inherits the descriptors `keep_open`, as the watcher does. `goes_too` is a
    file that is removed when this process ends or lets go. Raises StartupError where there is no shell.
    """
    sink = subprocess.DEVNULL if output is None else output
    # The watcher uses descriptor 3, and shells keep their own from 10 on where they find room.
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in keep_open]
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "pagemill-watcher", str(goes_too or ""), *command],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
            env=dict(os.environ if environment is None else environment),
            pass_fds=kept,
            start_new_session=True,
        )
    except OSError as error:
        raise StartupError(
            f"/bin/sh can't be started ({error.strerror}): Pagemill needs it to end what it starts"
        ) from error
    finally:
        for descriptor in kept:
            os.close(descriptor)


def end_watched(process: subprocess.Popen[bytes]) -> None:
    """End the child and wait until it is gone. Does no harm where it ended by itself."""
    let_go(process)
    try:
        process.wait(KILL_AFTER_S + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe, which tells the watcher to end the child."""
    assert process.stdin is not None, "the watcher has a pipe"
    process.stdin.close()
