"""What the scheduler is told once, at start. The engine passes these; nothing here reads the environment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Sizes of the paged KV cache, in blocks.

    `num_cpu_blocks` is the swap tier; 0 means that there is none.
    """

    num_blocks: int
    block_size: int = 16
    num_cpu_blocks: int = 0
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step.

    `max_num_batched_tokens` is the token budget of a step, shared by decodes and prefill chunks;
    `max_num_seqs` bounds the sequences that are running; `max_model_len` the tokens of one sequence.
    """

    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    eos_token_ids: frozenset[int] = frozenset()
