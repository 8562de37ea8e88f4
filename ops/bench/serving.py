"""A side's own end of the pipe. It needs the standard library alone, whatever Python the side runs in.

JSON lines: `{"do": NAME, ...}` on stdin is answered on stdout by `{"reply": ...}` or `{"error": "one line"}`.
The end of stdin ends the process.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from worker.errors import PagemillError

Handler = Callable[..., Any]


def serve(handlers: Mapping[str, Handler]) -> None:
    """A side's end: answer commands until stdin ends. Whatever libraries print goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the bench ends its sides in order
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = {"reply": handlers[message.pop("do")](**message)}
        except PagemillError as error:
            answer = {"error": one_line(str(error))}
        except Exception as error:
            if os.environ.get("PAGEMILL_DEBUG", "") not in ("", "0"):
                raise
            answer = {"error": one_line(f"{type(error).__name__}: {error} (PAGEMILL_DEBUG=1 shows where)")}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def one_line(text: str) -> str:
    """The text without line ends and rows of blanks."""
    return " ".join(text.split())
