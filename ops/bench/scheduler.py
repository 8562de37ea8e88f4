"""`pagemill bench scheduler`: what deciding a step costs, without a model.

One core, the garbage collector on. A steady load is measured for each policy: with blocks for everybody, with too few,
and with too few and a CPU tier. Each figure is the median of a few repetitions, by turns.

Wall time is what a step waits, whatever else the machine does meanwhile. The thread's processor time leaves out the
turns of other processes, but not what they take from caches and from the other thread of a core. Each repetition
decides the same steps, so the least of a step's processor times is the nearest to what it takes alone: `undisturbed` is
that for each step, with the garbage collections of each repetition on top, which don't fall on the same steps.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import click

from ops.bench.block_cases import BATCH, allocate_and_free_ns, lookup_ns
from ops.bench.flags import json_option
from ops.bench.measure import say
from ops.bench.result import publish
from ops.bench.runs import percentile
from ops.bench.scheduler_load import POOLS, Pool, SteadyLoad, Times
from ops.params import COUNT
from ops.simulate.engine_flags import PolicyParam
from ops.tables import print_table

POLICIES: Final = (
    *("fcfs", "priority", "deadline", "fair"),
    *("priority,fair", "deadline,priority", "fair,deadline", "priority,deadline,fair"),
)
SCHEDULE_BAR_MS: Final = 0.5
STEP_COLUMNS: Final = (
    *("call", "policy", "pool", "running", "p50 ms", "p99 ms", "p50 CPU ms", "p99 CPU ms"),
    *("undisturbed p50 ms", "p99 ms", "bar", "met"),
)
PART_COLUMNS: Final = ("what", "unit", "measured", "bar", "met")


@dataclass(frozen=True, slots=True)
class StepRow:
    """One call, `schedule` or `update`, under one load; `bar_ms`, where there is one, is for the undisturbed p99."""

    call: str
    policy: str
    pool: str
    mean_num_running: float
    wall_p50_ms: float
    wall_p99_ms: float
    cpu_p50_ms: float
    cpu_p99_ms: float
    undisturbed_p50_ms: float
    undisturbed_p99_ms: float
    bar_ms: float | None


@dataclass(frozen=True, slots=True)
class PartRow:
    """One small operation."""

    what: str
    unit: str
    measured: float
    bar: float


def _read_policies(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Each policy once; all eight where nothing is said."""
    if value is None:
        return POLICIES
    policies = tuple(dict.fromkeys(PolicyParam().convert(word, param, ctx) for word in value.split()))
    if not policies:
        raise click.BadParameter('it names no policy: write one or more, like "fcfs priority,fair".', ctx, param)
    return policies


@click.command("scheduler")
@click.option(
    "--policies",
    callback=_read_policies,
    help="Values of `pagemill serve --scheduling-policy`, with a space between them.  [default: eight]",
)
@click.option("--steps", type=COUNT, default=1000, help="Steps of each repetition.")
@click.option("--repetitions", type=COUNT, default=3, help="Of each load, by turns.")
@click.option("--seed", type=int, default=0, help="Decides lengths, tenants, priorities and deadlines.")
@json_option
def command(policies: tuple[str, ...], steps: int, repetitions: int, seed: int, json_file: str | None) -> None:
    """Measure what the scheduler's decisions cost: 256 sequences decode, 1,000 wait, and no model computes.

    Tables go to stdout, and as its last line one JSON object with all figures.
    """
    rows = [row for pool in POOLS for row in measure_pool(pool, policies, steps, repetitions, seed)]
    parts = measure_parts(repetitions)
    print_table("One step", STEP_COLUMNS, [_shown_step(row) for row in rows])
    print_table("Blocks and prefixes", PART_COLUMNS, [_shown_part(part) for part in parts])
    report = {"bench": "scheduler", "steps": [asdict(r) for r in rows], "parts": [asdict(p) for p in parts]}
    publish(report, json_file)


def measure_pool(pool: Pool, policies: Sequence[str], num_steps: int, repetitions: int, seed: int) -> list[StepRow]:
    """All policies over one pool, by turns. Only one load is alive at a time, as in a worker: the garbage collector
    would walk the others too."""
    taken: dict[str, list[tuple[Times, Times, float]]] = {policy: [] for policy in policies}
    for repetition in range(repetitions):
        for policy in policies:
            say(f"{pool.name}: {policy}, {repetition + 1} of {repetitions}")
            load = SteadyLoad(policy, pool, seed)
            load.settle()
            schedule, update = load.run(num_steps)
            taken[policy].append((schedule, update, load.num_running / num_steps))
    rows = []
    for policy, runs in taken.items():
        mean = statistics.mean([run[2] for run in runs])
        rows.append(_row("schedule", policy, pool, mean, [run[0] for run in runs], SCHEDULE_BAR_MS))
        rows.append(_row("update", policy, pool, mean, [run[1] for run in runs], None))
    return rows


def measure_parts(repetitions: int) -> list[PartRow]:
    """Blocks and prefixes: the median of some repetitions, after one that warms up."""

    def median(call: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        measured = [call() for _ in range(1 + 3 * repetitions)][1:]
        return statistics.median([pair[0] for pair in measured]), statistics.median([pair[1] for pair in measured])

    alone, batched = (median(partial(allocate_and_free_ns, batch)) for batch in (1, BATCH))
    first, again = median(lookup_ns)
    return [
        PartRow("allocate a block alone", "µs", alone[0] / 1e3, 1.5),
        PartRow("free a block alone", "µs", alone[1] / 1e3, 1.5),
        PartRow(f"allocate {BATCH} blocks, each", "µs", batched[0] / 1e3, 0.4),
        PartRow(f"free {BATCH} blocks, each", "µs", batched[1] / 1e3, 0.4),
        PartRow("prefix lookup of a new prompt, each token", "ns", first, 150),
        PartRow("the same lookup again, each token", "ns", again, 150),
    ]


def _row(call: str, policy: str, pool: Pool, mean: float, runs: list[Times], bar_ms: float | None) -> StepRow:
    def median_ms(lists: list[list[int]], percent: float) -> float:
        return statistics.median([percentile(values, percent) for values in lists]) / 1e6

    wall, cpu, undisturbed = [run.wall_ns for run in runs], [run.cpu_ns for run in runs], _undisturbed_ns(runs)
    return StepRow(
        call,
        policy,
        pool.name,
        mean,
        wall_p50_ms=median_ms(wall, 50),
        wall_p99_ms=median_ms(wall, 99),
        cpu_p50_ms=median_ms(cpu, 50),
        cpu_p99_ms=median_ms(cpu, 99),
        undisturbed_p50_ms=median_ms(undisturbed, 50),
        undisturbed_p99_ms=median_ms(undisturbed, 99),
        bar_ms=bar_ms,
    )


def _undisturbed_ns(runs: list[Times]) -> list[list[int]]:
    """For each repetition, the least that each step took in any of them, and the collections of this one."""
    nets = [[cpu - gc for cpu, gc in zip(run.cpu_ns, run.gc_ns, strict=True)] for run in runs]
    least = [min(times) for times in zip(*nets, strict=True)]
    return [[net + gc for net, gc in zip(least, run.gc_ns, strict=True)] for run in runs]


def _shown_step(row: StepRow) -> tuple[object, ...]:
    wall, cpu = (row.wall_p50_ms, row.wall_p99_ms), (row.cpu_p50_ms, row.cpu_p99_ms)
    times = [f"{value:.3f}" for value in (*wall, *cpu, row.undisturbed_p50_ms, row.undisturbed_p99_ms)]
    judged = ("", "") if row.bar_ms is None else (f"≤ {row.bar_ms:g}", _verdict(row.undisturbed_p99_ms, row.bar_ms))
    return (row.call, row.policy, row.pool, f"{row.mean_num_running:.0f}", *times, *judged)


def _shown_part(part: PartRow) -> tuple[object, ...]:
    return (part.what, part.unit, f"{part.measured:.3g}", f"≤ {part.bar:g}", _verdict(part.measured, part.bar))


def _verdict(value: float, most: float) -> str:
    return "yes" if value <= most else "NO"
