"""Tests that need a CUDA device. In a rehearsal they run on the CPU, so that no line of them is run on a GPU first."""

import pytest
import torch

from tests.gpu.timing import IS_REHEARSED


@pytest.fixture
def device() -> torch.device:
    """What the test runs on."""
    if IS_REHEARSED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
