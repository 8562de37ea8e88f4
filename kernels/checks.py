"""Checks of arguments that the wrappers share. They look at devices, dtypes and shapes alone, never at contents."""

from typing import Final

import torch

from kernels.errors import KernelInputError

# What ids, positions and lengths may be where a kernel takes either.
INTEGERS: Final = (torch.int32, torch.int64)


def check_devices(first: str, tensor: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise KernelInputError, which names the argument, unless all are on the device of the first, named `first`.

    None is an argument that wasn't given. A kernel would take an address of another device for one of its own.
    """
    device = tensor.device
    for name, other in others.items():
        if other is not None and other.device != device:
            raise KernelInputError(
                f"{name} is on {other.device}, {first} on {device}: the tensors of a call must be on one device"
            )


def check_dtypes(allowed: tuple[torch.dtype, ...], **tensors: torch.Tensor) -> None:
    """Raise KernelInputError, which names the argument, unless each is of one of these dtypes."""
    for name, tensor in tensors.items():
        if tensor.dtype not in allowed:
            raise KernelInputError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, allowed))}")
