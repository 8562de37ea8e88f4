"""`pagemill simulate` as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import cli
from ops.simulate.report import (
    LATENCY_COLUMNS,
    MODE_COLUMNS,
    PREFIX_COLUMNS,
    RATIO_COLUMNS,
    TIME_COLUMNS,
    TOTAL_COLUMNS,
)
from tests.unit.simulate.traces_at_hand import write_lines

Simulate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Runs the command; answers its exit code, stdout and stderr."""
    monkeypatch.delenv("PAGEMILL_DEBUG", raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["simulate", *map(str, words)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Thirty turns of three chats, each turn with all before it."""
    lines = [
        {
            "timestamp": 10 * n,
            "input_length": 512 * (n // 3 + 1),
            "output_length": 40,
            "hash_ids": [100 * (n % 3) + k for k in range(n // 3 + 1)],
        }
        for n in range(30)
    ]
    return write_lines(tmp_path / "chats.jsonl", lines)


def report_of(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert code == 0, err
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def test_tables_come_first_and_all_of_it_as_json_in_the_last_line(simulate: Simulate, chats: Path) -> None:
    result = simulate(chats, "--preset", "13b-a100", "--num-blocks", 500)
    report = report_of(result)
    rows = [line.split("\t") for line in result[1].splitlines()[:-1]]
    for columns in (LATENCY_COLUMNS, TOTAL_COLUMNS, TIME_COLUMNS):
        assert list(columns) in rows
    assert ["requests done", "30"] in rows
    assert report["trace"] == {
        "file": "chats.jsonl",
        "format": "mooncake",
        "requests": 30,
        "arrivals_s": 0.29,
        "prompt_tokens": 512 * 165,
        "output_tokens": 1200,
        "distinct_prompt_blocks": 30,
    }
    assert report["costs"]["bandwidth_gb_s"] == 2000
    assert report["sizes"]["num_blocks"] == report["result"]["kv"]["num_blocks"] == 500
    assert report["result"]["output_tokens"] == 1200
    assert report["result"]["prefix_hit_share"] > 0.3
    assert "simulating" in result[2]


def test_flags_replace_the_preset_s_figures_and_sizes(simulate: Simulate, chats: Path) -> None:
    words = ["--bandwidth-gb-s", 20, "--compute-tflops", 0.5, "--kv-kib", 64, "--overhead-ms", 0, "--block-size", 32]
    words += ["--max-num-seqs", 4, "--max-num-batched-tokens", 1024, "--no-prefix-caching", "--num-blocks", 2000]
    report = report_of(simulate(chats, "--preset", "cpu", "--requests", 12, "--speed-up", 2, *words))
    assert report["trace"]["requests"] == 12
    assert report["trace"]["arrivals_s"] == pytest.approx(0.055)
    assert (report["costs"]["kv_kib"], report["costs"]["overhead_ms"], report["costs"]["link_gb_s"]) == (64, 0, 10)
    assert report["sizes"]["max_num_seqs"] == 4
    assert report["result"]["prefix_hit_share"] == 0
    assert max(each["running"] or 0 for each in report["result"]["over_time"]) <= 4


def test_a_share_of_the_need_makes_a_pool_that_is_too_small(simulate: Simulate, chats: Path) -> None:
    report = report_of(simulate(chats, "--pool-share", 0.75))
    need = report["sizes"]["needed_blocks"]
    assert report["sizes"]["num_blocks"] == max(round(0.75 * need), 5120 // 16 + 3)
    assert report["result"]["requests"] == 30


def test_the_prefix_cache_alone_is_shown_beside_a_plain_lru(simulate: Simulate, chats: Path) -> None:
    result = simulate(chats, "--prefix-only", "--sizes", "50,100")
    report = report_of(result)
    assert result[1].splitlines()[0].split("\t") == list(PREFIX_COLUMNS)
    small, large = report["sizes"]
    assert (small["num_blocks"], large["num_blocks"]) == (15, 30)
    assert large["hit_share"] == large["plain_lru_hit_share"] == pytest.approx(135 / 165)
    assert small["hit_share"] >= small["plain_lru_hit_share"]


def test_the_chrome_trace_is_written_beside_the_report(simulate: Simulate, chats: Path, tmp_path: Path) -> None:
    report = report_of(simulate(chats, "--chrome-trace", tmp_path / "chrome.json"))
    events = json.loads((tmp_path / "chrome.json").read_text())["traceEvents"]
    assert (
        sum(event["ph"] == "X" and event["tid"] == 1 and event["pid"] == 1 for event in events)
        == (report["result"]["steps"])
    )


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    """Forty requests at once that grow from a few tokens to some hundred."""
    lines = [{"arrival_ms": n, "prompt_tokens": 20 + n, "output_tokens": 200 + 3 * n} for n in range(40)]
    return write_lines(tmp_path / "growing.jsonl", lines)


def test_the_modes_are_compared_in_one_run(simulate: Simulate, growing: Path) -> None:
    result = simulate(growing, "--preset", "13b-a100", "--pool-share", 0.4, "--compare-modes")
    report = report_of(result)
    rows = [line.split("\t") for line in result[1].splitlines()[:-1]]
    assert rows[0] == list(MODE_COLUMNS)
    assert [row[0] for row in rows[1:4]] == ["swap", "recompute", "auto"]
    assert rows[4] == list(RATIO_COLUMNS)
    modes = report["result"]["modes"]
    assert modes["swap"]["preemptions"]["swap"] > 0 == modes["swap"]["recomputed_tokens"]
    assert modes["recompute"]["preemptions"]["recompute"] > 0 == sum(modes["recompute"]["swapped_bytes"].values())
    best = max(modes[mode]["output_tokens_per_s"] for mode in ("swap", "recompute"))
    ratio = modes["auto"]["output_tokens_per_s"] / best
    assert report["result"]["auto_by_best"]["output_tokens_per_s"] == pytest.approx(ratio)
    assert report["sizes"]["num_swap_blocks"] == report["sizes"]["needed_blocks"] > report["sizes"]["num_blocks"]


def test_a_victim_goes_to_a_cpu_tier_of_the_given_size(simulate: Simulate, growing: Path) -> None:
    words = [growing, "--preset", "13b-a100", "--num-blocks", 200, "--preemption-mode", "swap", "--write-behind-mib", 0]
    ample, small, none = (
        report_of(simulate(*words, *more))["result"]
        for more in (
            ["--num-swap-blocks", 800],
            ["--num-swap-blocks", 30],
            ["--preemption-mode", "auto", "--num-swap-blocks", 0],
        )
    )
    assert (ample["preemptions"]["recompute"], ample["full_tier_recomputes"]) == (0, 0)
    assert small["full_tier_recomputes"] == small["preemptions"]["recompute"] > 0 < small["preemptions"]["swap"]
    assert none["preemptions"]["swap"] == 0 < none["preemptions"]["recompute"]
    block_bytes = 800 * 1024 * 16
    assert ample["swapped_bytes"]["out"] % block_bytes == 0 < ample["swapped_bytes"]["in"]
    assert ample["swapped_bytes"]["written_behind"] == 0


def test_the_engine_s_flags_reach_the_scheduler(simulate: Simulate, growing: Path) -> None:
    words = ["--scheduling-policy", "fcfs", "--scheduler-delay-factor", 0.5, "--target-itl-ms", 30, "--num-blocks", 300]
    words += [
        "--num-swap-blocks",
        300,
        "--swap-step-mib",
        100,
        "--write-behind-mib",
        25,
        "--preemption-mode",
        "recompute",
    ]
    sizes = report_of(simulate(growing, "--preset", "13b-a100", *words))["sizes"]
    assert sizes["scheduling_policy"] == "fcfs"
    assert (sizes["scheduler_delay_factor"], sizes["target_itl_ms"]) == (0.5, 30)
    assert (sizes["num_swap_blocks"], sizes["swap_step_blocks"], sizes["write_behind_blocks"]) == (300, 8, 2)
    assert sizes["preemption_mode"] == "recompute"


def test_a_target_keeps_the_time_between_tokens_and_costs_time_before_them(simulate: Simulate, growing: Path) -> None:
    words = [growing, "--preset", "13b-a100", "--num-blocks", 2000]
    plain, aimed = (report_of(simulate(*words, *more))["result"]["latency_s"] for more in ([], ["--target-itl-ms", 16]))
    assert aimed["inter_token"]["p95"] <= 0.016 < plain["inter_token"]["p95"]
    assert aimed["ttft"]["p95"] > plain["ttft"]["p95"]


def test_a_burst_comes_from_the_middle_of_the_trace_and_is_reported(simulate: Simulate, growing: Path) -> None:
    result = simulate(growing, "--preset", "13b-a100", "--speed-up", 0.002, "--num-blocks", 2000, "--burst", 5)
    burst = report_of(result)["result"]["burst"]
    assert burst["burst_s"] == pytest.approx(20 * 0.001 / 0.002)
    assert burst["before_tokens_per_s"] > 0
    assert any(line.startswith("steps until 95 % of that are back\t") for line in result[1].splitlines())


def test_the_json_object_is_written_to_a_file_as_well(simulate: Simulate, chats: Path, tmp_path: Path) -> None:
    report = report_of(simulate(chats, "--requests", 5, "--json", tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_replies_alone_can_be_made_longer(simulate: Simulate, chats: Path) -> None:
    facts = report_of(simulate(chats, "--scale-replies", 2.5))["trace"]
    assert (facts["prompt_tokens"], facts["output_tokens"]) == (512 * 165, 3000)


def test_the_same_words_print_the_same_figures(simulate: Simulate, chats: Path) -> None:
    first, again = (report_of(simulate(chats, "--requests", 10, "--seed", 7)) for _ in range(2))
    del first["took_s"], again["took_s"]
    assert first == again


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["{folder}/none.jsonl"], "can't read the trace {folder}/none.jsonl: No such file or directory"),
        (["{folder}/empty"], "{folder}/empty is empty: a trace has at least one request"),
        (["{folder}/torn.jsonl"], "line 2 of {folder}/torn.jsonl is no JSON"),
        (["{folder}/chats.jsonl", "--preset", "cpu"], "the preset cpu needs --bandwidth-gb-s"),
        (["{folder}/chats.jsonl", "--num-blocks", "9", "--pool-share", "1"], "exclude each other"),
        (["{folder}/chats.jsonl", "--compare-modes", "--burst", "3"], "--compare-modes makes three runs"),
        (["{folder}/chats.jsonl", "--scheduling-policy", "lifo"], "lifo"),
        (["{folder}/chats.jsonl", "--num-blocks", "2"], "not one of 30 requests fits a pool of 2 blocks"),
        (["{folder}/chats.jsonl", "--chrome-trace", "{folder}/none/x.json"], "can't write {folder}/none/x.json"),
        (["{folder}/azure.csv", "--prefix-only"], "this trace (azure) has no hash_ids"),
        (["{folder}/chats.jsonl", "--prefix-only", "--sizes", "5,x"], "use numbers above 0"),
        (["{folder}/chats.jsonl", "--scale-lengths", "0.0001"], "leave nothing of blocks of 512 tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    simulate: Simulate, chats: Path, tmp_path: Path, words: list[str], line: str
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "torn.jsonl").write_text(chats.read_text().splitlines()[0] + '\n{"timestamp": 3, "inp')
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,3,4\n")
    code, out, err = simulate(*(word.format(folder=tmp_path) for word in words))
    assert code == 2
    assert out == ""
    assert line.format(folder=tmp_path) in err.splitlines()[-1]
