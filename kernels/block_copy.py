"""Moves of KV blocks on one device: copy-on-write, and listed blocks to and from a contiguous staging buffer.

A block moves as bytes, all layers, keys and values. Ids are int64 on the blocks' device and must lie inside them; no
implementation on CUDA checks that.
"""

from typing import Final

import torch

from kernels.checks import check_devices, check_dtypes
from kernels.dispatch import tell_fallback, use_triton
from kernels.errors import KernelInputError

# What blocks are seen as by Triton's kernel, the widest that divides them.
_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_blocks(kv_cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy block src[i] onto block dst[i], all layers, keys and values, IN PLACE.

    kv_cache [num_blocks, ...]; src, dst int64 [n]. No id may stand in both lists, and none twice in `dst`.
    """
    check_devices("kv_cache", kv_cache, src=src, dst=dst)
    check_dtypes((torch.int64,), src=src, dst=dst)
    if src.shape != dst.shape or src.ndim != 1:
        raise KernelInputError(
            f"src is {tuple(src.shape)} and dst {tuple(dst.shape)}; they must be lists of one length"
        )
    if not src.numel():
        return
    if use_triton("block_copy", kv_cache) and (words := _as_words(kv_cache)) is not None:
        _move(words, words, src, dst)
        return
    numbers = _indexable(kv_cache)
    numbers[dst] = numbers[src]


def gather_blocks(kv_cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Copy block ids[i] of kv_cache [num_blocks, ...] to staging[i] IN PLACE: [n, ...] of the same dtype."""
    _check_staging(kv_cache, ids, staging)
    if not ids.numel():
        return
    if (pair := _words_of_both(kv_cache, staging)) is not None:
        words, staged = pair
        _move(words, staged, ids, None)
        return
    torch.index_select(_indexable(kv_cache), 0, ids, out=_indexable(staging))


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Copy staging[i], of [n, ...], to block ids[i] of kv_cache [num_blocks, ...] IN PLACE. No id may stand twice."""
    _check_staging(kv_cache, ids, staging)
    if not ids.numel():
        return
    if (pair := _words_of_both(kv_cache, staging)) is not None:
        words, staged = pair
        _move(staged, words, None, ids)
        return
    _indexable(kv_cache).index_copy_(0, ids, _indexable(staging))


def _words_of_both(kv_cache: torch.Tensor, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cache and staging as Triton's kernel moves them; None where torch does it."""
    if not use_triton("block_copy", kv_cache):
        return None
    words, staged = _as_words(kv_cache), _as_words(staging)
    return None if words is None or staged is None or words.dtype is not staged.dtype else (words, staged)


def _check_staging(kv_cache: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    check_devices("kv_cache", kv_cache, ids=ids, staging=staging)
    check_dtypes((torch.int64,), ids=ids)
    wanted = (*ids.shape, *kv_cache.shape[1:])
    if ids.ndim != 1 or staging.shape != wanted or staging.dtype != kv_cache.dtype:
        raise KernelInputError(
            f"staging is {staging.dtype} {tuple(staging.shape)}; {ids.numel()} blocks of the cache are"
            f" {kv_cache.dtype} {wanted}"
        )


def _indexable(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can index: not every operator of it takes those of one byte."""
    return blocks.view(torch.uint8) if blocks.element_size() == 1 else blocks


def _as_words(blocks: torch.Tensor) -> torch.Tensor | None:
    """[num_blocks, num_words] over the same memory. None, after one line to the log, where a block has gaps."""
    if not blocks[:1].is_contiguous():
        tell_fallback("block_copy", "a block's elements are not in one piece")
        return None
    flat = blocks.as_strided((blocks.shape[0], blocks[0].numel()), (blocks.stride(0), 1), blocks.storage_offset())
    sizes = (flat.stride(0), flat.shape[1], flat.storage_offset())
    for word in _WORDS:
        if all(size * flat.element_size() % word.itemsize == 0 for size in sizes):
            return flat.view(word)
    raise AssertionError("bytes divide everything")


def _move(source: torch.Tensor, target: torch.Tensor, src: torch.Tensor | None, dst: torch.Tensor | None) -> None:
    from kernels.gpu.blocks import launch_move_blocks

    launch_move_blocks(
        source, target, None if src is None else src.contiguous(), None if dst is None else dst.contiguous()
    )
