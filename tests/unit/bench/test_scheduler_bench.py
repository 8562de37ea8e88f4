"""The scheduler's bench: its loads are what it says they are, and its command prints every figure."""

import json

import pytest
from click.testing import CliRunner

from ops.bench.cli import command
from ops.bench.scheduler import PART_COLUMNS, STEP_COLUMNS
from ops.bench.scheduler_load import NUM_RUNNING, NUM_WAITING, POOLS, Pool, SteadyLoad
from scheduler import invariants


@pytest.mark.parametrize("pool", POOLS, ids=[pool.name for pool in POOLS])
def test_a_load_keeps_256_running_and_1000_waiting(pool: Pool) -> None:
    load = SteadyLoad("priority,deadline,fair", pool, seed=0)
    load.settle()
    num_steps = 40
    schedule, update = load.run(num_steps)
    assert [len(times) for times in (schedule.wall_ns, schedule.cpu_ns, update.wall_ns, update.cpu_ns)] == [40] * 4
    assert load.num_running / num_steps == pytest.approx(NUM_RUNNING, rel=0.1)
    assert len(load.scheduler.waiting) == pytest.approx(NUM_WAITING, rel=0.02)
    invariants.check(load.scheduler)
    stats = load.scheduler.stats()
    num_preemptions = stats.num_preemptions_recompute + stats.num_preemptions_swap
    assert (num_preemptions > 0) == (pool.max_num_seqs > NUM_RUNNING)


def test_the_command_prints_a_row_for_each_figure_and_all_of_them_as_json() -> None:
    result = CliRunner().invoke(command, ["scheduler", "--policies", "fcfs", "--steps", "3", "--repetitions", "1"])
    assert result.exit_code == 0, result.stderr
    *table, line = result.stdout.splitlines()
    rows = [row.split("\t") for row in table]
    step_rows = [row for row in rows if len(row) == len(STEP_COLUMNS)]
    assert step_rows[0] == list(STEP_COLUMNS)
    assert [row[:3] for row in step_rows[1:]] == [
        [call, "fcfs", pool.name] for pool in POOLS for call in ("schedule", "update")
    ]
    assert next(row for row in rows if len(row) == len(PART_COLUMNS)) == list(PART_COLUMNS)
    report = json.loads(line)
    assert [len(report["steps"]), len(report["parts"])] == [6, 6]
    assert all(row["cpu_p50_ms"] <= row["cpu_p99_ms"] for row in report["steps"])


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ("", "it names no policy"),
        (" ", "it names no policy"),
        ("fcfs quickest", "scheduling_policy names 'quickest': use one or more of fcfs"),
        ("fcfs,fair", "name it last"),
    ],
)
def test_a_policy_that_there_is_not_is_refused_before_anything_is_measured(policies: str, words: str) -> None:
    result = CliRunner().invoke(command, ["scheduler", "--policies", policies])
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in " ".join(result.stderr.split())
    assert "1 of 3" not in result.stderr
