"""Memory of the KV cache."""

import numpy as np
import torch


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory. On the CPU it comes from numpy: pages are taken when first written, and are huge ones.

    torch.zeros would write all of it at start, seconds for a pool of gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
