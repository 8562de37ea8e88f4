"""`pagemill bench modes` and `pagemill bench block-sizes` on a tiny checkpoint."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from ops.bench import cli
from ops.bench.block_sizes import COLUMNS as SIZE_COLUMNS
from ops.bench.block_sizes import SizeRun, summary_of
from ops.bench.cli import main
from ops.bench.modes import COLUMNS as MODE_COLUMNS
from ops.bench.modes import MODES, ModeRuns, cpu_ratios, fastest_ratio
from ops.bench.parts import by_turns
from ops.bench.trace_run import TraceRun
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.bench.made import ours_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: object) -> tuple[list[list[str]], dict[str, Any]]:
    """The table's rows, and the JSON object."""
    model = ["--model", folder, "--cache-dir", folder / "cache", "--num-threads", 1]
    assert main([str(word) for word in (*words, *model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.split("\t") for line in lines[:-1]], json.loads(lines[-1])


def test_help_lists_each_measurement_and_each_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    modules = [path for path in Path(cli.__file__).parent.glob("*.py") if "\ndef command(" in path.read_text()]
    names = {path.stem.replace("_", "-") for path in modules} - {"cli"}
    assert len(names) >= 3
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out.partition("\nCommands:\n")[2]
    assert {line.split()[0] for line in commands.splitlines() if line.startswith("  ") and line[2] != " "} == names
    for name in names:
        assert main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: pagemill bench {name} [OPTIONS]")


def options_of(name: str | None) -> dict[str, dict[str, Any]]:
    """What a measurement's options are, by their names; None is the comparison."""
    found = cli.command if name is None else cli.command.get_command(click.Context(cli.command), name)
    assert found is not None
    return {param.opts[0]: param.to_info_dict() for param in found.params if isinstance(param, click.Option)}


def test_whatever_starts_an_engine_takes_the_same_options_of_it() -> None:
    """The same values, defaults and words. Quality compares on the CPU in float32; delivery takes the tokenizer."""
    wanted = ("--model", "--load-format", "--dtype", "--quantization", "--device", "--num-threads", "--cache-dir")
    comparison = options_of(None)
    others = {name: options_of(name) for name in cli.PARTS if name not in ("quality", "delivery")}
    starting = [name for name, options in others.items() if "--model" in options]
    assert sorted(starting) == ["block-sizes", "modes", "rates", "steps"]
    for name in starting:
        assert {option: others[name].get(option) for option in wanted} == {each: comparison[each] for each in wanted}


def test_rates_takes_whatever_the_comparison_takes_but_for_its_batches() -> None:
    missing = options_of(None).keys() - options_of("rates").keys()
    assert missing == {"--quick", "--batches", "--alternations", "--steps"}


def test_every_measurement_can_write_its_result_to_a_file() -> None:
    assert [name for name in cli.PARTS if "--json" not in options_of(name)] == ["tables", "plot"]


def test_options_of_the_comparison_before_a_measurement_are_refused() -> None:
    """They would change nothing."""
    with pytest.raises(click.UsageError, match="--seed, --dtype would be ignored: options of `steps` stand behind it"):
        main(["--seed", "1", "--dtype", "float32", "steps"])


def test_each_alternation_begins_with_another_side() -> None:
    assert list(by_turns("abc", 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_the_modes_serve_the_trace_by_turns_and_auto_is_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_ms": n, "prompt_tokens": 10, "output_tokens": 90} for n in range(8)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--scale-lengths", 1, "--scale-replies", 1, "--max-num-seqs", 8, "--pool-share", 0.4]
    rows, report = run(capsys, folder, "modes", trace, *words, "--alternations", 2)
    assert rows[0] == list(MODE_COLUMNS)
    assert [row[0] for row in rows[1:4]] == list(MODES)
    assert report["engine"]["num_blocks"] == round(0.4 * report["need_blocks"]) < report["engine"]["num_swap_blocks"]
    for mode, runs in report["modes"].items():
        assert len(runs) == 2
        for each in runs:
            assert each["num_output_tokens"] == 8 * 90
            assert each["num_swaps"] + each["num_recomputes"] > 0
            assert mode == "auto" or (each["num_swaps"] > 0) == (mode == "swap")
            assert mode == "auto" or (each["swapped_bytes"] > 0) == (mode == "swap")
            assert each["reply_s"] <= each["wall_s"]
    assert set(report["auto_by_best"]) == {"fastest_tokens_per_s", "tokens_per_cpu_s"}


def test_auto_is_compared_by_processor_time_in_each_alternation_and_by_the_fastest_runs() -> None:
    def runs(mode: str, *times: tuple[float, float]) -> ModeRuns:
        return ModeRuns(mode, [TraceRun(wall_s, cpu_s, 100, 1.0, 0.1, 0, 0, 0, 0) for wall_s, cpu_s in times])

    found = [
        runs("swap", (10.0, 5.0), (8.0, 4.0)),
        runs("recompute", (20.0, 4.0), (30.0, 8.0)),
        runs("auto", (16.0, 4.0), (40.0, 5.0)),
    ]
    assert cpu_ratios(found) == [1.0, 0.8]
    assert fastest_ratio(found) == 0.5


def test_larger_blocks_fill_less_of_what_they_take(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sizes", "8,64", "--batch", 2, "--num-requests", 3, "--alternations", 1]
    rows, report = run(capsys, folder, "block-sizes", *words)
    assert rows[0] == list(SIZE_COLUMNS)
    assert [row[0] for row in rows[1:]] == ["8", "64"]
    small, large = report["sizes"]
    assert large["kv_use"] < small["kv_use"] < 1
    assert small["requests_per_s"] > 0


def test_a_size_is_compared_with_blocks_of_16_run_by_run() -> None:
    runs = {
        16: [SizeRun(ours_run(wall_s=2.0), 2.0), SizeRun(ours_run(wall_s=4.0), 3.0)],
        64: [SizeRun(ours_run(wall_s=4.0, kv_use=0.5), 4.0), SizeRun(ours_run(wall_s=4.0, kv_use=0.7), 3.0)],
    }
    found = summary_of(64, runs, num_requests=8)
    assert found["cpu_by_reference"] == {"median": 0.75, "low": 0.5, "high": 1.0}
    assert found["fastest_by_reference"] == 0.5
    assert (found["kv_use"], found["requests_per_s"]) == (pytest.approx(0.6), 2.0)
    assert summary_of(64, {64: runs[64]}, num_requests=8)["fastest_by_reference"] == 1.0


@pytest.mark.parametrize("sizes", ["12", "16,12", "8,", "0"])
def test_sizes_that_no_block_has_are_refused_before_an_engine_starts(
    sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.BadParameter, match="use some of 8, 16, 32, 64 with commas between them"):
        main(["block-sizes", "--sizes", sizes, "--model", "/nowhere"])
    assert "starting" not in capsys.readouterr().err
