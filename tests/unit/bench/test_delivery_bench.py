"""`pagemill bench delivery` on a tiny checkpoint: small, and with counts that are known beforehand."""

import json
from pathlib import Path

import pytest

from ops.bench.cli import main
from ops.bench.delivery import COLUMNS, Row, rows_of
from ops.bench.delivery_cases import Memory, Streaming, Takeover
from tests.tiny_checkpoint import write_tiny_checkpoint


def test_a_quick_run_measures_everything_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, json_file = write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "result.json"
    words = ["delivery", "--quick", "--model", str(model), "--jobs", "30", "--in-flight", "3", "--json", str(json_file)]
    assert main(words) == 0
    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report == json.loads(json_file.read_text())
    rows = [row.split("\t") for row in table]
    assert rows[0] == list(COLUMNS)
    assert [row[0] for row in rows[1:]] == [row["what"] for row in report["rows"]]
    sizes = report["sizes"]
    assert (sizes["num_jobs"], sizes["num_in_flight"], sizes["lease_ms"]) == (30, 3, 600)
    assert len(report["pickup_ms"]) == sizes["num_pickups"]
    assert len(report["renewal_ms"]) == sizes["num_rounds"]
    assert min(report["pickup_ms"] + report["renewal_ms"]) > 0
    assert report["streaming"]["num_events"] > 0
    assert report["streaming"]["wall_s"] >= sizes["streaming_s"]
    assert (report["memory"]["num_jobs"], report["memory"]["num_left"]) == (30, 0)
    takeover = report["takeover"]
    assert 0 < takeover["first_claim_s"] <= takeover["last_claim_s"]
    assert len(takeover["gaps_s"]) == 3
    assert takeover["bound_s"] == 0.75, "a lease and the longest time between two looks for what the dead held"


def test_each_figure_is_held_against_what_the_house_wants() -> None:
    def figures(lease_ms: int) -> dict[str, Row]:
        rows = rows_of(
            [4.0, 4.0, 30.0],
            Streaming(num_events=1000, wall_s=0.5, cpu_s=0.25),
            [6.0],
            Memory(10, 0, 1000, 1051, 2.0),
            Takeover(6.0, 6.5, [6.0, 12.0], 6.25),
            lease_ms,
        )
        return {row.what: row for row in rows}

    rows = figures(5000)
    missed = [what for what, row in rows.items() if not row.is_met]
    assert missed == [
        "token events, by the service's processor time",
        "renewing 256 leases, p50",
        "memory after them, by before",
        "longest gap that a client sees, p99",
    ]
    assert rows["token events, by the service's processor time"].measured == 4000
    assert rows["worker killed: first open by a peer"].bar == 6.25
    assert figures(1000)["longest gap that a client sees, p99"].bar is None
