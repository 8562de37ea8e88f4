"""Builds an engine from its config: checkpoint, decoder, KV cache, scheduler. engine_sizes.py has the sizes of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.activations import measure_activations
from model.config import ModelConfig
from model.decoder import Decoder
from model.determinism import batch_dependence
from model.errors import ModelError
from model.graph_memory import measure_graphs
from model.kv_cache import KVCache, kv_block_bytes
from model.loader import load_checkpoint, load_config
from model.model_runner import ModelRunner, RunnerConfig
from model.quantization import QUANTIZATIONS
from model.rates import measure_prefill, measure_swap
from model.tokenizer import Tokenizer
from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.errors import InvalidConfigError
from scheduler.scheduler import Scheduler
from worker.engine import Engine
from worker.engine_config import BLOCK_SIZES, EngineConfig, EngineInfo
from worker.engine_sizes import (
    BATCHED_TOKENS,
    check_fits,
    fit_context,
    longest_context,
    num_blocks_in,
    num_swap_step_blocks,
    pick_num_blocks,
    pick_num_swap_blocks,
    startup_need,
)
from worker.errors import StartupError
from worker.memory import available_bytes, headroom
from worker.startup_memory import Need, is_memory_failure, is_thread_failure, too_few_threads, too_little
from worker.step_pipeline import LaunchingRunner, ThreadedRunner

ProgressCallback = Callable[[str, int, int], None]

# Measuring how fast a prompt is computed may lengthen the start by this much, where there is a swap space. A prompt of
# a few tokens takes as long as one of many, since either reads all weights: what stops too early finds a low rate.
MEASURE_S = 0.5
# The start waits so long for the KV cache's memory; what is not there by then comes while jobs run already.
TAKE_PAGES_S = 0.5
# Compiled kernels lie here in the cache folder.
KERNEL_FOLDER = "kernels"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Model:
    """What is known of the model before its weights are read."""

    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    block_bytes: int


def build_engine(config: EngineConfig, progress: ProgressCallback | None = None) -> tuple[Engine, EngineInfo]:
    """An engine that is ready for its first request, compiled and warmed up.

    progress(stage, done, total) is called while it takes long. Raises StartupError: one line that says what to do.
    """
    room = headroom()
    need: Need | None = None
    try:
        model = _read_model(config)
        if model.device.type == "cpu":
            need = startup_need(config, model.config, model.dtype, model.block_bytes)
            check_fits(model.path, need)
        return _build(config, model, progress or (lambda stage, done, total: None))
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the GPU has too little memory for this model: {error}; use a smaller one") from error
    except Exception as error:
        if is_memory_failure(error):
            raise StartupError(too_little(Path(config.model_path).name, need, room, error)) from error
        if is_thread_failure(error):
            raise StartupError(too_few_threads()) from error
        if isinstance(error, ModelError | InvalidConfigError):
            raise StartupError(str(error)) from error
        raise


def _read_model(config: EngineConfig) -> _Model:
    if config.block_size not in BLOCK_SIZES:
        raise StartupError(f"block_size is {config.block_size}: use one of {', '.join(map(str, BLOCK_SIZES))}")
    if config.quantization not in QUANTIZATIONS:
        raise StartupError(f"quantization is {config.quantization}: use one of {', '.join(QUANTIZATIONS)}")
    path = Path(config.model_path)
    device = _pick_device(config.device)
    model_config = load_config(path, config.load_format)
    dtype = _pick_dtype(config.dtype, model_config, device)
    return _Model(path, model_config, device, dtype, kv_block_bytes(model_config, config.block_size, dtype))


def _build(config: EngineConfig, model: _Model, report: ProgressCallback) -> tuple[Engine, EngineInfo]:
    path, model_config, device, dtype = model.path, model.config, model.device, model.dtype
    dependence = batch_dependence(model_config, dtype, device)
    if config.deterministic and dependence is not None:
        raise StartupError(f"deterministic can't be kept: {dependence}, or turn deterministic off")
    context = longest_context(config, model_config)
    tokenizer = Tokenizer.from_checkpoint(path, config.load_format)
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir)
    checkpoint = load_checkpoint(
        path,
        cache_dir=cache_dir,
        dtype="auto" if config.load_format == "auto" else dtype_name(dtype),
        progress=report,
        load_format=config.load_format,
        device=device,
    )
    decoder = Decoder(
        model_config,
        checkpoint.weights,
        device=device,
        dtype=dtype,
        max_positions=context,
        quantization=config.quantization,
    )
    batched_tokens = config.max_num_batched_tokens or max(BATCHED_TOKENS[device.type], config.max_num_seqs)
    limits = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_model_len=context,
        sampled_vocab_size=tokenizer.vocab_size,
        num_threads=config.num_threads,
        kernel_cache_dir=None if cache_dir is None else cache_dir / KERNEL_FOLDER,
    )
    activation_bytes, graph_bytes = None, 0
    if device.type == "cuda":
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
        if config.cuda_graphs:
            measured = measure_graphs(decoder, replace(limits, use_cuda_graphs=True), config.block_size)
            limits = replace(limits, use_cuda_graphs=measured is not None)
            graph_bytes = measured or 0
    num_blocks = pick_num_blocks(config, model.block_bytes, context, device, activation_bytes, graph_bytes)
    max_model_len = fit_context(config, context, num_blocks)
    limits = replace(limits, max_model_len=max_model_len)
    num_swap_blocks = pick_num_swap_blocks(config, num_blocks, model.block_bytes, device)
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
    runner.capture_graphs()
    if device.type == "cpu":  # it decides nothing here, so it can wait until the kernels are compiled
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
    swap_rate = prefill_rate = None
    if num_swap_blocks:
        swap_rate = measure_swap(kv_cache)
        prefill_rate = measure_prefill(runner, kv_cache, min(batched_tokens, max_model_len), MEASURE_S)
    kv_cache.take_pages(TAKE_PAGES_S)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched_tokens,
            eos_token_ids=frozenset(model_config.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
            preemption_mode=PreemptionMode(config.preemption_mode),
            swap_bytes_per_s=swap_rate,
            prefill_tokens_per_s=prefill_rate,
            write_behind_blocks=num_blocks_in(config.write_behind_mib, model.block_bytes),
            scheduling_policy=config.scheduling_policy,
            scheduler_delay_factor=config.scheduler_delay_factor,
            target_itl_ms=config.target_itl_ms,
        ),
        CacheConfig(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_cpu_blocks=num_swap_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_block_bytes=model.block_bytes,
            swap_step_blocks=num_swap_step_blocks(config, model.block_bytes, device),
        ),
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model_config.vocab_size,
        kv_bytes_per_block=model.block_bytes,
        device=device.type,
        dtype=dtype_name(dtype),
        fingerprint=_fingerprint(config, dtype, device, is_deterministic=dependence is None),
        pid=os.getpid(),
        num_swap_blocks=num_swap_blocks,
        swap_bytes_per_s=swap_rate,
        prefill_tokens_per_s=prefill_rate,
        activation_bytes=activation_bytes,
        batch_dependence=dependence,
        num_cuda_graphs=runner.num_graphs,
        graph_bytes=graph_bytes,
    )
    overlapping = _overlapping(config, runner, device)
    return Engine(scheduler, runner, check_invariants=config.check_invariants, overlapping=overlapping), info


def _overlapping(config: EngineConfig, runner: ModelRunner, device: torch.device) -> LaunchingRunner | None:
    """What computes steps while the next one is decided; None where one comes after the other."""
    is_on = device.type == "cuda" if config.overlap_scheduling is None else config.overlap_scheduling
    if not is_on:
        return None
    return runner if device.type == "cuda" else ThreadedRunner(runner)


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


def dtype_name(dtype: torch.dtype) -> str:
    """As settings and checkpoints write it."""
    return str(dtype).removeprefix("torch.")


def _fingerprint(config: EngineConfig, dtype: torch.dtype, device: torch.device, *, is_deterministic: bool) -> str:
    name = Path(config.model_path).stem
    if config.load_format == "dummy":
        name = f"dummy-{Path(config.model_path).name}"
    kept = "/deterministic" if is_deterministic else ""
    numbers = dtype_name(dtype) + ("" if config.quantization == "none" else f"-{config.quantization}")
    return f"{name}/{numbers}/{device.type}/torch-{torch.__version__}{kept}"
