"""Recorded traffic: when requests came and how long they were, and no text.

    Azure     CSV    TIMESTAMP, ContextTokens, GeneratedTokens
    Mooncake  JSONL  timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens of the prompt)
    Pagemill  JSONL  arrival_ms, prompt_tokens, output_tokens, and maybe tenant, priority, hash_ids

The first line tells which one it is. Columns and fields that are not named here are passed over.
"""

import csv
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from ops.simulate.errors import SimulateError

# Prompt tokens that one hash id stands for.
HASH_BLOCK_TOKENS: Final = 512
# A longer prompt or reply is taken for a mistake in the file.
MAX_TOKENS: Final = 10_000_000
# Token ids from here on are a request's own. Below it lie those that stand for hash ids.
_OWN_TOKENS: Final = 2**30

_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `index` counts in order of arrival; `arrival_s` counts from the trace's first arrival.

    hash_ids: names of the prompt's blocks of `Trace.tokens_per_hash` tokens, the last one maybe partial. Equal ids at
    the same place mean equal prompts up to the block's end. Empty where the trace doesn't tell: nothing is shared then.
    """

    index: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    hash_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def own_token(self) -> int:
        """A token id that no other request of the trace has."""
        return _OWN_TOKENS + self.index


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `kind` is the format that they were read from."""

    kind: str
    requests: tuple[TraceRequest, ...]
    tokens_per_hash: int = HASH_BLOCK_TOKENS

    @property
    def num_distinct_hashes(self) -> int:
        """Distinct blocks of all prompts, tenants apart."""
        return len({(request.tenant, hash_id) for request in self.requests for hash_id in request.hash_ids})

    def prompt_tokens(self, request: TraceRequest) -> "array[int]":
        """Token ids of a prompt: equal where hash ids are equal, and made anew each time, so that none need be kept."""
        if not request.hash_ids:
            return array("i", [request.own_token]) * request.num_prompt_tokens
        tokens = self.hash_tokens(request)
        del tokens[request.num_prompt_tokens :]
        return tokens

    def hash_tokens(self, request: TraceRequest) -> "array[int]":
        """The tokens that a prompt's hash ids stand for: the prompt, its last block filled up.

        A hash id becomes a run of itself, which costs a memory fill. What tells two blocks apart is all before them
        as much as their own tokens, so that runs which look alike inside do no harm.
        """
        tokens = array("i")
        for hash_id in request.hash_ids:
            tokens.extend(array("i", [hash_id]) * self.tokens_per_hash)
        return tokens


def read_trace(path: Path) -> Trace:
    """Read a trace in any of the three formats.

    Raises SimulateError: where there is no such file or nothing in it, or for the first line that is not understood,
    by its number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            while first.isspace():
                first = file.readline()
            file.seek(0)
            if not first:
                raise SimulateError(f"{path} is empty: a trace has at least one request")
            kind = "azure" if first.startswith("TIMESTAMP") else "jsonl"
            rows = list(_azure_rows(path, file) if kind == "azure" else _json_rows(path, file))
    except OSError as error:
        raise SimulateError(f"can't read the trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SimulateError(f"{path} is no trace, since it is not UTF-8 text: use a CSV or JSONL file") from None
    if not rows:
        raise SimulateError(f"{path} has a header and no requests: add some")
    kinds = {row.kind for row in rows}
    if len(kinds) > 1:
        raise SimulateError(f"{path} mixes the formats {', '.join(sorted(kinds))}: use one per file")
    return Trace(kinds.pop(), _in_order(rows))


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of a file, checked."""

    kind: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    hash_ids: tuple[int, ...] = ()


def _in_order(rows: list[_Row]) -> tuple[TraceRequest, ...]:
    """Requests by arrival, the first at 0; hash ids become small numbers, in the order in which they appear."""
    rows = sorted(rows, key=lambda row: row.arrival_s)
    start_s = rows[0].arrival_s
    small: dict[int, int] = {}
    return tuple(
        TraceRequest(
            index,
            row.arrival_s - start_s,
            row.num_prompt_tokens,
            row.num_output_tokens,
            row.tenant,
            row.priority,
            tuple([small.setdefault(hash_id, len(small)) for hash_id in row.hash_ids]),
        )
        for index, row in enumerate(rows)
    )


def _azure_rows(path: Path, lines: Iterator[str]) -> Iterator[_Row]:
    reader = csv.reader(lines)
    header = next(reader)
    missing = [name for name in _AZURE_COLUMNS if name not in header]
    if missing:
        raise SimulateError(f"line 1 of {path} has no column {missing[0]}: use {','.join(_AZURE_COLUMNS)}")
    time_at, prompt_at, output_at = (header.index(name) for name in _AZURE_COLUMNS)
    for cells in reader:
        if not cells:
            continue
        try:
            yield _Row(
                "azure",
                _iso_seconds("TIMESTAMP", cells[time_at]),
                _count("ContextTokens", _whole("ContextTokens", cells[prompt_at])),
                _count("GeneratedTokens", _whole("GeneratedTokens", cells[output_at])),
            )
        except IndexError:
            raise SimulateError(
                f"line {reader.line_num} of {path} has {len(cells)} of {len(header)} columns: complete it"
            ) from None
        except ValueError as error:
            raise SimulateError(f"line {reader.line_num} of {path}: {error}") from None


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            yield _json_row(json.loads(line))
        except json.JSONDecodeError as error:
            raise SimulateError(
                f"line {number} of {path} is no JSON ({error.msg}, column {error.colno}): mend or delete it"
            ) from None
        except ValueError as error:
            raise SimulateError(f"line {number} of {path}: {error}") from None


def _json_row(value: Any) -> _Row:
    if isinstance(value, dict) and "arrival_ms" in value:
        names = ("pagemill", "arrival_ms", "prompt_tokens", "output_tokens")
    elif isinstance(value, dict) and "timestamp" in value:
        names = ("mooncake", "timestamp", "input_length", "output_length")
    else:
        raise ValueError("use an object with arrival_ms, prompt_tokens and output_tokens, or a line of Mooncake's")
    kind, time_name, prompt_name, output_name = names
    num_prompt_tokens = _number(value, prompt_name, int, lambda found: _count(prompt_name, found))
    return _Row(
        kind,
        _number(value, time_name, float, lambda found: _time(time_name, found)) / 1000,
        num_prompt_tokens,
        _number(value, output_name, int, lambda found: _count(output_name, found)),
        str(value.get("tenant", "")),
        _number(value, "priority", int, lambda found: found) if "priority" in value else 0,
        _hash_ids(value.get("hash_ids", []), num_prompt_tokens),
    )


def _number(value: dict[str, Any], name: str, kind: type, check: Callable[[Any], Any]) -> Any:
    found = value.get(name)
    is_number = isinstance(found, int) or (kind is float and isinstance(found, float))
    if not is_number or isinstance(found, bool):
        raise ValueError(f"{name} is {json.dumps(found)[:80]}: use a {'whole ' if kind is int else ''}number")
    return check(found)


def _whole(name: str, cell: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", cell.strip()):
        raise ValueError(f"{name} is {cell[:80]!r}: use a whole number")
    return int(cell)


def _iso_seconds(name: str, cell: str) -> float:
    try:
        return datetime.fromisoformat(cell).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {cell[:80]!r}: use a time like 2023-11-16 18:15:46.6805900") from None


def _count(name: str, value: int) -> int:
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} is {value}: use 1 to {MAX_TOKENS}")
    return value


def _time(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}: use milliseconds from 0")
    return value


def _hash_ids(value: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ValueError("hash_ids is something else: use a list of whole numbers")
    num_blocks = -(-num_prompt_tokens // HASH_BLOCK_TOKENS)
    if value and len(value) != num_blocks:
        raise ValueError(
            f"hash_ids has {len(value)} ids, but a prompt of {num_prompt_tokens} tokens has {num_blocks} blocks "
            f"of {HASH_BLOCK_TOKENS}: give as many, or none"
        )
    return tuple(value)
