"""`pagemill bench delivery`: what the queue and the wire cost, without a model.

Workers are real but for the arithmetic (see `scripted_engine`), and so is the server, embedded and the bench's own.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from ops.bench.delivery_cases import (
    NUM_LEASES,
    Memory,
    Place,
    Streaming,
    Takeover,
    measure_memory,
    measure_pickup,
    measure_renewal,
    measure_streaming,
    measure_takeover,
)
from ops.bench.flags import cache_dir_option, json_option
from ops.bench.machine import machine_facts, warnings_of
from ops.bench.measure import say
from ops.bench.parts import cache_folder, checkpoint_path
from ops.bench.result import publish
from ops.bench.runs import percentile
from ops.params import COUNT
from ops.tables import print_table
from worker.embedded import EmbeddedServer
from worker.logs import configure_logging

COLUMNS: Final = ("what", "unit", "measured", "bar", "met")
# What the house wants.
PICKUP_BAR_MS: Final = 5.0
EVENTS_BAR: Final = 5_000.0
RENEWAL_BAR_MS: Final = 5.0
MEMORY_BAR: Final = 1.05
# With leases of 5 s.
GAP_BAR_S, GAP_LEASE_MS = 11.0, 5_000
# Processor time is counted in ticks.
TICK_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    num_pickups: int
    streaming_s: float
    num_rounds: int
    num_jobs: int
    num_in_flight: int
    lease_ms: int


FULL: Final = Sizes(300, 8.0, 500, 10_000, 50, GAP_LEASE_MS)
# To see that everything works; its figures mean little.
QUICK: Final = Sizes(5, 0.5, 5, 40, 4, 600)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, and what it should at most be, or at least where `is_least`; None where nothing is wanted of it."""

    what: str
    unit: str
    measured: float
    bar: float | None = None
    is_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether it is what is wanted."""
        if self.bar is None:
            return True
        return self.measured >= self.bar if self.is_least else self.measured <= self.bar


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", default="smollm2", help="Checkpoint whose tokenizer makes the texts.")
@click.option("--quick", is_flag=True, help="A small run, to see that everything works: its figures mean little.")
@click.option("--jobs", type=COUNT, help="Jobs after which the server's memory is compared.  [default: 10000]")
@click.option("--in-flight", type=COUNT, help="Jobs of the worker that is killed.  [default: 50]")
@click.option("--lease-ms", type=click.IntRange(min=300), help="Lease of that worker.  [default: 5000]")
@click.option("--with-model", is_flag=True, help="Kill a worker that computes, too: two engines at once, for minutes.")
@cache_dir_option
@json_option
def command(
    model: str,
    quick: bool,
    jobs: int | None,
    in_flight: int | None,
    lease_ms: int | None,
    with_model: bool,
    cache_dir: str | None,
    json_file: str | None,
) -> None:
    """Measure what the queue and the wire cost, without a model: picking jobs up, streaming replies, renewing leases.

    Also what is left on the server after many jobs, and how long clients wait when their worker is killed.

    A table goes to stdout, and as its last line one JSON object with all figures.
    """
    configure_logging("warning")  # to stderr: stdout is for the result
    preset = QUICK if quick else FULL
    sizes = Sizes(
        preset.num_pickups,
        preset.streaming_s,
        preset.num_rounds,
        jobs or preset.num_jobs,
        in_flight or preset.num_in_flight,
        lease_ms or preset.lease_ms,
    )
    report = run_bench(checkpoint_path(model, cache_folder(cache_dir)), sizes, has_model=with_model)
    print_table("Delivery", COLUMNS, [_shown(Row(**row)) for row in report["rows"]])
    publish(report, json_file)


def run_bench(model: Path, sizes: Sizes, *, has_model: bool = False) -> dict[str, Any]:
    """Everything, measured: the report. Progress goes to stderr. Raises PagemillError with one line."""
    started = time.monotonic()
    machine = machine_facts()
    warnings = warnings_of(machine, [])
    for line in warnings:
        say(f"warning: {line}")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder, EmbeddedServer(Path(folder)) as server:
        place = Place(server.url, model, Path(folder))
        say("picking up")
        pickup_ms = measure_pickup(place, sizes.num_pickups)
        say("streaming")
        streaming = measure_streaming(place, sizes.streaming_s)
        say("renewing")
        renewal_ms = measure_renewal(place, sizes.num_rounds)
        say(f"running {sizes.num_jobs} jobs")
        memory = measure_memory(place, sizes.num_jobs)
        say(f"killing a worker of {sizes.num_in_flight} jobs")
        takeover = measure_takeover(place, sizes.num_in_flight, sizes.lease_ms)
        computed = None
        if has_model:
            say(f"killing a worker that computes {sizes.num_in_flight} jobs")
            computed = measure_takeover(place, sizes.num_in_flight, sizes.lease_ms, has_model=True)
    rows = rows_of(pickup_ms, streaming, renewal_ms, memory, takeover, sizes.lease_ms)
    if computed is not None:
        rows += [
            Row("with the model: open of the last job", "s", computed.last_claim_s),
            Row("longest gap that a client sees, p50", "s", percentile(computed.gaps_s, 50)),
            Row("the same, p99", "s", percentile(computed.gaps_s, 99)),
        ]
    return {
        "bench": "delivery",
        "machine": machine,
        "sizes": asdict(sizes),
        "rows": [asdict(row) for row in rows],
        "pickup_ms": pickup_ms,
        "streaming": asdict(streaming),
        "renewal_ms": renewal_ms,
        "memory": asdict(memory),
        "takeover": asdict(takeover),
        "takeover_with_model": None if computed is None else asdict(computed),
        "warnings": warnings,
        "took_s": time.monotonic() - started,
    }


def rows_of(
    pickup_ms: list[float],
    streaming: Streaming,
    renewal_ms: list[float],
    memory: Memory,
    takeover: Takeover,
    lease_ms: int,
) -> list[Row]:
    """The lines of the table."""
    gap_bar_s = GAP_BAR_S if lease_ms == GAP_LEASE_MS else None
    return [
        Row("XADD to first schedule, idle worker, p50", "ms", percentile(pickup_ms, 50), PICKUP_BAR_MS),
        Row("the same, p99", "ms", percentile(pickup_ms, 99)),
        Row(
            "token events, by the service's processor time", "1/s", per_s(streaming, streaming.cpu_s), EVENTS_BAR, True
        ),
        Row("the same, by the clock", "1/s", per_s(streaming, streaming.wall_s)),
        Row(f"renewing {NUM_LEASES} leases, p50", "ms", percentile(renewal_ms, 50), RENEWAL_BAR_MS),
        Row("the same, p99", "ms", percentile(renewal_ms, 99)),
        Row(f"entries left after {memory.num_jobs} jobs", "", memory.num_left, 0),
        Row("memory after them, by before", "", memory.after_bytes / memory.before_bytes, MEMORY_BAR),
        Row("jobs by the clock", "1/s", memory.num_jobs / memory.jobs_s),
        Row("worker killed: first open by a peer", "s", takeover.first_claim_s, takeover.bound_s),
        Row(f"open of the last of {len(takeover.gaps_s)} jobs", "s", takeover.last_claim_s),
        Row("longest gap that a client sees, p99", "s", percentile(takeover.gaps_s, 99), gap_bar_s),
    ]


def per_s(streaming: Streaming, seconds: float) -> float:
    """Events a second, where the time is at least one that can be counted."""
    return streaming.num_events / max(seconds, TICK_S)


def _shown(row: Row) -> tuple[str, ...]:
    bar = "" if row.bar is None else f"{'≥' if row.is_least else '≤'} {row.bar:,g}"
    met = "" if row.bar is None else ("yes" if row.is_met else "NO")
    return row.what, row.unit, f"{row.measured:,.4g}", bar, met
