"""The simulator's own errors."""

from worker.errors import PagemillError


class SimulateError(PagemillError):
    """The trace can't be read or the options can't work; the message is one line that says what to do."""
