"""A side for tests, which needs no model: python -m tests.unit.bench.echo_side OPTIONS_JSON"""

import json
import os
import sys
from typing import Any

from ops.bench.errors import BenchError
from ops.bench.serving import serve


def echo(value: Any) -> Any:
    """Answers the options and the value, and prints beside it, as libraries do."""
    sys.stdout.write("a library says hello\n")
    return [json.loads(sys.argv[1]), value]


def refuse() -> None:
    """Ends in an error of ours."""
    raise BenchError("this can't be: do that")


def crash() -> None:
    """Ends in an error that nobody foresaw."""
    raise ValueError("no\nsuch value")


def leave() -> None:
    """Ends the process."""
    os._exit(7)


if __name__ == "__main__":
    serve({"echo": echo, "refuse": refuse, "crash": crash, "leave": leave})
