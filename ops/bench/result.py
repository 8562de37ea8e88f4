"""Where the result of a measurement goes: stdout's last line, a file, pictures."""

import json
from pathlib import Path
from typing import Any

from ops.bench.errors import BenchError
from ops.bench.pictures import draw_report


def publish(report: dict[str, Any], json_file: str | None = None, svg: str | None = None) -> None:
    """Print the result as one line of JSON; write it to the file, too, and its pictures into the folder `svg`.

    It is printed first, so that what was measured is there whatever becomes of the rest. Raises BenchError where that
    can't be written.
    """
    line = json.dumps(report)
    print(line)
    try:
        if json_file is not None:
            Path(json_file).write_text(line + "\n")
        if svg is not None:
            draw_report(report, Path(svg))
    except OSError as error:
        raise BenchError(f"can't write {error.filename or json_file or svg}: {error.strerror}") from error
