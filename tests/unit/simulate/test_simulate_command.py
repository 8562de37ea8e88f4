"""`pagemill simulate` as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import cli
from ops.simulate.report import LATENCY_COLUMNS, PREFIX_COLUMNS, TIME_COLUMNS, TOTAL_COLUMNS
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
