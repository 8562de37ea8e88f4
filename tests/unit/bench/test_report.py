"""What the tables and the JSON object say of given runs."""

from typing import Any

import pytest

from model.config import ModelConfig
from ops.bench.bars import judge_bars
from ops.bench.measure import BatchResult, TokenCheck
from ops.bench.peers.catalog import BY_NAME
from ops.bench.report import check_lines, print_report
from ops.bench.runs import OursRun, PeerRun
from ops.bench.summary import Costs, summarize
from ops.bench.tables import markdown, tables_of
from ops.bench.work import num_operations, slot_bytes, step_weight_bytes
from ops.bench.workload import Lengths
from tests.unit.bench.made import ours_run

CONFIG = ModelConfig(320, 48, 96, 2, 3, 1, 16, 512, tie_word_embeddings=True)
COSTS = Costs(CONFIG, (4, 4), "float32", {"read_bytes_per_s": 1e9, "operations_per_s": 1e10})
STATIC, ONE_BY_ONE = BY_NAME["transformers"].label, BY_NAME["transformers"].alone


def peer_run(tokens_per_s: float) -> PeerRun:
    return PeerRun(1.0, round(tokens_per_s), 5, [0.4, 0.8], [5, 6, 7])


def result(batch: int, ours: list[OursRun], peer: list[PeerRun], verdict: str = "equal") -> BatchResult:
    check = TokenCheck(batch, 3, verdict) if verdict == "equal" else TokenCheck(batch, 3, verdict, 1, 0.25)
    peers = {"transformers": peer} if peer else {}
    return BatchResult(batch, [Lengths(20, 3), Lengths(30, 4)], ours, peers, [], check if peer else None)


@pytest.fixture
def batches() -> list[dict[str, Any]]:
    alone = result(1, [ours_run(20), ours_run(30), ours_run(40)], [peer_run(10), peer_run(10), peer_run(10)])
    many = result(
        32, [ours_run(90), ours_run(60), ours_run(80)], [peer_run(20), peer_run(20), peer_run(20)], "different"
    )
    return summarize([alone, many], COSTS)


def test_ratios_are_medians_over_the_alternations_with_their_range(batches: list[dict[str, Any]]) -> None:
    assert list(batches[0]["peers"]) == [ONE_BY_ONE]
    assert batches[0]["peers"][ONE_BY_ONE]["ratio"] == {
        "median": 3.0,
        "low": 2.0,
        "high": 4.0,
        "values": [2.0, 3.0, 4.0],
    }
    assert list(batches[1]["peers"]) == [STATIC, ONE_BY_ONE]
    assert batches[1]["peers"][STATIC]["ratio"]["values"] == [4.5, 3.0, 4.0]
    assert batches[1]["peers"][ONE_BY_ONE]["ratio"]["values"] == [9.0, 6.0, 8.0]
    assert batches[1]["ours"]["tokens_per_s"]["median"] == 80


def test_latencies_are_percentiles_over_all_alternations(batches: list[dict[str, Any]]) -> None:
    ours = batches[0]["ours"]
    assert ours["ttft_s"] == pytest.approx({"p50": 0.25, "p95": 0.3, "p99": 0.3})
    assert ours["token_gap_s"] == pytest.approx({"p50": 0.1, "p95": 0.2, "p99": 0.2})
    assert batches[0]["peers"][ONE_BY_ONE]["reply_s"] == pytest.approx({"p50": 0.6, "p95": 0.8, "p99": 0.8})


def test_the_shares_of_the_machine_s_limits_are_work_by_time_by_limit(batches: list[dict[str, Any]]) -> None:
    ours = batches[0]["ours"]
    num_bytes = 4 * step_weight_bytes(CONFIG, (4, 4)) + 100 * slot_bytes(CONFIG, 4)
    assert ours["bandwidth_share"]["median"] == pytest.approx(num_bytes / 1e9)
    operations = num_operations(CONFIG, [Lengths(20, 3), Lengths(30, 4)])
    assert ours["arithmetic_share"]["median"] == pytest.approx(operations / 1e10)
    assert ours["host_share"]["median"] == pytest.approx(0.05)
    assert ours["engine_host_share"]["median"] == pytest.approx(0.02 / 0.97)


def test_the_house_s_bars_are_judged_where_they_apply(batches: list[dict[str, Any]]) -> None:
    bars = {(bar["name"], bar["batch"]): bar for bar in judge_bars(batches)}
    assert bars[f"ratio to {ONE_BY_ONE}", 1] == {
        "name": f"ratio to {ONE_BY_ONE}",
        "batch": 1,
        "value": 3.0,
        "at_least": 2.0,
        "is_met": True,
    }
    assert not bars[f"ratio to {STATIC}", 32]["is_met"]
    assert bars["KV use", 1]["is_met"]
    assert bars["host work", 32]["is_met"]
    assert set(bars) == {
        (f"ratio to {ONE_BY_ONE}", 1),
        ("KV use", 1),
        (f"ratio to {STATIC}", 32),
        ("KV use", 32),
        ("host work", 32),
    }


def test_a_bar_that_is_missed_says_so() -> None:
    slow = result(32, [ours_run(10, kv_use=0.9, forward_s=0.8)], [peer_run(10)])
    bars = judge_bars(summarize([slow], COSTS))
    assert [(bar["name"], bar["is_met"]) for bar in bars] == [
        (f"ratio to {STATIC}", False),
        ("KV use", False),
        ("host work", False),
    ]


def test_one_line_a_batch_says_whether_the_tokens_are_the_peer_s(batches: list[dict[str, Any]]) -> None:
    tie = result(8, [ours_run()], [peer_run(10)], "tie")
    lines = check_lines([*batches, *summarize([tie, result(2, [ours_run()], [])], COSTS)])
    assert lines == [
        "batch 1: the first request's 3 greedy tokens equal the peer's",
        "batch 32: the first request's 3 greedy tokens DIFFER from the peer's from token 1 on "
        "(its logits differ by 2.5e-01)",
        "batch 8: the first request's 3 greedy tokens part from the peer's at token 1, at a tie "
        "(its logits differ by 2.5e-01)",
    ]


def test_the_tables_show_every_batch_and_peer(
    batches: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    print_report({"batches": batches, "bars": judge_bars(batches), "steps": None})
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert ["1", "pagemill", "2", "30.0", "", "0.70", "0.90", "250", "100"] in lines
    assert ["1", ONE_BY_ONE, "2", "10.0", "3.00 (2.00 to 4.00)", "0.60", "0.80", "", ""] in lines
    assert ["32", STATIC, "2", "20.0", "4.00 (3.00 to 4.50)", "0.60", "0.80", "", ""] in lines
    detail = next(line for line in lines if line[0] == "32" and len(line) == 10)
    assert detail[1:8] == ["250", "300", "100", "200", "95.0 %", "0.0 %", "5.0 %"]
    assert ["host work", "32", "0.05", "≤ 0.1", "yes"] in lines


def test_the_tables_of_a_document_are_markdown_by_rising_batch(batches: list[dict[str, Any]]) -> None:
    report = {"bench": "pagemill", "batches": batches[::-1], "bars": judge_bars(batches)}
    (columns, rows), (_, bars) = tables_of(report)
    lines = markdown(columns, rows).splitlines()
    assert lines[0].startswith("| batch | engine | requests | tokens/s | pagemill ÷ it |")
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        *(["| 1", "pagemill"], ["| 1", ONE_BY_ONE], ["| 32", "pagemill"]),
        *(["| 32", STATIC], ["| 32", ONE_BY_ONE]),
    ]
    assert len({line.count("|") for line in lines}) == 1
    assert len(bars) == len(report["bars"])


def test_replies_of_one_token_have_no_gaps_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    batches = summarize([result(1, [ours_run(gap_s=[])], [])], COSTS)
    assert batches[0]["ours"]["token_gap_s"] == {"p50": None, "p95": None, "p99": None}
    print_report({"batches": batches, "bars": [], "steps": None})
    assert "1\t250\t295\t\t\t95.0 %" in capsys.readouterr().out
