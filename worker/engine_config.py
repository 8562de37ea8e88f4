"""What the engine is told at start, and what it answers once it stands. Plain data, so that it crosses a pipe."""

from dataclasses import dataclass

from scheduler.policy_names import DEFAULT_POLICY

# Powers of two, which the kernels' tiles are cut into.
BLOCK_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine.

    model_path: a folder with config.json and safetensors, or a GGUF file.
    load_format: auto reads the weights; dummy makes random ones in the shapes of config.json, and a stand-in for a
        tokenizer that isn't there.
    quantization: none, or int8 or int4: weights of linear layers and embeddings in a quarter of float32's bytes, or
        those of the layers in a sixth.
    kv_cache_dtype: auto keeps keys and values in the model's dtype, fp8_e4m3 in 8 bits each: so more of them fit.
    max_model_len: tokens of one sequence; None takes the checkpoint's own context, or what the KV cache holds of it.
    num_kv_blocks: blocks of the KV cache; None sizes it from the memory at hand.
    max_num_batched_tokens: token budget of a step; None is 6144 on CUDA and 512 on the CPU, where a step of 6144
        tokens would take many seconds.
    swap_space_gib, num_swap_blocks: size of the CPU tier that preempted sequences are swapped to, in one or the other
        unit; both None: 4 GiB on CUDA, none on the CPU, where it would be the same memory as the KV cache.
    preemption_mode: auto, swap or recompute.
    write_behind_mib: how much of likely victims' blocks a step may begin to copy to the CPU tier; 0 turns it off.
    swap_step_mib: how much a step may begin to copy each way between the tiers, so that a long sequence's swap holds
        nobody up; 0 is no limit, None is 256 on CUDA and 64 on the CPU.
    cuda_graphs: on CUDA compute decodes by graphs captured at start; off is kernel by kernel.
    deterministic: refuse to start where a sequence's tokens could depend on who shares its batch.
    scheduling_policy: the order of sequences, one or more of fcfs, priority, deadline and fair with commas between.
    scheduler_delay_factor: prompts wait up to that many times a decode step for others to fill a step with.
    target_itl_ms: what a step with decodes may take; None is no limit.
    overlap_scheduling: decide the next step while this one is computed; None: on CUDA only.
    check_invariants: `step` checks every invariant of the scheduler after each step, `idle` when no work is left.
    """

    model_path: str
    cache_dir: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.88
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    swap_space_gib: float | None = None
    num_swap_blocks: int | None = None
    preemption_mode: str = "auto"
    write_behind_mib: float = 16.0
    swap_step_mib: float | None = None
    scheduling_policy: str = DEFAULT_POLICY
    scheduler_delay_factor: float = 0.0
    target_itl_ms: float | None = None
    num_threads: int | None = None
    overlap_scheduling: bool | None = None
    check_invariants: str = "off"
    deterministic: bool = False
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is, once built. `fingerprint` names what decides its numbers: model, dtype, device, kernels.

    The rates are those by which `auto` chooses between swapping and recomputing; None where there is no CPU tier.
    batch_dependence: why a sequence's tokens may depend on who shares its batch; None where they don't.
    activation_bytes: what the largest step was measured to take beside weights and KV cache; None where it isn't known.
    kv_cache_dtype: torch's name of the numbers that the KV cache holds.
    num_cuda_graphs, graph_bytes: graphs that were captured, and what they were expected to take beside the rest.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    vocab_size: int
    kv_bytes_per_block: int
    device: str
    dtype: str
    fingerprint: str
    pid: int
    num_swap_blocks: int = 0
    swap_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    activation_bytes: int | None = None
    batch_dependence: str | None = None
    num_cuda_graphs: int = 0
    graph_bytes: int = 0
    kv_cache_dtype: str = ""

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens that one sequence can have: the context, or the whole KV cache where that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
