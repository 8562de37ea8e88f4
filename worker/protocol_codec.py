"""JSON and MessagePack of strangers, read strictly: bounded depth, no duplicate keys, no NaN, no extension types.

Both decoders give the same plain values (None, bool, int, float, str, list, dict with str keys), so that what is
checked later doesn't depend on the encoding. Everything that is wrong raises MalformedError, and nothing else does.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import msgpack

MAX_DEPTH = 32
# A number of more digits than this means nothing here; Python would spend quadratic time on it.
MAX_NUMBER_CHARS = 64
# More lists and maps than this in one level cost seconds to look through and say nothing that a prompt needs.
MAX_CONTAINERS = 100_000
_CONTAINERS: frozenset[type] = frozenset({dict, list})
_LOOKED_INTO: frozenset[type] = _CONTAINERS | {str, float}
_PLAIN: frozenset[type] = _LOOKED_INTO | {type(None), bool, int}


class MalformedError(ValueError):
    """The bytes are not the encoding they claim to be, or use what is refused; the message says which."""


def decode_json(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """The value of UTF-8 JSON `data`. Raises MalformedError."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_int=_whole_number,
            parse_float=_fraction,
            parse_constant=_refuse_constant,
        )
    except MalformedError:
        raise
    except UnicodeDecodeError as error:
        raise MalformedError(f"it is not UTF-8 at byte {error.start}: send JSON in UTF-8") from error
    except RecursionError as error:
        raise MalformedError(f"it is nested deeper than {max_depth} levels: flatten it") from error
    except json.JSONDecodeError as error:
        raise MalformedError(
            f"it is not JSON ({error.msg}, character {error.pos}): send what a JSON encoder writes"
        ) from error
    check_plain(value, max_depth)
    return value


def decode_msgpack(data: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """The value of MessagePack `data`; `str` must be UTF-8 and `bin` is refused. Raises MalformedError."""
    try:
        # The hook checks the keys, with clearer words than the library's own check.
        value = msgpack.unpackb(
            data, raw=False, strict_map_key=False, object_pairs_hook=_unique, ext_hook=_refuse_extension
        )
    except MalformedError:
        raise
    except UnicodeDecodeError as error:
        raise MalformedError("a string in it is not UTF-8: encode text so before it is packed") from error
    except msgpack.ExtraData as error:
        raise MalformedError("bytes follow after the value: send one value alone") from error
    except msgpack.StackError as error:
        raise MalformedError(f"it is nested deeper than {max_depth} levels: flatten it") from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedError("it is not MessagePack, or it is cut off: send all that an encoder packs") from error
    check_plain(value, max_depth)
    return value


def check_plain(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raises MalformedError unless `value` is plain data: known types, finite numbers, text that can be encoded, at
    most `max_depth` containers deep.

    Level by level, without recursion; a list of whole numbers costs one pass in C.
    """
    level, depth = [value], 0
    while level:
        kinds = set(map(type, level))
        for kind in kinds - _PLAIN:
            raise MalformedError(f"it holds a value of type {kind.__name__}: use text, numbers, lists and maps")
        if not kinds & _LOOKED_INTO:
            return
        containers = [item for item in level if type(item) in _CONTAINERS]
        depth += 1
        if containers and depth > max_depth:
            raise MalformedError(f"it is nested deeper than {max_depth} levels: flatten it")
        if len(containers) > MAX_CONTAINERS:
            raise MalformedError(f"it holds more than {MAX_CONTAINERS} lists and maps: send fewer")
        for item in level:
            if type(item) is str:
                _check_text(item)
            elif type(item) is float and not math.isfinite(item):
                raise MalformedError("it holds NaN or an infinity: use finite numbers")
        level = []
        for container in containers:
            if type(container) is dict:
                level.extend(container.keys())
                level.extend(container.values())
            else:
                level.extend(container)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedError("a string in it holds half of a surrogate pair: send whole characters") from error


def _unique(pairs: list[tuple[Any, Any]]) -> Mapping[str, Any]:
    for key, _ in pairs:
        if type(key) is not str:
            raise MalformedError("a map in it has a key that is not text: use text")
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedError(f"a map in it has the key {key[:64]!r} twice: give each once")
            seen.add(key)
    return result


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise MalformedError(f"it holds a number of {len(digits)} digits: use at most {MAX_NUMBER_CHARS}")
    return int(digits)


def _fraction(digits: str) -> float:
    value = float(digits) if len(digits) <= 4 * MAX_NUMBER_CHARS else math.inf
    if not math.isfinite(value):
        raise MalformedError("it holds a number that is out of range: use what fits 64 bits")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedError(f"it holds {name}: use finite numbers")


def _refuse_extension(code: int, _: bytes) -> NoReturn:
    raise MalformedError(f"it holds a MessagePack extension of type {code}: use text, numbers, lists and maps")
