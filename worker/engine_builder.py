"""Builds an engine from its config: checkpoint, decoder, KV cache, scheduler. engine_sizes.py has the sizes of them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.activations import measure_activations
from model.decoder import Decoder
from model.determinism import batch_dependence
from model.errors import ModelError
from model.graph_memory import measure_graphs
from model.kv_cache import KVCache
from model.loader import load_checkpoint
from model.model_runner import ModelRunner, RunnerConfig
from model.rates import measure_prefill, measure_swap
from model.tokenizer import Tokenizer
from scheduler.config import CacheConfig, PreemptionMode, SchedulerConfig
from scheduler.errors import InvalidConfigError
from scheduler.scheduler import Scheduler
from worker.engine import Engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_model import EngineModel, dtype_name, fingerprint, read_model
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


def build_engine(config: EngineConfig, progress: ProgressCallback | None = None) -> tuple[Engine, EngineInfo]:
    """An engine that is ready for its first request, compiled and warmed up.

    progress(stage, done, total) is called while it takes long. Raises StartupError: one line that says what to do.
    """
    room = headroom()
    need: Need | None = None
    try:
        model = read_model(config)
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


def _build(config: EngineConfig, model: EngineModel, report: ProgressCallback) -> tuple[Engine, EngineInfo]:
    dependence = batch_dependence(model.config, model.dtype, model.device, model.kv_dtype)
    if config.deterministic and dependence is not None:
        raise StartupError(f"deterministic can't be kept: {dependence}, or turn deterministic off")
    context = longest_context(config, model.config)
    tokenizer = Tokenizer.from_checkpoint(model.path, config.load_format)
    decoder = _load_decoder(config, model, context, report)
    batched_tokens = config.max_num_batched_tokens or max(BATCHED_TOKENS[model.device.type], config.max_num_seqs)
    limits = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_model_len=context,
        sampled_vocab_size=tokenizer.vocab_size,
        num_threads=config.num_threads,
        kernel_cache_dir=_kernel_folder(config),
        is_deterministic=config.deterministic,
    )
    activation_bytes, graph_bytes = None, 0
    if model.device.type == "cuda":
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
        limits, graph_bytes = _with_graphs(config, decoder, limits)
    sizes = _fit_sizes(config, model, context, batched_tokens, activation_bytes, graph_bytes)
    limits = replace(limits, max_model_len=sizes.max_model_len)
    kv_cache = KVCache(
        model.config,
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        dtype=model.kv_dtype,
        device=model.device,
        num_cpu_blocks=sizes.num_swap_blocks,
        available_bytes=available_bytes,
    )
    runner = ModelRunner(decoder, kv_cache, limits)
    runner.warm_up(report)
    runner.capture_graphs()
    if model.device.type == "cpu":  # it decides nothing here, so it can wait until the kernels are compiled
        activation_bytes = measure_activations(decoder, limits, config.block_size, batched_tokens)
    rates = _measure_rates(runner, kv_cache, sizes)
    kv_cache.take_pages(TAKE_PAGES_S)
    eos_token_ids = frozenset(model.config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    scheduler = _make_scheduler(config, model, sizes, rates, eos_token_ids)
    info = EngineInfo(
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model.config.vocab_size,
        kv_bytes_per_block=model.block_bytes,
        device=model.device.type,
        dtype=dtype_name(model.dtype),
        fingerprint=fingerprint(config, model, is_deterministic=dependence is None),
        pid=os.getpid(),
        num_swap_blocks=sizes.num_swap_blocks,
        swap_bytes_per_s=rates.swap_bytes_per_s,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        activation_bytes=activation_bytes,
        batch_dependence=dependence,
        num_cuda_graphs=runner.num_graphs,
        graph_bytes=graph_bytes,
        kv_cache_dtype=dtype_name(model.kv_dtype),
    )
    overlapping = _overlapping(config, runner, model.device)
    return Engine(scheduler, runner, check_invariants=config.check_invariants, overlapping=overlapping), info


def _load_decoder(config: EngineConfig, model: EngineModel, context: int, report: ProgressCallback) -> Decoder:
    checkpoint = load_checkpoint(
        model.path,
        cache_dir=None if config.cache_dir is None else Path(config.cache_dir),
        dtype="auto" if config.load_format == "auto" else dtype_name(model.dtype),
        progress=report,
        load_format=config.load_format,
        device=model.device,
    )
    return Decoder(
        model.config,
        checkpoint.weights,
        device=model.device,
        dtype=model.dtype,
        max_positions=context,
        quantization=config.quantization,
        kv_dtype=model.kv_dtype,
    )


def _kernel_folder(config: EngineConfig) -> Path | None:
    return None if config.cache_dir is None else Path(config.cache_dir) / KERNEL_FOLDER


def _with_graphs(config: EngineConfig, decoder: Decoder, limits: RunnerConfig) -> tuple[RunnerConfig, int]:
    """The limits, with CUDA graphs where they are wanted and can be captured, and the bytes that they will take."""
    if not config.cuda_graphs:
        return limits, 0
    measured = measure_graphs(decoder, replace(limits, use_cuda_graphs=True), config.block_size)
    return replace(limits, use_cuda_graphs=measured is not None), measured or 0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How much an engine holds and computes at a time."""

    batched_tokens: int
    num_blocks: int
    num_swap_blocks: int
    max_model_len: int


def _fit_sizes(
    config: EngineConfig,
    model: EngineModel,
    context: int,
    batched_tokens: int,
    activation_bytes: int | None,
    graph_bytes: int,
) -> _Sizes:
    num_blocks = pick_num_blocks(config, model.block_bytes, context, model.device, activation_bytes, graph_bytes)
    max_model_len = fit_context(config, context, num_blocks)
    num_swap_blocks = pick_num_swap_blocks(config, num_blocks, model.block_bytes, model.device)
    return _Sizes(batched_tokens, num_blocks, num_swap_blocks, max_model_len)


@dataclass(frozen=True, slots=True)
class _Rates:
    """What swapping and computing again are compared by; None where there is nothing to swap to."""

    swap_bytes_per_s: float | None = None
    prefill_tokens_per_s: float | None = None


def _measure_rates(runner: ModelRunner, kv_cache: KVCache, sizes: _Sizes) -> _Rates:
    if not sizes.num_swap_blocks:
        return _Rates()
    prompt_len = min(sizes.batched_tokens, sizes.max_model_len)
    return _Rates(measure_swap(kv_cache), measure_prefill(runner, kv_cache, prompt_len, MEASURE_S))


def _make_scheduler(
    config: EngineConfig, model: EngineModel, sizes: _Sizes, rates: _Rates, eos_token_ids: frozenset[int]
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_model_len=sizes.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.batched_tokens,
            eos_token_ids=eos_token_ids,
            preemption_mode=PreemptionMode(config.preemption_mode),
            swap_bytes_per_s=rates.swap_bytes_per_s,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            write_behind_blocks=num_blocks_in(config.write_behind_mib, model.block_bytes),
            scheduling_policy=config.scheduling_policy,
            scheduler_delay_factor=config.scheduler_delay_factor,
            target_itl_ms=config.target_itl_ms,
        ),
        CacheConfig(
            num_blocks=sizes.num_blocks,
            block_size=config.block_size,
            num_cpu_blocks=sizes.num_swap_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_block_bytes=model.block_bytes,
            swap_step_blocks=num_swap_step_blocks(config, model.block_bytes, model.device),
        ),
    )


def _overlapping(config: EngineConfig, runner: ModelRunner, device: torch.device) -> LaunchingRunner | None:
    """What computes steps while the next one is decided; None where one comes after the other."""
    is_on = device.type == "cuda" if config.overlap_scheduling is None else config.overlap_scheduling
    if not is_on:
        return None
    return runner if device.type == "cuda" else ThreadedRunner(runner)
