"""What is gathered while a simulation runs, and the statistics that are made of it."""

from array import array
from collections import Counter
from typing import Any, Final

import numpy as np

from ops.simulate.driver import SimulatedStep
from ops.simulate.traces import TraceRequest

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
        # Of each step: blocks owned, slots filled, slots allocated, sequences running and not running, preemptions.
        self._columns = {name: array("q") for name in ("owned", "filled", "allocated", "running", "waiting", "lost")}
        self._bounds: Counter[str] = Counter()
        self._preemptions: Counter[str] = Counter({"recompute": 0, "swap": 0})
        self._num_copied = Counter({"out": 0, "in": 0})
        self._worst_preempted = self._num_preempted_requests = 0
        self._num_blocks = self._num_recomputed = self._num_computed = self._num_output = 0
        self._num_prompt_blocks = self._num_hit_blocks = 0
        self.num_finished = 0

    @property
    def num_steps(self) -> int:
        """Steps that took time."""
        return len(self._start_s)

    @property
    def peak_blocks(self) -> int:
        """The most blocks that were owned at the end of a step."""
        return max(self._columns["owned"], default=0)

    def arrived(self, seq_id: str, request: TraceRequest) -> None:
        """See Observer."""
        self._num_prompt_blocks += -(-request.num_prompt_tokens // self._block_size)

    def stepped(self, step: SimulatedStep) -> None:
        """See Observer."""
        self._take_outputs(step)
        if step.end_s == step.start_s:
            return
        stats = step.stats
        self._num_blocks = stats.num_blocks
        self._num_recomputed = stats.num_recomputed_tokens
        self._num_computed += step.output.num_tokens
        self._bounds[step.cost.bound] += 1
        num_out, num_in = step.output.num_swapped_blocks
        self._num_copied.update({"out": num_out, "in": num_in})
        self._preemptions.update([mode for _, mode in step.preempted])
        self._start_s.append(step.start_s)
        self._end_s.append(step.end_s)
        columns = self._columns
        columns["owned"].append(stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks)
        columns["filled"].append(stats.num_filled_slots)
        columns["allocated"].append(stats.num_allocated_slots)
        columns["running"].append(stats.num_running)
        columns["waiting"].append(stats.num_waiting + stats.num_swapped)
        columns["lost"].append(len(step.preempted))

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
        return {
            "requests": self.num_finished,
            "steps": self.num_steps,
            "simulated_s": wall_s,
            "busy_share": _share(busy_s, wall_s),
            "latency_s": {
                "ttft": _percentiles(self._ttft_s),
                "inter_token": _percentiles(self._gap_s),
                "end_to_end": _percentiles(self._e2e_s),
                "queue": _percentiles(self._queue_s),
            },
            "output_tokens": self._num_output,
            "output_tokens_per_s": _share(self._num_output, wall_s),
            "requests_per_s": _share(self.num_finished, wall_s),
            "steps_bound_by": {name: self._bounds[name] for name in ("memory", "compute", "copies")},
            "preemptions": dict(self._preemptions),
            "preempted_requests": self._num_preempted_requests,
            "worst_preempted": self._worst_preempted,
            "swapped_blocks": dict(self._num_copied),
            "computed_tokens": self._num_computed,
            "recomputed_tokens": self._num_recomputed,
            "recompute_tax": _share(self._num_recomputed, self._num_computed),
            "prefix_hit_share": _share(self._num_hit_blocks, self._num_prompt_blocks),
            "kv": self._kv(end_s - start_s, busy_s),
            "over_time": self._over_time(start_s, end_s, wall_s),
        }

    def _kv(self, took_s: "np.ndarray[Any, Any]", busy_s: float) -> dict[str, Any]:
        owned, filled, allocated = (np.array(self._columns[name]) for name in ("owned", "filled", "allocated"))
        return {
            "num_blocks": self._num_blocks,
            "peak_blocks": self.peak_blocks,
            "mean_owned_share": _share(float((owned * took_s).sum()), busy_s * self._num_blocks),
            "filled_share": _share(float((filled * took_s).sum()), float((allocated * took_s).sum())),
        }

    def _over_time(
        self, start_s: "np.ndarray[Any, Any]", end_s: "np.ndarray[Any, Any]", wall_s: float
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
                    "kv_owned_share": None if owned is None else owned / self._num_blocks,
                    **means,
                    "preemptions": sum(self._columns["lost"][part]),
                }
            )
        return slices


def _percentiles(values: "array[float]") -> dict[str, float | None]:
    if not values:
        return {f"p{percent}": None for percent in PERCENTS}
    found = np.percentile(np.frombuffer(values), PERCENTS)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTS, found, strict=True)}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
