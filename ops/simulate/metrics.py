"""What is gathered while a simulation runs, and the statistics that are made of it."""

from array import array
from collections import Counter
from typing import Any, Final

import numpy as np

from ops.simulate.driver import SimulatedStep
from ops.simulate.errors import SimulateError
from ops.simulate.traces import TraceRequest
from scheduler import SchedulerStats

PERCENTS: Final = (50, 95, 99)
# Rows of the table that shows how the KV cache fills up over time.
NUM_SLICES: Final = 10


class Metrics:
    """An observer that keeps a few numbers a step and a request, and one number a token.

    Steps that compute nothing (they only drop rows) don't count as steps.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last_token_s: dict[str, float] = {}
        self._ttft_s = array("d")
        self._gap_s = array("d")
        self._e2e_s = array("d")
        self._queue_s = array("d")
        self._start_s = array("d")
        self._end_s = array("d")
        # Of each step: blocks owned, slots filled, slots allocated, sequences running and not running, preemptions,
        # tokens that came of it.
        names = ("owned", "filled", "allocated", "running", "waiting", "lost", "output")
        self._columns = {name: array("q") for name in names}
        self._bounds: Counter[str] = Counter()
        self._gaps = SwapGaps()
        self._stats: SchedulerStats | None = None
        self._worst_preempted = self._num_preempted_requests = 0
        self._num_computed = self._num_output = self._num_lost = 0
        self._num_prompt_blocks = self._num_hit_blocks = 0
        self.num_finished = 0

    @property
    def num_steps(self) -> int:
        """Steps that took time."""
        return len(self._start_s)

    @property
    def steps(self) -> "tuple[array[float], array[float], array[int]]":
        """Of each step that took time: its start, its end, and the tokens that came of it."""
        return self._start_s, self._end_s, self._columns["output"]

    @property
    def peak_blocks(self) -> int:
        """The most blocks that were owned at the end of a step."""
        return max(self._columns["owned"], default=0)

    def arrived(self, seq_id: str, request: TraceRequest) -> None:
        """See Observer."""
        self._num_prompt_blocks += -(-request.num_prompt_tokens // self._block_size)

    def stepped(self, step: SimulatedStep) -> None:
        """See Observer."""
        num_before = self._num_output
        self._take_outputs(step)
        self._gaps.stepped(step)
        if step.end_s == step.start_s:
            return
        stats = self._stats = step.stats
        num_lost, self._num_lost = self._num_lost, stats.num_preemptions_recompute + stats.num_preemptions_swap
        self._num_computed += step.output.num_tokens
        self._bounds[step.cost.bound] += 1
        self._start_s.append(step.start_s)
        self._end_s.append(step.end_s)
        columns = self._columns
        columns["owned"].append(stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks)
        columns["filled"].append(stats.num_filled_slots)
        columns["allocated"].append(stats.num_allocated_slots)
        columns["running"].append(stats.num_running)
        columns["waiting"].append(stats.num_waiting + stats.num_swapped)
        columns["lost"].append(self._num_lost - num_lost)
        columns["output"].append(self._num_output - num_before)

    def _take_outputs(self, step: SimulatedStep) -> None:
        last, now = self._last_token_s, step.end_s
        for output in step.outputs:
            seq_id = output.seq_id
            self._num_output += len(output.new_token_ids)
            if seq_id in last:
                self._gap_s.append(now - last[seq_id])
            last[seq_id] = now
            stats = output.stats
            if stats is None:
                continue
            del last[seq_id]
            self.num_finished += 1
            self._e2e_s.append(stats.finished_s - stats.arrival_s)
            if stats.first_token_s is not None and stats.first_scheduled_s is not None:
                self._ttft_s.append(stats.first_token_s - stats.arrival_s)
                self._queue_s.append(stats.first_scheduled_s - stats.arrival_s)
            self._num_hit_blocks += stats.num_cached_tokens // self._block_size
            self._num_preempted_requests += stats.num_preemptions > 0
            self._worst_preempted = max(self._worst_preempted, stats.num_preemptions)

    def summary(self) -> dict[str, Any]:
        """Everything, JSON-able. Seconds, tokens, blocks; shares from 0 to 1; None where there is nothing to tell."""
        start_s, end_s = np.array(self._start_s), np.array(self._end_s)
        busy_s = float((end_s - start_s).sum())
        wall_s = float(end_s[-1]) if self.num_steps else 0.0
        stats = self._stats
        if stats is None:
            raise SimulateError("there is nothing to tell of a run without a step")
        return {
            "requests": self.num_finished,
            "steps": self.num_steps,
            "simulated_s": wall_s,
            "busy_share": _share(busy_s, wall_s),
            "latency_s": {
                "ttft": percentiles(self._ttft_s),
                "inter_token": percentiles(self._gap_s),
                **self._gaps.summary(),
                "end_to_end": percentiles(self._e2e_s),
                "queue": percentiles(self._queue_s),
            },
            "mean_end_to_end_s": _share(sum(self._e2e_s), len(self._e2e_s)),
            "output_tokens": self._num_output,
            "output_tokens_per_s": _share(self._num_output, wall_s),
            "requests_per_s": _share(self.num_finished, wall_s),
            "steps_bound_by": {name: self._bounds[name] for name in ("memory", "compute", "copies")},
            "preemptions": {"recompute": stats.num_preemptions_recompute, "swap": stats.num_preemptions_swap},
            "full_tier_recomputes": stats.num_full_tier_recomputes,
            "missing_blocks": stats.num_missing_blocks,
            "preempted_requests": self._num_preempted_requests,
            "worst_preempted": self._worst_preempted,
            "swapped_bytes": {
                "out": stats.swapped_out_bytes,
                "in": stats.swapped_in_bytes,
                "written_behind": stats.written_behind_bytes,
            },
            "computed_tokens": self._num_computed,
            "recomputed_tokens": stats.num_recomputed_tokens,
            "recompute_tax": _share(stats.num_recomputed_tokens, self._num_computed),
            "prefix_hit_share": _share(self._num_hit_blocks, self._num_prompt_blocks),
            "kv": self._kv(stats.num_blocks, end_s - start_s, busy_s),
            "over_time": self._over_time(stats.num_blocks, start_s, end_s, wall_s),
        }

    def _kv(self, num_blocks: int, took_s: "np.ndarray[Any, Any]", busy_s: float) -> dict[str, Any]:
        owned, filled, allocated = (np.array(self._columns[name]) for name in ("owned", "filled", "allocated"))
        return {
            "num_blocks": num_blocks,
            "peak_blocks": self.peak_blocks,
            "mean_owned_share": _share(float((owned * took_s).sum()), busy_s * num_blocks),
            "filled_share": _share(float((filled * took_s).sum()), float((allocated * took_s).sum())),
        }

    def _over_time(
        self, num_blocks: int, start_s: "np.ndarray[Any, Any]", end_s: "np.ndarray[Any, Any]", wall_s: float
    ) -> list[dict[str, Any]]:
        """Means over the steps that begin in each slice of the time, weighted by what they take; None without steps."""
        slices = []
        edges = np.searchsorted(start_s, np.linspace(0.0, wall_s, NUM_SLICES + 1))
        for index in range(NUM_SLICES):
            part = slice(int(edges[index]), int(edges[index + 1]))
            took_s = end_s[part] - start_s[part]
            means = {
                name: _share(float((np.array(self._columns[name][part]) * took_s).sum()), float(took_s.sum()))
                for name in ("owned", "running", "waiting")
            }
            owned = means.pop("owned")
            slices.append(
                {
                    "from_s": wall_s * index / NUM_SLICES,
                    "kv_owned_share": None if owned is None else owned / num_blocks,
                    **means,
                    "preemptions": sum(self._columns["lost"][part]),
                }
            )
        return slices


class SwapGaps:
    """Sorts the times between tokens by whether blocks were copied between the tiers meanwhile.

    Those in which a sequence lost its own blocks count in neither sort: what a swap costs others is the question.
    """

    def __init__(self) -> None:
        # By sequence: when its last token came; missing while it has lost its blocks and no token came since.
        self._last_s: dict[str, float] = {}
        self._last_copy_s = -1.0
        self._beside_s = array("d")
        self._without_s = array("d")

    def stepped(self, step: SimulatedStep) -> None:
        """See Observer."""
        if any(step.output.num_swapped_blocks):
            self._last_copy_s = step.end_s
        for seq_id, _ in step.preempted:
            self._last_s.pop(seq_id, None)
        for output in step.outputs:
            last_s = self._last_s.pop(output.seq_id, None)
            if last_s is not None and output.new_token_ids:
                kept = self._beside_s if self._last_copy_s > last_s else self._without_s
                kept.append(step.end_s - last_s)
            if output.finish_reason is None:
                self._last_s[output.seq_id] = step.end_s

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Percentiles of both sorts, in seconds."""
        return {
            "inter_token_beside_copies": percentiles(self._beside_s),
            "inter_token_without_copies": percentiles(self._without_s),
        }


def percentiles(values: "array[float]") -> dict[str, float | None]:
    """By name, as `p99`; None where there are no values."""
    if not values:
        return {f"p{percent}": None for percent in PERCENTS}
    found = np.percentile(np.frombuffer(values), PERCENTS)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTS, found, strict=True)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
