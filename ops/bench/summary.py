"""What was measured at each batch, as JSON-able figures."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.config import ModelConfig
from ops.bench.measure import BatchResult
from ops.bench.options import ITEMSIZES
from ops.bench.peers.catalog import BY_NAME
from ops.bench.runs import OursRun, PeerRun, percentile, ratios, spread
from ops.bench.work import num_operations, slot_bytes, step_weight_bytes


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run's work is counted by. weight_itemsizes: as options.py has them of our engine, which computes in
    `dtype`."""

    config: ModelConfig
    weight_itemsizes: tuple[float, float]
    dtype: str
    limits: dict[str, Any]

    def bytes_read(self, run: OursRun) -> float:
        """Weights once a step, and the keys and values that were there."""
        weights = run.num_steps * step_weight_bytes(self.config, self.weight_itemsizes)
        return weights + run.num_slots_read * slot_bytes(self.config, ITEMSIZES[self.dtype])


def summarize(results: Sequence[BatchResult], costs: Costs) -> list[dict[str, Any]]:
    """One object a batch, in the order of `results`.

    Who takes a static batch runs one by one at a batch of one, and is compared with there at larger ones as well.
    """
    alone = next((result for result in results if result.batch == 1), None)
    return [_batch_summary(result, alone, costs) for result in results]


def _batch_summary(result: BatchResult, alone: BatchResult | None, costs: Costs) -> dict[str, Any]:
    peers = {}
    for name, runs in result.peers.items():
        kind = BY_NAME[name]
        peers[kind.alone if result.batch == 1 else kind.label] = _peer_summary(result.ours, runs)
        if kind.is_static and result.batch > 1 and alone is not None:
            peers[kind.alone] = _peer_summary(result.ours, alone.peers[name])
    return {
        "batch": result.batch,
        "requests": len(result.lengths),
        "prompt_tokens": sum(each.num_prompt for each in result.lengths),
        "output_tokens": sum(each.num_output for each in result.lengths),
        "ours": _ours_summary(result, costs),
        "peers": peers,
        "token_check": None if result.check is None else asdict(result.check),
        "disturbances": [asdict(each) for each in result.disturbances],
    }


def _ours_summary(result: BatchResult, costs: Costs) -> dict[str, Any]:
    runs, limits = result.ours, costs.limits
    operations = num_operations(costs.config, result.lengths)
    num_prompt = sum(each.num_prompt for each in result.lengths)
    return {
        "tokens_per_s": _measured([run.tokens_per_s for run in runs]),
        "ttft_s": percentiles([value for run in runs for value in run.ttft_s]),
        "token_gap_s": percentiles([value for run in runs for value in run.gap_s]),
        "reply_s": percentiles([value for run in runs for value in run.reply_s]),
        "kv_use": _measured([run.kv_use for run in runs]),
        "host_share": _measured([run.host_share for run in runs]),
        "engine_host_share": _measured([1 - run.forward_s / run.step_s for run in runs]),
        "prefix_hit_share": _measured([run.num_prefix_hits / num_prompt for run in runs]),
        "steps": [run.num_steps for run in runs],
        "wall_s": [run.wall_s for run in runs],
        "bandwidth_share": _measured([costs.bytes_read(run) / run.wall_s / limits["read_bytes_per_s"] for run in runs]),
        "arithmetic_share": _measured([operations / run.wall_s / limits["operations_per_s"] for run in runs]),
    }


def _peer_summary(ours: list[OursRun], peer: list[PeerRun]) -> dict[str, Any]:
    return {
        "requests": len(peer[0].reply_s),
        "tokens_per_s": _measured([run.tokens_per_s for run in peer]),
        "ratio": _measured(ratios(ours, peer)),
        "ttft_s": percentiles([value for run in peer for value in run.ttft_s]),
        "token_gap_s": percentiles([value for run in peer for value in run.gap_s]),
        "reply_s": percentiles([value for run in peer for value in run.reply_s]),
        "steps": [run.num_steps for run in peer],
        "wall_s": [run.wall_s for run in peer],
    }


def _measured(values: Sequence[float]) -> dict[str, Any]:
    return asdict(spread(values)) | {"values": list(values)}


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """None where there are no values: one-token replies have no gaps."""
    return {
        name: percentile(values, percent) if values else None
        for name, percent in (("p50", 50), ("p95", 95), ("p99", 99))
    }
