"""How large an engine's tiers are and how long its sequences: from the settings, and from the memory at hand.

Each function raises StartupError where the settings can't work: one line with the numbers that would.
"""

import logging
from pathlib import Path

import torch

from model.config import ModelConfig
from model.quantization import bytes_of_weights
from scheduler.config import PreemptionMode
from worker.engine_config import EngineConfig
from worker.errors import StartupError
from worker.memory import gib, headroom
from worker.startup_memory import REST_BYTES, Need, left, need_on_cpu, too_little

log = logging.getLogger("pagemill.engine")

BATCHED_TOKENS = {"cuda": 6144, "cpu": 512}
# On the CPU the KV cache takes this share of the free memory, and no more than this many bytes: it is taken whole at
# start, and a CPU computes few tokens a second to fill more with. docs/model.md has the figures.
CPU_KV_SHARE = 0.25
CPU_KV_LIMIT_BYTES = 2 << 30
# The CPU tier on CUDA where nothing is said: this much, but no more than this share of the free memory.
SWAP_DEFAULT_BYTES = 4 << 30
SWAP_SHARE = 0.25
# What a step may begin to copy each way: about what the link moves while a decode step reads the weights.
SWAP_STEP_MIB = {"cuda": 256.0, "cpu": 64.0}
# Beyond what the largest step was measured to take: pieces between allocations, and copies that overlap it.
ACTIVATION_MARGIN = 1.2


def startup_need(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, block_bytes: int) -> Need:
    """What weights, KV cache (as far as its size is set) and all else take on the CPU."""
    num_in_tables = num_table_parameters(model_config)
    num_in_layers = num_parameters(model_config) - num_in_tables
    weight_bytes = bytes_of_weights(num_in_layers, num_in_tables, dtype, config.quantization)
    if config.quantization != "none":  # each matrix is there unquantized for a moment, the embeddings are the largest
        weight_bytes += model_config.vocab_size * model_config.hidden_size * dtype.itemsize
    return need_on_cpu(weight_bytes, (config.num_kv_blocks or 0) * block_bytes)


def check_fits(path: Path, need: Need) -> None:
    """Refuse a model that the memory can't hold before it is loaded."""
    room = headroom()
    if need.num_bytes > room.num_bytes:
        raise StartupError(too_little(path.name, need, room))


def longest_context(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of the longest sequence, as far as the checkpoint goes: `max_model_len`, or the checkpoint's own."""
    trained = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise StartupError(
            f"max_model_len is {config.max_model_len}, but the checkpoint is made for {trained} tokens: use at most "
            "that"
        )
    return config.max_model_len or trained


def fit_context(config: EngineConfig, context: int, num_blocks: int) -> int:
    """Tokens of the longest sequence, once the KV cache has its size, which must hold one.

    A `max_model_len` that was asked for is kept to, or refused; one that follows from the checkpoint is lowered.
    """
    num_slots = num_blocks * config.block_size
    if context <= num_slots:
        return context
    if config.max_model_len is None:
        log.log(
            logging.WARNING if config.num_kv_blocks is None else logging.INFO,  # who sets the blocks, knows
            "max_model_len is lowered from the model's %d to %d tokens: that is what the %d blocks of KV cache hold",
            context,
            num_slots,
            num_blocks,
        )
        return num_slots
    needed = -(-context // config.block_size)
    if config.num_kv_blocks is not None:
        raise StartupError(
            f"num_kv_blocks is {num_blocks}, which hold {num_slots} tokens, but max_model_len is {context}: use at "
            f"least {needed} blocks, or a max_model_len of at most {num_slots}"
        )
    raise StartupError(
        f"max_model_len is {context}, but {num_blocks} blocks of KV cache, which hold {num_slots} tokens, are all that "
        f"fit into memory ({left(headroom())}): use a max_model_len of at most {num_slots}"
    )


def pick_num_blocks(
    config: EngineConfig,
    block_bytes: int,
    context: int,
    device: torch.device,
    activation_bytes: int | None,
    graph_bytes: int = 0,
) -> int:
    """Blocks of the KV cache: what is set, or what the memory at hand suggests.

    On CUDA what a step and the graphs take, which aren't there yet, is left free.
    """
    is_cpu = device.type == "cpu"
    room = headroom()
    if is_cpu:
        free = max(0, room.num_bytes - REST_BYTES)
    else:
        reserve = int(((activation_bytes or 0) + graph_bytes) * ACTIVATION_MARGIN)
        free = _free_cuda_bytes(config, device, reserve)
    there_is = f"{left(room)}, of which a step takes {gib(REST_BYTES)}" if is_cpu else f"{gib(free)} are free"
    one_sequence = -(-context // config.block_size)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * block_bytes > free:
            raise StartupError(
                f"num_kv_blocks is {config.num_kv_blocks}, which takes {gib(config.num_kv_blocks * block_bytes)}, "
                f"but {there_is}: use at most {free // block_bytes}"
            )
        return config.num_kv_blocks
    budget = min(int(free * CPU_KV_SHARE), CPU_KV_LIMIT_BYTES) if is_cpu else free
    # More than every sequence at its full length can't be used.
    num_blocks = min(budget // block_bytes, config.max_num_seqs * one_sequence)
    if config.max_model_len is not None:  # who asks for a context gets it, if it takes all there is
        num_blocks = max(num_blocks, min(one_sequence, free // block_bytes))
    if num_blocks < 2:
        raise StartupError(
            f"{gib(budget)} for the KV cache hold {num_blocks} blocks of {gib(block_bytes)}, and {there_is}: free some "
            "memory, or set num_kv_blocks"
        )
    return num_blocks


def pick_num_swap_blocks(config: EngineConfig, num_blocks: int, block_bytes: int, device: torch.device) -> int:
    """Blocks of the CPU tier. On the CPU the KV cache, which isn't allocated yet, comes out of the same memory."""
    is_cpu = device.type == "cpu"
    free = max(0, headroom().num_bytes - (num_blocks * block_bytes if is_cpu else 0))
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


def num_swap_step_blocks(config: EngineConfig, block_bytes: int, device: torch.device) -> int:
    """Blocks that one step may begin to copy each way."""
    step_mib = SWAP_STEP_MIB[device.type] if config.swap_step_mib is None else config.swap_step_mib
    return num_blocks_in(step_mib, block_bytes)


def num_blocks_in(mib: float, block_bytes: int) -> int:
    """What fits, but one at least where it isn't 0: blocks are copied whole."""
    return max(1, int(mib * (1 << 20)) // block_bytes) if mib else 0


def _free_cuda_bytes(config: EngineConfig, device: torch.device, reserve: int) -> int:
    """What gpu_memory_utilization leaves for the KV cache beside all that is there already, and the reserve."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(max(0, total * config.gpu_memory_utilization - (total - free) - reserve))


def num_parameters(config: ModelConfig) -> int:
    """Weights of the decoder, to within its biases and norms."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.hidden_size * heads + config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + mlp) + num_table_parameters(config)


def num_table_parameters(config: ModelConfig) -> int:
    """Of these the embeddings' and the output layer's, which may be the same."""
    return config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
