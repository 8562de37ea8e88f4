"""Builds an engine from its config: checkpoint, decoder, KV cache, scheduler. The one place that sizes both tiers."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from model.activations import measure_activations
from model.config import ModelConfig
from model.decoder import Decoder
from model.determinism import batch_dependence
from model.errors import ModelError
from model.kv_cache import KVCache, kv_block_bytes
from model.loader import load_checkpoint, load_config
from model.model_runner import ModelRunner, RunnerConfig
from model.rates import measure_prefill, measure_swap
from model.tokenizer import Tokenizer
from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.errors import InvalidConfigError
from scheduler.scheduler import Scheduler
from worker.engine import Engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.errors import StartupError
from worker.memory import available_bytes, gib

ProgressCallback = Callable[[str, int, int], None]

BATCHED_TOKENS = {"cuda": 6144, "cpu": 512}
# On the CPU the KV cache takes this share of the free memory, and no more than this many bytes.
CPU_KV_SHARE = 0.25
CPU_KV_LIMIT_BYTES = 4 << 30
# What one process needs beside the weights: the interpreter, torch, compiled kernels, activations of a step.
CPU_OVERHEAD_BYTES = 600 << 20
# The CPU tier on CUDA where nothing is said: this much, but no more than this share of the free memory.
SWAP_DEFAULT_BYTES = 4 << 30
SWAP_SHARE = 0.25
# What a step may begin to copy each way: about what the link moves while a decode step reads the weights.
SWAP_STEP_MIB = {"cuda": 256.0, "cpu": 64.0}
# Beyond what the largest step was measured to take: pieces between allocations, and copies that overlap it.
ACTIVATION_MARGIN = 1.2
# Measuring how fast a prompt is computed may lengthen the start by this much, where there is a swap space. A prompt of
# a few tokens takes as long as one of many, since either reads all weights: what stops too early finds a low rate.
MEASURE_S = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig, progress: ProgressCallback | None = None) -> tuple[Engine, EngineInfo]:
    """An engine that is ready for its first request, compiled and warmed up.

    progress(stage, done, total) is called while it takes long. Raises StartupError: one line that says what to do.
    """
    report = progress or (lambda stage, done, total: None)
    try:
        return _build(config, report)
    except (ModelError, InvalidConfigError) as error:
        raise StartupError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the GPU has too little memory for this model: {error}; use a smaller one") from error
    except MemoryError as error:
        raise StartupError(
            "there is too little memory for this model: use a smaller one, or a smaller KV cache"
        ) from error


def _build(config: EngineConfig, report: ProgressCallback) -> tuple[Engine, EngineInfo]:
    device = _pick_device(config.device)
    path = Path(config.model_path)
    model_config = load_config(path)
    dtype = _pick_dtype(config.dtype, model_config, device)
    dependence = batch_dependence(model_config, dtype, device)
    if config.deterministic and dependence is not None:
        raise StartupError(f"deterministic can't be kept: {dependence}, or turn deterministic off")
    _check_weights_fit(path, model_config, dtype, device)
    max_model_len = _pick_max_model_len(config, model_config)
    tokenizer = Tokenizer.from_checkpoint(path)
    checkpoint = load_checkpoint(
        path, cache_dir=None if config.cache_dir is None else Path(config.cache_dir), progress=report
    )
    decoder = Decoder(model_config, checkpoint.weights, device=device, dtype=dtype, max_positions=max_model_len)
    block_bytes = kv_block_bytes(model_config, config.block_size, dtype)
    batched_tokens = config.max_num_batched_tokens or max(BATCHED_TOKENS[device.type], config.max_num_seqs)
    limits = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        sampled_vocab_size=tokenizer.vocab_size,
        num_threads=config.num_threads,
    )
    activation_bytes = None
    if device.type == "cuda":
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
    num_blocks = _pick_num_blocks(config, block_bytes, max_model_len, device, activation_bytes)
    num_swap_blocks = _pick_num_swap_blocks(config, num_blocks, block_bytes, device)
    kv_cache = KVCache(
        model_config,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        num_cpu_blocks=num_swap_blocks,
        available_bytes=available_bytes,
    )
    runner = ModelRunner(decoder, kv_cache, limits)
    runner.warm_up(report)
    if device.type == "cpu":  # it decides nothing here, so it can wait until the kernels are compiled
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
    swap_rate = prefill_rate = None
    if num_swap_blocks:
        swap_rate = measure_swap(kv_cache)
        prefill_rate = measure_prefill(runner, kv_cache, min(batched_tokens, max_model_len), MEASURE_S)
    step_mib = SWAP_STEP_MIB[device.type] if config.swap_step_mib is None else config.swap_step_mib
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            eos_token_ids=frozenset(model_config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
            preemption_mode=PreemptionMode(config.preemption_mode),
            swap_bytes_per_s=swap_rate,
            prefill_tokens_per_s=prefill_rate,
            write_behind_blocks=_num_blocks_in(config.write_behind_mib, block_bytes),
            scheduling_policy=config.scheduling_policy,
            scheduler_delay_factor=config.scheduler_delay_factor,
            target_itl_ms=config.target_itl_ms,
        ),
        CacheConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_cpu_blocks=num_swap_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_block_bytes=block_bytes,
            swap_step_blocks=_num_blocks_in(step_mib, block_bytes),
        ),
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model_config.vocab_size,
        kv_bytes_per_block=block_bytes,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        fingerprint=_fingerprint(path, dtype, device, is_deterministic=dependence is None),
        pid=os.getpid(),
        num_swap_blocks=num_swap_blocks,
        swap_bytes_per_s=swap_rate,
        prefill_tokens_per_s=prefill_rate,
        activation_bytes=activation_bytes,
        batch_dependence=dependence,
    )
    return Engine(scheduler, runner, check_invariants=config.check_invariants), info


def _pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError(
            "device is cuda, but torch finds no CUDA device: use --device cpu, or install a CUDA build of torch"
        )
    return torch.device(name)


def _pick_dtype(name: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype on CUDA, and float32 on the CPU, where the fast kernels are float32."""
    if name == "auto":
        name = model_config.dtype if device.type == "cuda" else "float32"
    return DTYPES[name]


def _pick_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise StartupError(
            f"max_model_len is {config.max_model_len}, but the checkpoint is made for {limit} tokens: use at most that"
        )
    return config.max_model_len or limit


def _check_weights_fit(path: Path, model_config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    if device.type != "cpu":
        return
    needed = num_parameters(model_config) * dtype.itemsize + CPU_OVERHEAD_BYTES
    free = available_bytes()
    if needed > free:
        raise StartupError(
            f"{path.name} needs about {gib(needed)} of memory in {str(dtype).removeprefix('torch.')}, "
            f"{gib(free)} are free: use a smaller model, or free some memory"
        )


def _pick_num_blocks(
    config: EngineConfig, block_bytes: int, max_model_len: int, device: torch.device, activation_bytes: int | None
) -> int:
    free = available_bytes() if device.type == "cpu" else _free_cuda_bytes(config, device, activation_bytes or 0)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * block_bytes > free:
            raise StartupError(
                f"num_kv_blocks is {config.num_kv_blocks}, which takes {gib(config.num_kv_blocks * block_bytes)}, "
                f"but {gib(free)} are free: use at most {free // block_bytes}"
            )
        return config.num_kv_blocks
    budget = min(int(free * CPU_KV_SHARE), CPU_KV_LIMIT_BYTES) if device.type == "cpu" else free
    # More than every sequence at its full length can't be used.
    most = config.max_num_seqs * (-(-max_model_len // config.block_size))
    num_blocks = min(budget // block_bytes, most)
    if num_blocks < 2:
        raise StartupError(
            f"{gib(budget)} for the KV cache hold {num_blocks} blocks of {gib(block_bytes)}: free some memory, "
            "or set num_kv_blocks"
        )
    return num_blocks


def _pick_num_swap_blocks(config: EngineConfig, num_blocks: int, block_bytes: int, device: torch.device) -> int:
    """Blocks of the CPU tier. On the CPU the KV cache, which is not written yet, comes out of the same memory."""
    is_cpu = device.type == "cpu"
    free = max(0, available_bytes() - (num_blocks * block_bytes if is_cpu else 0))
    wanted = config.num_swap_blocks
    if wanted is None and config.swap_space_gib is not None:
        wanted = int(config.swap_space_gib * (1 << 30)) // block_bytes
    if wanted is None:
        wanted = 0 if is_cpu else min(SWAP_DEFAULT_BYTES, int(free * SWAP_SHARE)) // block_bytes
    if wanted * block_bytes > free:
        raise StartupError(
            f"the swap space of {wanted} blocks takes {gib(wanted * block_bytes)} of memory, but {gib(free)} are free "
            f"beside the KV cache: use at most {free // block_bytes} blocks (num_swap_blocks), or "
            f"{free / (1 << 30):.2f} GiB (swap_space_gib)"
        )
    if config.preemption_mode == PreemptionMode.SWAP and wanted == 0:
        raise StartupError(
            f"preemption_mode is swap, but the swap space holds no block of {gib(block_bytes)}: set swap_space_gib or "
            "num_swap_blocks, or use preemption_mode auto"
        )
    return wanted


def _num_blocks_in(mib: float, block_bytes: int) -> int:
    """What fits, but one at least where it isn't 0: blocks are copied whole."""
    return max(1, int(mib * (1 << 20)) // block_bytes) if mib else 0


def _free_cuda_bytes(config: EngineConfig, device: torch.device, activation_bytes: int) -> int:
    """What gpu_memory_utilization leaves for the KV cache beside the weights and the largest step's activations."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = int(activation_bytes * ACTIVATION_MARGIN)
    return int(max(0, total * config.gpu_memory_utilization - (total - free) - reserve))


def num_parameters(config: ModelConfig) -> int:
    """Weights of the decoder, to within its biases and norms."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * heads + config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * (attention + mlp) + embeddings


def _fingerprint(path: Path, dtype: torch.dtype, device: torch.device, *, is_deterministic: bool) -> str:
    kept = "/deterministic" if is_deterministic else ""
    return f"{path.stem}/{str(dtype).removeprefix('torch.')}/{device.type}/torch-{torch.__version__}{kept}"
