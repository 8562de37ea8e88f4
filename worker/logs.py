"""Logs: structlog events with keys, one JSON object a line or coloured for people, on stderr.

Prompts and replies are never logged: whatever carries text is cut to its length here, whoever logged it. Passwords
in URLs are masked, in tracebacks too. Events of the standard library's logging pass through the same chain.
"""

import logging
import re
import sys
from collections.abc import MutableMapping, Sized
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

# Keys whose values are what users wrote or what the model answered.
TEXT_KEYS = frozenset(
    {"prompt", "messages", "text", "tokens", "token_ids", "ids", "payload", "choices", "stop", "meta"}
)

# Of a URL on a line. Nobody may have escaped what a password holds, so it ends at the last @ of the line; in a query,
# where unix sockets have theirs, only with the line. Hiding too much is the better mistake.
_PASSWORD = re.compile(r"(\w://[^:\r\n]*):[^\r\n]*@")
_QUERY_PASSWORD = re.compile(r"(\w://[^\r\n]*?password=)[^\r\n]*", re.IGNORECASE)


def configure_logging(
    level: str = "info",
    log_format: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> None:
    """Set logging up for this process; a second call replaces the first. `stream` is stderr where left out."""
    handler = _StderrHandler(log_format == "json") if stream is None else logging.StreamHandler(stream)
    is_terminal = (stream or sys.stderr).isatty()
    is_console = log_format == "console" or (log_format == "auto" and is_terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.ExtraAdder(),
        hide_text,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    renderers = _renderers(is_console, is_terminal)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=renderers))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())


def is_json() -> bool:
    """Whether this process was told, with the format `json`, to write nothing but JSON to stderr."""
    return any(isinstance(handler, _StderrHandler) and handler.is_json for handler in logging.getLogger().handlers)


def say(words: str, event: str, level: str = "info", **values: Any) -> None:
    """A line for people on stderr; where only JSON may stand there, the log's event of that name with `values`."""
    if is_json():
        get_logger().log(logging.getLevelNamesMapping()[level.upper()], event, **values)
    else:
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()


class LogLevel:
    """The process's least severe level while it runs: the one that it was started with, or the most talkative of those
    that operators set for its queues.
    """

    def __init__(self) -> None:
        self._own = logging.getLogger().level
        self._wanted: dict[str, int] = {}

    def set(self, queue: str, level: str | None) -> None:
        """What operators want for one queue; None: nothing."""
        if level is None:
            self._wanted.pop(queue, None)
        else:
            self._wanted[queue] = logging.getLevelNamesMapping()[level.upper()]
        logging.getLogger().setLevel(min(self._wanted.values(), default=self._own))


def get_logger(**ids: Any) -> structlog.stdlib.BoundLogger:
    """A logger with `ids` (`request_id`, `worker_id`, `queue`) bound to everything that it writes."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("pagemill", **ids)
    return logger


def hide_text(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replace what users or the model wrote by its length, so that no code path can log it by accident.

    Numbers under such a key, a count of tokens for instance, stay.
    """
    for key in TEXT_KEYS & event.keys():
        if isinstance(event[key], Sized):
            event[key] = f"<{len(event[key])} hidden>"
    return event


def mask_passwords(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Mask the password of every URL in the event: in strings, in what holds them, and in the traceback."""
    for key, value in event.items():
        event[key] = _masked(value)
    return event


def _masked(value: Any) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return _QUERY_PASSWORD.sub(r"\1***", _PASSWORD.sub(r"\1:***@", value)) if "://" in value else value
        case dict():
            return {_masked(key): _masked(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_masked(item) for item in value]
    # Anything else is written by its repr.
    return _masked(repr(value)) if "://" in repr(value) else value


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is at that moment: progress bars put their own in its place while they are shown.

    `is_json`: nothing but JSON may stand there.
    """

    def __init__(self, is_json: bool) -> None:
        super().__init__()
        self.is_json = is_json

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line. The stream is set by hand: setStream flushes the former one, which may be closed."""
        self.stream = sys.stderr
        super().emit(record)


def _renderers(is_console: bool, has_colours: bool) -> list[Processor]:
    """The last part of the chain: exceptions as text, passwords masked, then the line."""
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=has_colours)
        if is_console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    return [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        mask_passwords,
        _event_first,
        renderer,
    ]


def _event_first(_logger: Any, _method: str, event: EventDict) -> MutableMapping[str, Any]:
    """Time, level and event lead the line: easier on the eye where lines are long."""
    leading = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return {**leading, **event}
