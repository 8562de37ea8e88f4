"""Machines and models whose figures are known well enough to simulate them."""

from dataclasses import dataclass
from typing import Any, Final

from ops.simulate.cost import CostModel
from ops.simulate.errors import SimulateError

GB: Final = 1e9
TERA: Final = 1e12
KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Preset:
    """A model on a machine, in the units in which people name them; None has to be given.

    kv_kib: of one token. attention_mflop: of one token with one earlier one: 4 x layers x heads x head_dim.
    compute_tflops: what is achieved, not what the data sheet says. memory_gb: for weights and KV cache.
    """

    title: str
    params_b: float
    weights_gb: float
    kv_kib: float
    attention_mflop: float
    bandwidth_gb_s: float | None
    compute_tflops: float | None
    link_gb_s: float | None
    memory_gb: float | None
    max_num_batched_tokens: int
    swap_step_mib: float
    overhead_ms: float = 1.0


PRESETS: Final = {
    "13b-a100": Preset("LLaMA-13B fp16 on an A100", 13.0, 26.0, 800.0, 0.8192, 2000.0, 156.0, 25.0, 80.0, 6144, 256.0),
    "8b-h100": Preset(
        "Llama-3.1-8B bf16 on an H100", 8.0, 16.0, 128.0, 0.524288, 3350.0, 500.0, 50.0, 80.0, 6144, 256.0
    ),
    # The demo model, SmolLM2-135M. What a CPU can do differs too much for a default; `pagemill bench` measures it.
    "cpu": Preset("SmolLM2-135M float32 on this CPU", 0.1345, 0.538, 45.0, 0.06912, None, None, None, None, 512, 64.0),
}
# As `gpu_memory_utilization` of the worker.
MEMORY_SHARE: Final = 0.88
FIGURES: Final = (
    *("params_b", "weights_gb", "kv_kib", "attention_mflop"),
    *("bandwidth_gb_s", "compute_tflops", "link_gb_s", "overhead_ms"),
)


def figures_of(name: str, given: dict[str, float | None]) -> dict[str, float]:
    """The figures of preset `name`, those that are `given` instead of its own.

    Raises SimulateError for a figure that neither has.
    """
    preset = PRESETS[name]
    figures: dict[str, Any] = {each: getattr(preset, each) for each in FIGURES}
    figures.update({each: value for each, value in given.items() if value is not None})
    if figures["link_gb_s"] is None and figures["bandwidth_gb_s"] is not None:
        # Both tiers lie in the same memory: a copy reads and writes it.
        figures["link_gb_s"] = figures["bandwidth_gb_s"] / 2
    for each in FIGURES:
        if figures[each] is None:
            flag = "--" + each.replace("_", "-")
            raise SimulateError(f"the preset {name} needs {flag}: `pagemill bench` measures it on this machine")
    return figures


def cost_model(figures: dict[str, float]) -> CostModel:
    """The model that these figures make."""
    return CostModel(
        weight_bytes=figures["weights_gb"] * GB,
        kv_bytes=figures["kv_kib"] * KIB,
        flops_per_token=2 * figures["params_b"] * GB,
        attention_flops=figures["attention_mflop"] * 1e6,
        read_bytes_per_s=figures["bandwidth_gb_s"] * GB,
        flops_per_s=figures["compute_tflops"] * TERA,
        link_bytes_per_s=figures["link_gb_s"] * GB,
        overhead_s=figures["overhead_ms"] / 1000,
    )


def num_blocks_of(name: str, figures: dict[str, float], block_size: int) -> int:
    """Blocks that fit the machine's memory beside the weights.

    Raises SimulateError where it isn't known how much there is, or where there is none left.
    """
    memory_gb = PRESETS[name].memory_gb
    if memory_gb is None:
        raise SimulateError(f"the preset {name} needs --num-blocks or --pool-share: its memory isn't known")
    left = MEMORY_SHARE * memory_gb * GB - figures["weights_gb"] * GB
    num_blocks = int(left / (figures["kv_kib"] * KIB * block_size))
    if num_blocks < 1:
        raise SimulateError(
            f"{figures['weights_gb']:g} GB of weights leave no room for KV in {memory_gb:g} GB: name --num-blocks"
        )
    return num_blocks
