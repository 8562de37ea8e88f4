"""What the scheduler is told once, at start. The engine passes these; nothing here reads the environment."""

from dataclasses import dataclass
from enum import StrEnum

from scheduler.errors import InvalidConfigError
from scheduler.policy_names import DEFAULT_POLICY, parse_policy


class PreemptionMode(StrEnum):
    """How a victim gives its blocks back: AUTO takes the cheaper way for each victim.

    A victim that the CPU tier has no room for is recomputed in every mode.
    """

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the paged KV cache, in blocks.

    `num_cpu_blocks` is the swap tier; 0 means that there is none. `kv_block_bytes` are the bytes of one block, for
    what a copy costs. `swap_step_blocks`: a step begins to copy at most so many blocks each way between the tiers, so
    that the swap of a long sequence does not hold the others up; 0: any number. `is_prefix_shared_by_tenants`:
    sequences of different tenants may reuse one another's cached prefixes. It is off by default, since the time to
    the first token tells a tenant whether somebody else has sent the same prompt.

    Raises InvalidConfigError.
    """

    num_blocks: int
    block_size: int = 16
    num_cpu_blocks: int = 0
    enable_prefix_caching: bool = True
    is_prefix_shared_by_tenants: bool = False
    kv_block_bytes: int = 0
    swap_step_blocks: int = 0

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.block_size < 1 or self.num_cpu_blocks < 0:
            raise InvalidConfigError(
                f"the KV cache has {self.num_blocks} blocks of {self.block_size} tokens and {self.num_cpu_blocks} in "
                "the CPU tier: use at least 1 block of at least 1 token, and 0 or more for the CPU tier"
            )
        if self.swap_step_blocks < 0:
            raise InvalidConfigError(f"swap_step_blocks is {self.swap_step_blocks}: use a whole number from 0")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step.

    `max_num_batched_tokens` is the token budget of a step, shared by decodes and prefill chunks;
    `max_num_seqs` bounds the sequences that are running; `max_model_len` the tokens of one sequence.
    `swap_bytes_per_s` and `prefill_tokens_per_s` are measured rates, by which `auto` chooses between swapping and
    recomputing; as long as either is None, it swaps.
    `write_behind_blocks` are the blocks of likely victims that a step may begin to copy to the CPU tier; 0: none.

    `scheduling_policy` is the order of sequences, as `priority,deadline,fair`: see `policy`. With
    `scheduler_delay_factor` prompts wait up to that many times a decode step for others to fill theirs. `target_itl_ms`
    is what a step with decodes may take: so many run, and so much of prompts is computed beside them, as keeps to it.

    Raises InvalidConfigError.
    """

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    eos_token_ids: frozenset[int] = frozenset()
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    swap_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    write_behind_blocks: int = 0
    scheduling_policy: str = DEFAULT_POLICY
    scheduler_delay_factor: float = 0.0
    target_itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidConfigError(f"{name} is {value}: use a whole number from 1")
        if self.write_behind_blocks < 0:
            raise InvalidConfigError(f"write_behind_blocks is {self.write_behind_blocks}: use a whole number from 0")
        for name in ("swap_bytes_per_s", "prefill_tokens_per_s"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise InvalidConfigError(f"{name} is {rate}: use a number above 0, or None where it is not known")
        parse_policy(self.scheduling_policy)
