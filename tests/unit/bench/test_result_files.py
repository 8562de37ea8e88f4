"""Files that are given to `tables` and `plot`: what is no result is told by the file's name, and what makes one."""

import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench.cli import PARTS, main
from ops.bench.errors import BenchError
from ops.bench.pictures import MAKERS, pictures_of
from ops.bench.result_files import COMMANDS, read_results
from ops.bench.tables import KINDS, tables_of
from tests.unit.bench.test_pictures import COMPARISON, RATES, SIZES

SHOWN = {"tables": KINDS, "plot": tuple(MAKERS)}
# What somebody may take for a result: a model's configuration, a log, another bench's, numbers, text.
FOREIGN = (
    *("", "no JSON at all", "[1, 2]", "3", "null", '{"model": "x"}', '{\n  "hidden_size": 64\n}', "{" * 5000),
    *('{"bench": "vllm"}', '{"bench": null}', '{"bench": ["pagemill"]}', '{"bench": {}}', "\x00\xff"),
)


def refusal(name: str, path: Path, text: str | bytes) -> str:
    """What `pagemill bench NAME FILE` says of a file with this text."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BenchError) as caught:
        main([name, str(path), *(["--svg", str(path.parent)] if name == "plot" else [])])
    return str(caught.value)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("text", [*FOREIGN, b"\xff\xfe{"])
def test_what_is_no_result_is_told_with_the_commands_that_make_one(tmp_path: Path, name: str, text: str) -> None:
    told = refusal(name, tmp_path / "given.json", text)
    assert told.startswith(f"{tmp_path}/given.json isn't a result of the bench: use what `pagemill bench`")
    for kind in SHOWN[name]:
        assert f"`{COMMANDS[kind]}`" in told
    assert "writes with --json FILE" in told


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_of_another_measurement_is_told_as_such(tmp_path: Path, name: str) -> None:
    for kind in COMMANDS.keys() - set(SHOWN[name]):
        told = refusal(name, tmp_path / "given.json", json.dumps({"bench": kind}))
        what = "pictures" if name == "plot" else name
        assert f"given.json is a result of `{COMMANDS[kind]}`, of which there are no {what}" in told


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("rest", [{}, {"batches": 1}, {"steps": {"cases": [{}]}}, {"rates": [1], "sizes": ["x"]}])
def test_a_result_of_another_version_is_told_with_the_command_to_run_again(
    tmp_path: Path, name: str, rest: dict[str, Any]
) -> None:
    for kind in SHOWN[name]:
        told = refusal(name, tmp_path / "given.json", json.dumps({"bench": kind, **rest}))
        assert told.startswith(f"{tmp_path}/given.json isn't what this version of `{COMMANDS[kind]}` writes")
        assert "measure again" in told


def outcome(path: Path) -> str | None:
    """What reading the file for pictures and tables is refused with, or None."""
    kind = json.loads(path.read_text())["bench"]
    try:
        read_results([path], MAKERS, pictures_of, "pictures")
        if kind in KINDS:
            read_results([path], KINDS, tables_of, "tables")
    except BenchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("result", [COMPARISON, RATES, SIZES], ids=lambda each: str(each["bench"]))
@pytest.mark.parametrize("wrong", [None, "x/y", {}, 10**400])
def test_whatever_stands_in_a_value_s_place_the_file_is_refused_by_name_or_shown(
    tmp_path: Path, result: dict[str, Any], wrong: object
) -> None:
    """Each value of a result by turns."""
    path, told = tmp_path / "given.json", []
    for changed in _changed(result, wrong):
        path.write_text(json.dumps(changed | {"bench": result["bench"]}))
        told.append(outcome(path))
    assert all(each is None or each.startswith(str(path)) for each in told)
    assert any(told)


def _changed(value: Any, wrong: object) -> list[Any]:
    """The same with one value in it, at any depth, replaced."""
    if isinstance(value, dict):
        return [value | {name: each} for name, part in value.items() for each in [wrong, *_changed(part, wrong)]]
    if isinstance(value, list):
        return [
            [*value[:index], each, *value[index + 1 :]]
            for index, part in enumerate(value)
            for each in [wrong, *_changed(part, wrong)]
        ]
    return []


def test_a_result_may_be_spread_over_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps({"bench": "pagemill rates", "rates": []}, indent=2))
    assert main(["tables", str(path)]) == 0
    assert capsys.readouterr().out.startswith("| requests/s |")


@pytest.mark.parametrize("name", SHOWN)
def test_a_file_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(BenchError, match="can't read /nowhere: No such file or directory"):
        main([name, "/nowhere"])


def test_every_measurement_s_result_is_known_by_its_command() -> None:
    assert {command.split()[-1] for command in COMMANDS.values()} == {"bench", *PARTS} - {"tables", "plot"}
