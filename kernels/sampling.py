"""From logits to token ids: each row its own temperature, top-k, top-p and seed, in one pass over the batch."""

import torch

from kernels.compiled import launch, scratch
from kernels.dispatch import use_compiled
from kernels.errors import KernelInputError
from kernels.noise import gumbel, row_keys


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_limit: int,
) -> torch.Tensor:
    """Choose one token id per row, int64 [rows]; -1 for a row that has no finite logit below `vocab_limit`.

    logits float32 [rows, vocab]; temperature, top_p float32 [rows]; top_k, seeds, positions int64 [rows]. All on one
    device. Ids >= vocab_limit and logits that are not finite are never chosen. A row of temperature 0 takes the largest
    raw logit, the first of equals. Any other row, in this order:

    1. scaled = (logit - largest) / temperature
    2. top_k > 0: keep the k largest and whatever equals the k-th
    3. top_p < 1: keep the most probable tokens of what is left, down to the one with which their share reaches p, and
       whatever equals that one; at least one token stays
    4. the largest of scaled + Gumbel noise wins (see noise.py), which is a draw from the softmax of what was kept
    """
    if logits.ndim != 2 or not 0 < vocab_limit <= logits.shape[1]:
        raise KernelInputError(
            f"logits are {tuple(logits.shape)} and vocab_limit is {vocab_limit}; it must lie in 1..vocab"
        )
    if use_compiled("sample", logits) and logits.stride(1) == 1:
        return _launch(logits, temperature, top_k, top_p, seeds, positions, vocab_limit)
    return _sample_with_torch(logits[:, :vocab_limit], temperature, top_k, top_p, seeds, positions)


def _sample_with_torch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    usable = logits.masked_fill(~logits.isfinite(), -torch.inf)
    largest, ids = usable.max(dim=1)
    ids = usable.argmax(dim=1)  # unlike max(), documented to take the first of equals
    is_drawn = (temperature > 0) & largest.isfinite()
    if bool(is_drawn.any()):
        rows = is_drawn.nonzero().squeeze(1)
        scaled = (usable[rows] - largest[rows, None]) / temperature[rows, None]
        scaled = keep_top_p(keep_top_k(scaled, top_k[rows]), top_p[rows])
        keys = row_keys(seeds[rows], positions[rows]).to(logits.device)
        ids[rows] = (scaled + gumbel(keys, scaled.shape[1])).argmax(dim=1)
    return ids.masked_fill(~largest.isfinite(), -1)


def _launch(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_limit: int,
) -> torch.Tensor:
    from kernels.cpu.sampling import scratch_bytes

    num_rows = logits.shape[0]
    temperature, top_p = temperature.float().contiguous(), top_p.float().contiguous()
    top_k, keys = top_k.long().contiguous(), row_keys(seeds, positions)
    ids = torch.empty(num_rows, dtype=torch.int64)
    num_threads = min(torch.get_num_threads(), max(1, num_rows))
    thread_bytes = scratch_bytes(vocab_limit)
    launch(
        "sample",
        (
            logits.data_ptr(), logits.stride(0) * 4, vocab_limit, temperature.data_ptr(), top_k.data_ptr(),
            top_p.data_ptr(), keys.data_ptr(), ids.data_ptr(), num_rows,
            scratch(num_threads * thread_bytes).data_ptr(), thread_bytes,
        ),
        num_threads,
    )  # fmt: skip
    return ids


def keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Put -inf where a token of scaled [rows, vocab] is below its row's top_k-th largest; top_k <= 0 keeps all."""
    vocab_size = scaled.shape[1]
    limits = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    largest_limit = int(torch.where(limits < vocab_size, limits, 0).max())
    if largest_limit == 0:
        return scaled
    sorted_values = scaled.topk(largest_limit, dim=1).values
    cut = sorted_values.gather(1, (limits.clamp(max=largest_limit) - 1).unsqueeze(1))
    is_dropped = (scaled < cut) & (limits < vocab_size).unsqueeze(1)
    return scaled.masked_fill(is_dropped, -torch.inf)


def keep_top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Put -inf where a token is outside its row's smallest set of likeliest tokens of share top_p; >= 1 keeps all."""
    if not bool((top_p < 1).any()):
        return scaled
    sorted_values = scaled.sort(dim=1, descending=True).values
    share = sorted_values.double().exp().cumsum(dim=1)
    num_before_cut = (share < top_p.double().unsqueeze(1) * share[:, -1:]).sum(dim=1, keepdim=True)
    cut = sorted_values.gather(1, num_before_cut.clamp(max=scaled.shape[1] - 1))
    is_dropped = (scaled < cut) & (top_p < 1).unsqueeze(1)
    return scaled.masked_fill(is_dropped, -torch.inf)
