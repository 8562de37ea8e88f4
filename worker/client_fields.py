"""What a client says of a job, in the wire's words."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from worker.client_errors import BadJobError
from worker.protocol_envelope import NAME

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


def checked_id(job_id: str) -> str:
    """`job_id` if a job can have it. Raises BadJobError."""
    if not NAME.fullmatch(job_id.encode("utf-8", "replace")):
        raise BadJobError(f"the id {job_id[:80]!r} can't be used: use 1 to 64 of A-Z a-z 0-9 _ -")
    return job_id


def checked_event_id(event_id: str) -> str:
    """`event_id` if an event can have it. Raises BadJobError."""
    if not re.fullmatch(r"[0-9]{1,20}-[0-9]{1,20}", event_id):
        raise BadJobError(f"{event_id[:80]!r} is no event's id: give the one of the last event read, or 0-0")
    return event_id


def body_of(prompt: Prompt | None) -> dict[str, Any]:
    """The field that says what the job is about."""
    if prompt is None:
        return {}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    items = list(prompt)
    return {"tokens" if items and all(isinstance(item, int) for item in items) else "messages": items}


def encoded(name: str, value: Any) -> bytes:
    """A field's value as the server is sent it. Raises BadJobError."""
    if isinstance(value, bytes):
        return value
    try:
        return as_field(value).encode()
    except UnicodeEncodeError as error:
        raise BadJobError(f"{name} holds half a surrogate pair at character {error.start}: send whole text") from None
    except (TypeError, ValueError) as error:
        raise BadJobError(f"{name} is no text and no JSON: {error}") from None


def as_field(value: Any) -> str:
    """A job's field as the wire's flat text: text as it is, true as 1, lists and maps as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)
