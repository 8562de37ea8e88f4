"""Prints a reply as it comes. What has been printed can't be taken back, so a restart is told apart from a repeat."""

import sys
from typing import TextIO

from worker.client import AsyncClient
from worker.reply_events import Reply

_ANEW = "\n[the reply began anew]\n"
# Control characters that a reply must not send to a terminal: all but tab and line feed.
_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}


class StreamedText:
    """Writes growing text to `stream`. After a `reset` the same text again prints nothing until it goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._printed = ""
        self._text = ""

    def add(self, text: str) -> None:
        """Append `text` to what the reply says so far."""
        self._text += text
        if self._printed.startswith(self._text):
            return
        if not self._text.startswith(self._printed):
            self._write(_ANEW)
            self._printed = ""
        self._write(self._text[len(self._printed) :])
        self._printed = self._text

    def reset(self) -> None:
        """What was said so far is void; what comes next begins the reply."""
        self._text = ""

    def finish(self) -> None:
        """End the line, if anything was printed."""
        if self._text != self._printed:
            self._write(_ANEW + self._text)
            self._printed = self._text
        if self._printed and not self._printed.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text.translate(_CONTROL) if self._stream.isatty() else text)
        self._stream.flush()


async def print_reply(client: AsyncClient, job_id: str) -> Reply:
    """Read a reply to its end and print its text to stdout as it comes; its other choices, if any, at the end."""
    reply, printed = Reply(), StreamedText(sys.stdout)
    async for event in client.stream(job_id):
        if event.kind == "reset":
            printed.reset()
        num_known = 0 if event.kind == "reset" else len(reply.text)
        reply.add(event)
        printed.add(reply.text[num_known:])
    printed.finish()
    for index, choice in enumerate(reply.choices[1:], start=1):
        printed = StreamedText(sys.stdout)
        printed.add(f"[choice {index}]\n{choice.text}")
        printed.finish()
    return reply
