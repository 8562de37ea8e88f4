"""From logits to token ids: each row its own temperature, min-p, top-k, top-p and seed, in one pass over the batch."""

from typing import NamedTuple

import torch

from kernels.checks import check_devices
from kernels.compiled import launch, scratch
from kernels.dispatch import use_compiled, use_triton
from kernels.errors import KernelInputError
from kernels.noise import gumbel, log, row_keys


class _Wishes(NamedTuple):
    """What each row asks for, contiguous: float32 [rows] but for top_k, seeds and positions, which are int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_limit: int,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose one token id per row, int64 [rows]; -1 for a row that has no finite logit below `vocab_limit`.

    logits [rows, vocab] of any float dtype; temperature, top_p, min_p float32 [rows] (None: no row wants min-p);
    top_k, seeds, positions int64 [rows]. All on one device. Ids >= vocab_limit and logits that are not finite are never
    chosen. A row whose temperature is not above 0 takes the largest raw logit, the first of equals. Any other row, in
    this order:

    1. scaled = (logit - largest) / temperature, in float32
    2. min_p > 0: keep the tokens at least min_p times as probable as the largest; whatever equals that one stays
    3. top_k > 0: keep the k largest and whatever equals the k-th
    4. top_p < 1: keep the most probable tokens of what is left, down to the one with which their share reaches p, and
       whatever equals that one; at least one token stays
    5. the largest of scaled + Gumbel noise wins (see noise.py), which is a draw from the softmax of what was kept

    On CUDA the host waits for nothing, so that a graph can hold the call. Raises KernelInputError.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or not 0 < vocab_limit <= logits.shape[1]:
        raise KernelInputError(
            f"logits are {logits.dtype} {tuple(logits.shape)} and vocab_limit is {vocab_limit}; they must be floats"
            " [rows, vocab], and it must lie in 1..vocab"
        )
    floats = [temperature, top_p, torch.zeros_like(temperature) if min_p is None else min_p]
    temperature, top_p, min_p = (each.float().contiguous() for each in floats)
    top_k, seeds, positions = (each.long().contiguous() for each in (top_k, seeds, positions))
    wishes = _Wishes(temperature, top_k, top_p, min_p, seeds, positions)
    check_devices("logits", logits, **wishes._asdict())
    for name, each in wishes._asdict().items():
        if each.shape != logits.shape[:1]:
            raise KernelInputError(
                f"{name} is {tuple(each.shape)}, logits are {tuple(logits.shape)}; each row needs one"
            )
    if use_triton("sample", logits):
        from kernels.gpu.sampling import sample as sample_with_triton

        # Adjacent columns, by a copy if it must be: less than the sort of torch's operators.
        adjacent = logits if logits.stride(1) == 1 else logits[:, :vocab_limit].contiguous()
        return sample_with_triton(adjacent, *wishes, vocab_limit)
    usable = logits if logits.dtype is torch.float32 else logits[:, :vocab_limit].float()
    if use_compiled("sample", usable) and usable.stride(1) == 1:
        return _launch(usable, wishes, vocab_limit)
    return _sample_with_torch(usable[:, :vocab_limit], wishes)


def _sample_with_torch(logits: torch.Tensor, wishes: _Wishes) -> torch.Tensor:
    usable = logits.masked_fill(~logits.isfinite(), -torch.inf)
    ids = usable.argmax(dim=1)  # unlike max(), documented to take the first of equals
    largest = usable.gather(1, ids.unsqueeze(1)).squeeze(1)
    is_drawn = (wishes.temperature > 0) & largest.isfinite()
    if logits.device.type == "cpu":
        rows = is_drawn.nonzero().squeeze(1)
        if len(rows):
            ids[rows] = _draw(usable[rows], largest[rows], _Wishes(*(each[rows] for each in wishes)))
    else:  # to ask which rows are drawn would let the host wait for the device
        wishes = wishes._replace(temperature=wishes.temperature.masked_fill(~is_drawn, 1.0))
        ids = torch.where(is_drawn, _draw(usable, largest, wishes), ids)
    return ids.masked_fill(~largest.isfinite(), -1)


def _draw(usable: torch.Tensor, largest: torch.Tensor, wishes: _Wishes) -> torch.Tensor:
    scaled = (usable - largest[:, None]) / wishes.temperature[:, None]
    # A difference beyond all numbers, divided by an infinite temperature, has no place among the others.
    scaled = scaled.masked_fill(scaled.isnan(), -torch.inf)
    scaled = keep_min_p(scaled, wishes.min_p)
    scaled = keep_top_p(keep_top_k(scaled, wishes.top_k), wishes.top_p)
    keys = row_keys(wishes.seeds, wishes.positions)
    return (scaled + gumbel(keys, scaled.shape[1])).argmax(dim=1)


def _launch(logits: torch.Tensor, wishes: _Wishes, vocab_limit: int) -> torch.Tensor:
    from kernels.cpu.sampling import scratch_bytes

    num_rows = logits.shape[0]
    ids = torch.empty(num_rows, dtype=torch.int64)
    num_threads = min(torch.get_num_threads(), max(1, num_rows))
    thread_bytes = scratch_bytes(vocab_limit)
    launch(
        "sample",
        (
            logits.data_ptr(), logits.stride(0) * 4, vocab_limit, *(each.data_ptr() for each in wishes),
            ids.data_ptr(), num_rows, scratch(num_threads * thread_bytes).data_ptr(), thread_bytes,
        ),
        num_threads,
    )  # fmt: skip
    return ids


def keep_min_p(scaled: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Put -inf where a token of scaled [rows, vocab] is below min_p times the likeliest one's share; <= 0 keeps all."""
    cut = log(min_p.double().clamp(min=torch.finfo(torch.float64).tiny, max=1.0)).float()
    return scaled.masked_fill((scaled < cut.unsqueeze(1)) & (min_p > 0).unsqueeze(1), -torch.inf)


def keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Put -inf where a token of scaled [rows, vocab] is below its row's top_k-th largest; top_k <= 0 keeps all."""
    vocab_size = scaled.shape[1]
    limits = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    num_needed = vocab_size
    if scaled.device.type == "cpu":  # where asking costs nothing
        num_needed = int(torch.where(limits < vocab_size, limits, 0).max())
        if num_needed == 0:
            return scaled
    sorted_values = scaled.topk(num_needed, dim=1).values
    cut = sorted_values.gather(1, (limits.clamp(max=num_needed) - 1).unsqueeze(1))
    is_dropped = (scaled < cut) & (limits < vocab_size).unsqueeze(1)
    return scaled.masked_fill(is_dropped, -torch.inf)


def keep_top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Put -inf where a token is outside its row's smallest set of likeliest tokens of share top_p; >= 1 keeps all."""
    if scaled.device.type == "cpu" and not bool((top_p < 1).any()):
        return scaled
    sorted_values = scaled.sort(dim=1, descending=True).values
    share = sorted_values.double().exp().cumsum(dim=1)
    num_before_cut = (share < top_p.double().unsqueeze(1) * share[:, -1:]).sum(dim=1, keepdim=True)
    cut = sorted_values.gather(1, num_before_cut.clamp(max=scaled.shape[1] - 1))
    is_dropped = (scaled < cut) & (top_p < 1).unsqueeze(1)
    return scaled.masked_fill(is_dropped, -torch.inf)
