"""The bench's own errors."""

from worker.errors import PagemillError


class BenchError(PagemillError):
    """The bench can't be run, or what it ran is worth nothing; the message is one line that says why."""
