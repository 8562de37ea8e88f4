"""Whether a sequence's tokens depend on who else is in the batch."""

import torch

from kernels.compiled import LANES
from kernels.dispatch import KERNELS, has_compiled, selected
from model.config import ModelConfig


def batch_dependence(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
) -> str | None:
    """Why a row's numbers may change with the rows beside it, and what to do; None where they can't.

    The compiled kernels compute each row in an order of its own, whatever comes with it: alone or in a batch, in a
    prompt or as a single token. So tokens are the same after a swap, after being computed again, and behind a cached
    prefix. Torch's operators choose another order of summation for another number of rows. `kv_dtype` is the KV
    cache's, where it isn't `dtype`.
    """
    if device.type != "cpu":
        return f"on {device.type} the results of torch's operators change with the number of rows: use --device cpu"
    if dtype is not torch.float32:
        name = str(dtype).removeprefix("torch.")
        return f"in {name} the results of torch's operators change with the number of rows: use --dtype float32"
    if kv_dtype not in (None, dtype):
        return "with a KV cache in 8 bits attention is torch's, which changes with the rows: use --kv-cache-dtype auto"
    if not has_compiled():
        is_off = any(selected(kernel) != "auto" for kernel in KERNELS)
        cause = "PAGEMILL_KERNELS turns them off: unset it" if is_off else "numba is missing: install it"
        return f"the compiled kernels are not in use, since {cause}"
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "head_dim")}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % LANES]
    if odd:
        return f"the compiled kernels take sizes in steps of {LANES}, and this model has {' and '.join(odd)}"
    return None
