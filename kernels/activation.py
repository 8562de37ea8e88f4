"""The gated activation of Llama's feed-forward layer."""

import torch

from kernels.compiled import launch, takes_rows, threads_for
from kernels.dispatch import TRITON_DTYPES, use_triton
from kernels.errors import KernelInputError


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the columns and up the second.

    gate_up [num_tokens, 2 * F] → [num_tokens, F] of the same dtype.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise KernelInputError(f"gate_up is {tuple(gate_up.shape)}; it must be [num_tokens, 2 * F]")
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if use_triton("silu_and_mul", gate_up) and gate_up.dtype in TRITON_DTYPES:
        from kernels.gpu.rows import launch_silu_and_mul

        return launch_silu_and_mul(gate_up if gate_up.stride(1) == 1 else gate_up.contiguous())
    if not takes_rows("silu_and_mul", gate_up, size):
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up
    out = torch.empty(num_rows, size)
    num_threads = threads_for(12 * num_rows * size)
    rows_per_item = max(1, num_rows // (4 * num_threads))
    launch(
        "silu_and_mul",
        (gate_up.data_ptr(), gate_up.stride(0) * 4, out.data_ptr(), num_rows, size, rows_per_item),
        num_threads,
    )
    return out
