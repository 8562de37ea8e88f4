"""The likeliest tokens of each row of logits, and their log probabilities: what a beam may go on with."""

import torch

from kernels.compiled import launch
from kernels.dispatch import tell_fallback, use_compiled, use_triton
from kernels.errors import KernelInputError


def top_logprobs(logits: torch.Tensor, k: int, vocab_limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log probabilities float64 [rows, k], token ids int64 [rows, k]) of the k likeliest tokens, the likeliest first.

    logits [rows, vocab] of any float dtype, taken as float32. Ids >= vocab_limit and logits that are not finite have no
    part in it. Of equals the first comes first. Where a row has fewer than k tokens, the rest is -inf and -1.

    On CUDA the host waits for nothing, so that a graph can hold the call. Raises KernelInputError.
    """
    if logits.ndim != 2 or not logits.is_floating_point() or not 0 < vocab_limit <= logits.shape[1] or k < 1:
        raise KernelInputError(
            f"logits are {logits.dtype} {tuple(logits.shape)}, vocab_limit is {vocab_limit} and k is {k}; they must be"
            " floats [rows, vocab], vocab_limit lie in 1..vocab, and k be at least 1"
        )
    if use_triton("top_logprobs", logits):
        from kernels.gpu.top_logprobs import top_logprobs as top_with_triton
        from kernels.gpu.top_logprobs import why_not_triton

        why = why_not_triton(k, vocab_limit)
        if why is None:
            adjacent = logits if logits.stride(1) == 1 else logits[:, :vocab_limit].contiguous()
            return top_with_triton(adjacent, k, vocab_limit)
        tell_fallback("top_logprobs", why)
    if use_compiled("top_logprobs", logits) and logits.stride(1) == 1:
        return _launch(logits, k, vocab_limit)
    return _with_torch(logits[:, :vocab_limit].float(), k)


def _with_torch(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    usable = logits.masked_fill(~logits.isfinite(), -torch.inf)
    num_found = min(k, vocab_size)
    chosen, ids = (_first_largest if logits.device.type == "cpu" else _sorted_largest)(usable, num_found)
    is_missing = chosen == -torch.inf
    logprobs = chosen.double() - usable.double().logsumexp(dim=1, keepdim=True)
    values = torch.full((num_rows, k), -torch.inf, dtype=torch.float64, device=logits.device)
    found = torch.full((num_rows, k), -1, device=logits.device)
    values[:, :num_found] = logprobs.masked_fill(is_missing, -torch.inf)
    found[:, :num_found] = ids.masked_fill(is_missing, -1)
    return values, found


def _first_largest(usable: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row in order, and where they are; of equals the first comes first."""
    # `topk` has no order among equals, so it only tells how large the last one is; of its equals the first are taken.
    cut = usable.topk(k, dim=1).values[:, -1:]
    is_above, is_equal = usable > cut, usable == cut
    num_wanted = k - is_above.sum(dim=1, keepdim=True)
    is_kept = is_above | (is_equal & (is_equal.cumsum(dim=1) <= num_wanted))
    ids = is_kept.nonzero()[:, 1].reshape(-1, k)
    chosen, order = usable.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return chosen, ids.gather(1, order)


def _sorted_largest(usable: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by sorting the whole row: more work, but no wait of the host for the device, as `nonzero` would be."""
    chosen, ids = usable.sort(dim=1, descending=True, stable=True)
    return chosen[:, :k], ids[:, :k]


def _launch(logits: torch.Tensor, k: int, vocab_limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = logits.shape[0]
    values = torch.empty((num_rows, k), dtype=torch.float64)
    ids = torch.empty((num_rows, k), dtype=torch.int64)
    launch(
        "top_logprobs",
        (logits.data_ptr(), logits.stride(0) * 4, vocab_limit, k, values.data_ptr(), ids.data_ptr(), num_rows),
        min(torch.get_num_threads(), max(1, num_rows)),
    )
    return values, ids
