"""Short ways to make what the scheduler's tests need."""

from typing import Any

from scheduler import CacheConfig, PreemptionMode, SamplingParams, Scheduler, SchedulerConfig, Sequence
from scheduler.policy_names import DEFAULT_POLICY


def make_scheduler(
    num_blocks: int = 50,
    block_size: int = 16,
    *,
    max_model_len: int = 10_000,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 512,
    eos_token_ids: frozenset[int] = frozenset(),
    enable_prefix_caching: bool = True,
    num_cpu_blocks: int = 0,
    preemption_mode: PreemptionMode = PreemptionMode.AUTO,
    write_behind_blocks: int = 0,
    swap_step_blocks: int = 0,
    scheduling_policy: str = DEFAULT_POLICY,
    scheduler_delay_factor: float = 0.0,
    target_itl_ms: float | None = None,
) -> Scheduler:
    """A block has as many bytes as tokens."""
    return Scheduler(
        SchedulerConfig(
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            eos_token_ids,
            preemption_mode=preemption_mode,
            write_behind_blocks=write_behind_blocks,
            scheduling_policy=scheduling_policy,
            scheduler_delay_factor=scheduler_delay_factor,
            target_itl_ms=target_itl_ms,
        ),
        CacheConfig(
            num_blocks,
            block_size,
            num_cpu_blocks,
            enable_prefix_caching=enable_prefix_caching,
            kv_block_bytes=block_size,
            swap_step_blocks=swap_step_blocks,
        ),
    )


def make_seq(seq_id: str, num_prompt_tokens: int = 16, max_tokens: int | None = 8, **rest: Any) -> Sequence:
    """A sequence whose prompt begins like no other of another id, unless `prompt` gives its tokens."""
    prompt = rest.pop("prompt", None)
    if prompt is None:
        first = sum(ord(char) << (7 * index) for index, char in enumerate(seq_id[:3]))
        prompt = [first % 2**31, *range(1, num_prompt_tokens)]
    stop_token_ids = rest.pop("stop_token_ids", ())
    ignore_eos = rest.pop("ignore_eos", False)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    return Sequence(seq_id, prompt, sampling, **rest)
