"""RMSNorm, alone or with the residual addition before it, and the gated activation: each row is read once."""

from typing import Final

import torch
import triton
import triton.language as tl

from kernels.gpu.case import Case, meta
from kernels.gpu.common import launch, next_power_of_2

# Elements of a row that one program of the activation computes.
GATED_PIECE: Final = 1024


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    HIDDEN: tl.constexpr,
    LENGTH: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """One row, which stays in registers for its scaling. LENGTH: a power of two, at least HIDDEN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, LENGTH)
    mask = columns < HIDDEN
    value = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        place = residual_ptr + row * residual_stride + columns
        value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(place, rounded, mask=mask)
        value = rounded.to(tl.float32)  # the next layer adds to what was stored
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + columns, (value * factor * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, stride: tl.tensor, SIZE: tl.constexpr, PIECE: tl.constexpr
) -> None:
    """PIECE elements of one row. exp takes no positive number, so that none overflows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)
    tl.store(out_ptr + row * SIZE + columns, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=mask)


def launch_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As kernels.rms_norm: adjacent columns in x and residual [num_tokens, hidden], weight contiguous."""
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    length = next_power_of_2(hidden)
    added = x if residual is None else residual
    launch(
        rms_norm_kernel, (num_rows,), x, added, weight, out, x.stride(0), added.stride(0), eps,
        HIDDEN=hidden, LENGTH=length, ADDS=residual is not None, num_warps=min(max(length // 512, 1), 32),
    )  # fmt: skip
    return out


def launch_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As kernels.activation.silu_and_mul: adjacent columns in gate_up."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, GATED_PIECE))
    launch(
        silu_and_mul_kernel, grid, gate_up, out, gate_up.stride(0), SIZE=size, PIECE=GATED_PIECE, num_warps=4
    )  # fmt: skip
    return out


def _norm_case(hidden: int, dtype: torch.dtype, *, adds: bool) -> None:
    x, weight = meta((64, hidden), dtype=dtype), meta((hidden,), dtype=dtype)
    launch_rms_norm(x, torch.empty_like(x) if adds else None, weight, 1e-5)


CASES: Final = (
    Case("rms_norm 4096 bf16", lambda: _norm_case(4096, torch.bfloat16, adds=False)),
    Case("add_rms_norm 576 fp32", lambda: _norm_case(576, torch.float32, adds=True)),
    Case("add_rms_norm 4096 bf16", lambda: _norm_case(4096, torch.bfloat16, adds=True)),
    Case("add_rms_norm 16384 fp16", lambda: _norm_case(16384, torch.float16, adds=True)),
    Case("silu_and_mul 14336 bf16", lambda: launch_silu_and_mul(meta((64, 2 * 14336), dtype=torch.bfloat16))),
    Case("silu_and_mul 1536 fp32", lambda: launch_silu_and_mul(meta((64, 2 * 1536), dtype=torch.float32))),
)
