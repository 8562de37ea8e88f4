"""The likeliest tokens of each row of logits, and their log probabilities: what a beam may go on with."""

import torch

from kernels.compiled import launch
from kernels.dispatch import use_compiled
from kernels.errors import KernelInputError


def top_logprobs(logits: torch.Tensor, k: int, vocab_limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(log probabilities float64 [rows, k], token ids int64 [rows, k]) of the k likeliest tokens, the likeliest first.

    logits float32 [rows, vocab]. Ids >= vocab_limit and logits that are not finite have no part in it. Of equals the
    first comes first. Where a row has fewer than k tokens, the rest is -inf and -1.
    """
    if logits.ndim != 2 or not 0 < vocab_limit <= logits.shape[1] or k < 1:
        raise KernelInputError(
            f"logits are {tuple(logits.shape)}, vocab_limit is {vocab_limit} and k is {k}; vocab_limit must lie in "
            "1..vocab, and k be at least 1"
        )
    if use_compiled(logits) and logits.stride(1) == 1:
        return _launch(logits, k, vocab_limit)
    return _with_torch(logits[:, :vocab_limit].float(), k)


def _with_torch(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    usable = logits.masked_fill(~logits.isfinite(), -torch.inf)
    # Bits of a float32 in the order of the numbers, then the id from the end: `topk` has no order among equals.
    bits = usable.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    tokens = torch.arange(vocab_size, device=logits.device)
    keys = (ordered << 32) + (vocab_size - 1 - tokens)
    ids = keys.topk(min(k, vocab_size), dim=1).indices
    chosen = usable.gather(1, ids).double()
    logprobs = chosen - usable.double().logsumexp(dim=1, keepdim=True)
    is_missing = chosen == -torch.inf
    values = torch.full((num_rows, k), -torch.inf, dtype=torch.float64, device=logits.device)
    found = torch.full((num_rows, k), -1, device=logits.device)
    values[:, : ids.shape[1]] = logprobs.masked_fill(is_missing, -torch.inf)
    found[:, : ids.shape[1]] = ids.masked_fill(is_missing, -1)
    return values, found


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
