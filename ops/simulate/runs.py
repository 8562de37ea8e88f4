"""One simulation from beginning to end: a scheduler of the wanted size, the loop, and what came of it."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TextIO

from ops.simulate.chrome_trace import ChromeTrace
from ops.simulate.cost import CostModel
from ops.simulate.driver import Observer, Simulation
from ops.simulate.errors import SimulateError
from ops.simulate.metrics import Metrics
from ops.simulate.traces import Trace
from scheduler import CacheConfig, PreemptionMode, Scheduler, SchedulerConfig
from scheduler.policy_names import DEFAULT_POLICY

# Told how many requests are done, of how many.
Progress = Callable[[int, int], None]
_STEPS_BETWEEN_NEWS = 256


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What the scheduler is made with; as the worker's settings of these names, where MiB are blocks.

    max_model_len None: the longest request's. num_swap_blocks: the CPU tier, 0 for none.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    max_model_len: int | None = None
    num_swap_blocks: int = 0
    swap_step_blocks: int = 0
    write_behind_blocks: int = 0
    preemption_mode: str = PreemptionMode.AUTO
    scheduling_policy: str = DEFAULT_POLICY
    scheduler_delay_factor: float = 0.0
    target_itl_ms: float | None = None


def simulate(
    trace: Trace, sizes: EngineSizes, model: CostModel, *, chrome_file: TextIO | None = None, progress: Progress
) -> tuple[Metrics, list[int]]:
    """Run the trace to its end; what was gathered, and the indices of requests that can't fit.

    Raises SimulateError where none of them can.
    """
    metrics = Metrics(sizes.block_size)
    observers: list[Observer] = [metrics]
    chrome = None if chrome_file is None else ChromeTrace(chrome_file)
    if chrome is not None:
        observers.append(chrome)
    simulation = Simulation(trace, make_scheduler(trace, sizes, model), model, observers)
    total = len(trace.requests)
    num_rounds = 0
    while simulation.advance():
        num_rounds += 1
        if num_rounds % _STEPS_BETWEEN_NEWS == 0:
            progress(metrics.num_finished + len(simulation.refused), total)
    progress(total, total)
    if chrome is not None:
        chrome.close()
    if len(simulation.refused) == total:
        raise SimulateError(
            f"not one of {total} requests fits a pool of {sizes.num_blocks} blocks of {sizes.block_size} tokens "
            "and the context: raise --num-blocks or --max-model-len"
        )
    return metrics, simulation.refused


def make_scheduler(trace: Trace, sizes: EngineSizes, model: CostModel) -> Scheduler:
    """A scheduler as the engine makes it, with the rates that the engine would measure on `model`.

    Nothing ends before its length, so that it knows no end of sequence.
    """
    max_model_len = sizes.max_model_len or max(request.num_tokens for request in trace.requests)
    rates = model.rates(min(sizes.max_num_batched_tokens, max_model_len)) if sizes.num_swap_blocks else (None, None)
    return Scheduler(
        SchedulerConfig(
            max_model_len,
            sizes.max_num_seqs,
            sizes.max_num_batched_tokens,
            preemption_mode=PreemptionMode(sizes.preemption_mode),
            swap_bytes_per_s=rates[0],
            prefill_tokens_per_s=rates[1],
            write_behind_blocks=sizes.write_behind_blocks,
            scheduling_policy=sizes.scheduling_policy,
            scheduler_delay_factor=sizes.scheduler_delay_factor,
            target_itl_ms=sizes.target_itl_ms,
        ),
        CacheConfig(
            sizes.num_blocks,
            sizes.block_size,
            sizes.num_swap_blocks,
            enable_prefix_caching=sizes.enable_prefix_caching,
            kv_block_bytes=round(model.kv_bytes * sizes.block_size),
            swap_step_blocks=sizes.swap_step_blocks,
        ),
    )


def needed_blocks(trace: Trace, sizes: EngineSizes, model: CostModel, progress: Progress) -> int:
    """The most blocks that are owned at once where there are always enough: found by a run of its own."""
    ample = replace(
        sizes, num_blocks=_ample_blocks(trace, sizes), num_swap_blocks=0, preemption_mode=PreemptionMode.AUTO
    )
    metrics, _ = simulate(trace, ample, model, progress=progress)
    return metrics.peak_blocks


def share_of_need(trace: Trace, sizes: EngineSizes, need: int, share: float) -> int:
    """Blocks of a pool that has `share` of what is needed, but no fewer than the longest request needs alone."""
    longest = max(request.num_tokens for request in trace.requests)
    return max(round(need * share), -(-longest // sizes.block_size))


def _ample_blocks(trace: Trace, sizes: EngineSizes) -> int:
    """Enough for the largest requests that can run at once, each with the spare blocks that admission asks for."""
    largest = heapq.nlargest(sizes.max_num_seqs, (request.num_tokens for request in trace.requests))
    return sum(-(-num_tokens // sizes.block_size) + 2 for num_tokens in largest)


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What the trace asks for."""
    requests = trace.requests
    return {
        "format": trace.kind,
        "requests": len(requests),
        "arrivals_s": requests[-1].arrival_s,
        "prompt_tokens": sum(request.num_prompt_tokens for request in requests),
        "output_tokens": sum(request.num_output_tokens for request in requests),
        "distinct_prompt_blocks": trace.num_distinct_hashes or None,
    }
