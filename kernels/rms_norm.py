"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone and fused with the residual addition before it."""

from typing import Final

import torch

from kernels.checks import check_devices
from kernels.compiled import float_bits, launch, takes_rows, threads_for
from kernels.dispatch import TRITON_DTYPES, tell_fallback, use_triton
from kernels.errors import KernelInputError

# Triton's kernel keeps a row in registers: 32 of each of 1024 threads.
TRITON_MAX_HIDDEN: Final = 32768


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    x [num_tokens, hidden], weight [hidden] of the same dtype; the mean is taken in float32. Returns a new tensor.
    """
    _check(x, weight)
    if _takes_triton(x):
        return _launch_triton(x, None, weight, eps)
    if not takes_rows("rms_norm", x, x.shape[1]):
        return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, eps)
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add x to `residual` IN PLACE, then return rms_norm of the sum.

    x and residual [num_tokens, hidden], weight [hidden], all of one dtype.
    """
    _check(x, weight)
    check_devices("x", x, residual=residual)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise KernelInputError(f"residual is {residual.dtype} {tuple(residual.shape)}, x {x.dtype} {tuple(x.shape)}")
    if residual.stride(1) == 1 and _takes_triton(x):
        return _launch_triton(x, residual, weight, eps)
    if not (takes_rows("rms_norm", x, x.shape[1]) and residual.stride(1) == 1):
        residual.add_(x)
        return torch.nn.functional.rms_norm(residual, (x.shape[1],), weight, eps)
    return _launch(x, residual, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_devices("x", x, weight=weight)
    if x.ndim != 2 or weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise KernelInputError(
            f"x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)};"
            " they must be [num_tokens, hidden] and [hidden] of one dtype"
        )


def _takes_triton(x: torch.Tensor) -> bool:
    if not use_triton("rms_norm", x) or x.dtype not in TRITON_DTYPES:
        return False
    if x.shape[1] > TRITON_MAX_HIDDEN:
        tell_fallback("rms_norm", f"rows of {x.shape[1]} elements are longer than {TRITON_MAX_HIDDEN}")
        return False
    return True


def _launch_triton(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from kernels.gpu.rows import launch_rms_norm

    return launch_rms_norm(x if x.stride(1) == 1 else x.contiguous(), residual, weight.contiguous(), eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    num_rows, hidden = x.shape
    weight = weight.contiguous()
    out = torch.empty(num_rows, hidden)
    num_threads = threads_for(8 * num_rows * hidden)
    source, row = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0) * 4)
    rows_per_item = max(1, num_rows // (4 * num_threads))
    launch(
        "rms_norm",
        (
            x.data_ptr(), x.stride(0) * 4, source, row, weight.data_ptr(), out.data_ptr(), num_rows, hidden,
            float_bits(eps), rows_per_item,
        ),
        num_threads,
    )  # fmt: skip
    return out
