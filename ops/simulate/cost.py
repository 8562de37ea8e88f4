"""How long a step takes on a machine that isn't here."""

from dataclasses import dataclass
from typing import Final

from scheduler.output import Chunks, SchedulerOutput

NO_BOUND: Final = "nothing"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step's parts take, each for itself, and `total_s`, that of the step.

    read_s: weights, keys and values through the memory. compute_s: arithmetic. copy_s: the busier direction
    of the link between the tiers.
    """

    read_s: float
    compute_s: float
    copy_s: float
    total_s: float

    @property
    def bound(self) -> str:
        """The part that the others waited for: `memory`, `compute` or `copies`."""
        if self.total_s == 0:
            return NO_BOUND
        parts = {"memory": self.read_s, "compute": self.compute_s, "copies": self.copy_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class CostModel:
    """A roofline: a step takes as long as its slowest part, and a fixed overhead.

        max(bytes read / memory rate, operations / arithmetic rate, bytes swapped / link rate) + overhead

    weight_bytes: read once in each step. kv_bytes: of one token, all layers. A chunk that ends at position e reads e
        tokens' keys and values, once however many tokens it has.
    flops_per_token: two per weight. attention_flops: of one token with one earlier one (or itself), all layers.
    link_bytes_per_s: of each direction; the two don't disturb one another, nor the arithmetic.
    """

    weight_bytes: float
    kv_bytes: float
    flops_per_token: float
    attention_flops: float
    read_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    overhead_s: float

    def step(self, output: SchedulerOutput, block_size: int) -> StepCost:
        """What a step takes. One that computes nothing and copies nothing is free: only rows are dropped in it."""
        num_tokens = num_read = num_pairs = 0
        for start, num in zip(output.chunks.starts, output.chunks.num_tokens, strict=True):
            end = start + num
            num_tokens += num
            num_read += end
            # Each token attends to itself and to all before it.
            num_pairs += num * end - num * (num - 1) // 2
        block_bytes = self.kv_bytes * block_size
        num_swapped = max(output.num_swapped_blocks)
        if num_tokens == 0 and num_swapped == 0 and not output.block_copies:
            return StepCost(0.0, 0.0, 0.0, 0.0)
        # A copy within the tier reads and writes.
        num_bytes = num_read * self.kv_bytes + 2 * len(output.block_copies) * block_bytes
        if num_tokens:
            num_bytes += self.weight_bytes
        read_s = num_bytes / self.read_bytes_per_s
        compute_s = (num_tokens * self.flops_per_token + num_pairs * self.attention_flops) / self.flops_per_s
        copy_s = num_swapped * block_bytes / self.link_bytes_per_s
        return StepCost(read_s, compute_s, copy_s, max(read_s, compute_s, copy_s) + self.overhead_s)

    def rates(self, num_tokens: int) -> tuple[float, float]:
        """What an engine on this machine measures at its start: bytes swapped, and prompt tokens computed, a second.

        As the engine, it times one prompt, of `num_tokens` tokens, and the link alone.
        """
        prompt = SchedulerOutput(0, Chunks(("",), (0,), (num_tokens,), (True,)))
        return self.link_bytes_per_s, num_tokens / self.step(prompt, 1).total_s
