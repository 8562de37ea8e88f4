"""From the settings to the engine's own, which know nothing of where they come from."""

from pathlib import Path

from worker.engine_config import EngineConfig
from worker.settings import Settings


def engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    """What the settings say of the engine that serves the checkpoint at `model_path`."""
    return EngineConfig(
        model_path=str(model_path),
        cache_dir=str(settings.cache_dir),
        load_format=settings.load_format,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_kv_blocks=settings.num_kv_blocks,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=settings.enable_prefix_caching,
        swap_space_gib=settings.swap_space_gib,
        num_swap_blocks=settings.num_swap_blocks,
        preemption_mode=settings.preemption_mode,
        write_behind_mib=settings.write_behind_mib,
        swap_step_mib=settings.swap_step_mib,
        deterministic=settings.deterministic,
        cuda_graphs=settings.cuda_graphs,
        scheduling_policy=settings.scheduling_policy,
        scheduler_delay_factor=settings.scheduler_delay_factor,
        target_itl_ms=settings.target_itl_ms,
        num_threads=settings.num_threads,
        overlap_scheduling=settings.overlap_scheduling,
        check_invariants=settings.check_invariants,
    )
