"""Named errors of the scheduler. A caller's mistake raises one of these; a broken invariant is an `assert`."""


class SchedulerError(Exception):
    """Root of everything the scheduler raises on purpose."""


class InvalidSamplingParamsError(SchedulerError, ValueError):
    """A sampling parameter is out of range; the message names it and says what is accepted."""


class InvalidConfigError(SchedulerError, ValueError):
    """A size or limit of the scheduler or of its cache is out of range; the message names it."""


class InvalidPromptError(SchedulerError, ValueError):
    """The prompt has no tokens, or holds something that is no token id."""


class PromptTooLongError(SchedulerError, ValueError):
    """The prompt, with the tokens asked for, can never fit the context or the KV cache."""


class DuplicateSequenceError(SchedulerError, ValueError):
    """A sequence of this id is already known to the scheduler."""
