"""Where the KV cache may be kept in 8 bits: the one place that decides it, for reading, for writing and at start."""

from typing import Final

import torch

from kernels.attention_inputs import FP8
from kernels.dispatch import capability_of_cuda, takes_triton
from kernels.errors import KernelInputError

# The kernels that read and write the cache.
CACHE_KERNELS: Final = ("attention", "rope_and_write")
# The first compute capability of CUDA devices, as 10 * major + minor, whose Triton code converts from and to FP8: Ada.
FP8_CAPABILITY: Final = 89


def check_cache_dtype(dtype: torch.dtype, device: torch.device, kernels: tuple[str, ...] = CACHE_KERNELS) -> None:
    """Raise KernelInputError for a KV cache in FP8 that the Triton kernels can't convert on this device.

    Torch's operators can, on any device: nothing is refused where these `kernels` are theirs, by the switch or since
    triton isn't installed. The wrappers ask for their own kernel at each call; whoever makes a cache asks for both.
    """
    if dtype is not FP8:
        return
    refusing = [kernel for kernel in kernels if takes_triton(kernel, device)]
    if refusing and (capability := _capability(device)) < FP8_CAPABILITY:
        switch = ",".join(f"{kernel}=torch" for kernel in refusing)
        raise KernelInputError(
            f"a KV cache of {FP8} needs compute capability 8.9 or newer, and {device} has {capability / 10}: keep the"
            f" cache in the model's dtype, or set PAGEMILL_KERNELS={switch}, which is slow"
        )


def _capability(device: torch.device) -> int:
    """Of a device that isn't CUDA the first that is enough: the interpreter converts."""
    return capability_of_cuda(device) if device.type == "cuda" else FP8_CAPABILITY
