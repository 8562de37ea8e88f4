"""`pagemill bench steps`: single steps of the model runner, by the machine's limits, and where their time goes.

    python -m ops.bench.steps '{"config": {...}}'        as a side of `pagemill bench`

No scheduler and no prompt: the KV cache is filled with random numbers, and rows of any length read them. The least time
of a few steps counts, as of the limits, since whatever disturbs a step only makes it slower.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from ops.bench.errors import BenchError
from ops.bench.flags import block_size_option, engine_options, json_option
from ops.bench.machine import machine_facts
from ops.bench.parts import engine_config
from ops.bench.result import publish
from ops.bench.serving import serve
from worker.engine_config import EngineConfig
from worker.openmp import limit_spinning

NUM_STEPS: Final = 24
NUM_PREFILLS: Final = 5
DECODE: Final = "decode"
PREFILL: Final = "prefill"


@dataclass(frozen=True, slots=True)
class StepCase:
    """A step: `num_seqs` sequences that have `context_len` tokens after it, `query_len` of them computed in it."""

    num_seqs: int
    context_len: int
    query_len: int

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.query_len > 1:
            return f"{PREFILL} of {self.query_len}"
        return f"{DECODE}, {self.num_seqs} × {self.context_len}"


DECODE_1: Final = StepCase(1, 256, 1)
DECODE_32_LONG: Final = StepCase(32, 1000, 1)
PREFILL_512: Final = StepCase(1, 512, 512)
CASES: Final = (DECODE_1, StepCase(8, 150, 1), StepCase(32, 150, 1), DECODE_32_LONG, PREFILL_512)


def measure_steps(config: EngineConfig, cases: tuple[StepCase, ...] = CASES) -> dict[str, Any]:
    """All cases, and the limits before and after them, of which the larger ones are the truer. JSON-able.

    Raises BenchError where the checkpoint can't be read.
    """
    limit_spinning()
    from model.errors import ModelError
    from ops.bench.limits import Limits
    from ops.bench.step_runner import StepRunner

    try:
        runner = StepRunner(config, cases)
    except ModelError as error:
        raise BenchError(str(error)) from error
    limits = Limits(runner.dtype, runner.device, config.num_threads)
    measured = [limits.measure()]
    found = [_summary(case, runner) for case in cases]
    measured.append(limits.measure())
    best = {name: max(each[name] for each in measured) for name in ("read_bytes_per_s", "operations_per_s")}
    return {
        "limits": measured[0] | best,
        "dtype": runner.dtype,
        "cases": [each | _shares(each, best) for each in found],
    }


def _summary(case: StepCase, runner: Any) -> dict[str, Any]:
    """A case's least and median time, and what its quickest step was spent on."""
    steps = runner.time_steps(case, NUM_PREFILLS if case.query_len > 1 else NUM_STEPS)
    least = min(steps, key=lambda each: sum(each.values()))
    return {
        **asdict(case),
        "name": case.name,
        "least_s": sum(least.values()),
        "median_s": statistics.median(sum(each.values()) for each in steps),
        "spent_s": least,
        "work": runner.work_of(case),
    }


def _shares(found: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    """What the step reaches of the limits of reading (weights, keys and values) and of computing (products)."""
    work, least, attention = found["work"], found["least_s"], found["spent_s"]["attention"]
    return {
        "weights_of_bandwidth": work["weight_bytes"] / least / limits["read_bytes_per_s"],
        "products_of_arithmetic": work["linear_operations"] / least / limits["operations_per_s"],
        "attention_of_bandwidth": work["kv_bytes"] / attention / limits["read_bytes_per_s"],
        "attention_of_step": attention / least,
    }


@click.command()
@engine_options
@block_size_option
@json_option
def command(json_file: str | None, **values: Any) -> None:
    """Measure single steps: how far from the machine's limits they are, and what they are spent on.

    Decodes of 1, 8 and 32 sequences, of 32 with 1,000 tokens each, and a prompt of 512. Reading is limited by the best
    sum over 256 MB in the same run, computing by a product of 2048 x 2048 matrices. Tables go to stdout, and one JSON
    object as the last line.
    """
    from ops.bench.step_report import print_steps

    machine = machine_facts()
    steps = measure_steps(engine_config(values))
    print_steps(steps)
    report = {"bench": "pagemill steps", "machine": machine, "quantization": values["quantization"], "steps": steps}
    publish(report, json_file)


def main() -> None:
    """Entry point of the side's process."""
    config = EngineConfig(**json.loads(sys.argv[1])["config"])
    serve({"measure": lambda: measure_steps(config)})


if __name__ == "__main__":
    main()
