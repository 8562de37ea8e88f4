"""Results that were written before: read, told from other files, and put together."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from ops.bench.errors import BenchError

Shown = TypeVar("Shown")
# The command whose result it is, by the `bench` that a result names.
COMMANDS: Final = {
    "pagemill": "pagemill bench",
    **{f"pagemill {name}": f"pagemill bench {name}" for name in ("rates", "steps", "modes", "quality", "block-sizes")},
    **{name: f"pagemill bench {name}" for name in ("scheduler", "delivery")},
}
# Options by which our engine is another one: comparisons that differ in one of them are not put together.
ENGINE_OPTIONS: Final = ("model", "load_format", "dtype", "quantization", "device", "num_threads", "block_size")


def read_results(
    paths: Sequence[Path], kinds: Collection[str], show: Callable[[dict[str, Any]], Shown], what: str
) -> list[Shown]:
    """What `show` makes of the results in these files, comparisons of one workload and engine put together.

    Raises BenchError, which names the file, where one is no result, or none of `kinds`, of which there are `what`.
    """
    reports = []
    for path in paths:
        report = _read(path, kinds, what)
        try:
            # By itself first: what a file lacks shows only where it is looked for, and in which of them it is.
            show(merged([report])[0])
        except BenchError as error:
            raise BenchError(f"{path}: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise BenchError(
                f"{path} isn't what this version of `{COMMANDS[report['bench']]}` writes "
                f"({type(error).__name__}: {error}): measure again, with --json FILE"
            ) from error
        reports.append(report)
    return [show(report) for report in merged(reports)]


def _read(path: Path, kinds: Collection[str], what: str) -> dict[str, Any]:
    """A result of one of these kinds. Raises BenchError."""
    report, wanted = read_json_line(path), [f"`{COMMANDS[kind]}`" for kind in kinds]
    use = f"use what {', '.join(wanted[:-1])} or {wanted[-1]} writes with --json FILE"
    kind = report.get("bench") if isinstance(report, dict) else None
    command = COMMANDS.get(kind) if isinstance(kind, str) else None
    if not isinstance(report, dict) or command is None:
        raise BenchError(f"{path} isn't a result of the bench: {use}")
    if kind not in kinds:
        raise BenchError(f"{path} is a result of `{command}`, of which there are no {what}: {use}")
    return report


def read_json_line(path: Path) -> object:
    """The JSON that a file is, or that its last line is; None where it is neither. Raises BenchError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        return None
    for words in (text, *text.splitlines()[-1:]):
        try:
            found: object = json.loads(words)
        except (ValueError, RecursionError):
            continue
        return found
    return None


def merged(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, but that comparisons of one workload and one engine are one, with the batches and bars of them all."""
    found: list[dict[str, Any]] = []
    by_kind: dict[object, dict[str, Any]] = {}
    for report in reports:
        if report.get("bench") != "pagemill":
            found.append(report)
            continue
        engine = tuple(report["options"].get(name) for name in ENGINE_OPTIONS)
        kind = (tuple(sorted(report["workload"].items())), engine)
        if kind in by_kind:
            by_kind[kind]["batches"] += report["batches"]
            by_kind[kind]["bars"] += report["bars"]
        else:
            by_kind[kind] = report | {"batches": list(report["batches"]), "bars": list(report["bars"])}
            found.append(by_kind[kind])
    return found
