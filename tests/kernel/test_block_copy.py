"""Copy-on-write of blocks."""

import pytest
import torch

from kernels import reference
from kernels.block_copy import copy_blocks

pytestmark = pytest.mark.usefixtures("kernels_in_use")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_bit_by_bit_and_others_left_alone(dtype: torch.dtype) -> None:
    kv_cache = torch.randn((9, 2, 2, 4, 2, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = kv_cache.clone()
    src, dst = torch.tensor([3, 3, 0]), torch.tensor([8, 1, 7])
    copy_blocks(kv_cache, src, dst)
    reference.copy_blocks(wanted, src, dst)
    assert torch.equal(kv_cache, wanted)


def test_no_pairs_copy_nothing() -> None:
    kv_cache = torch.randn(3, 2, 2, 4, 2, 8)
    before, nothing = kv_cache.clone(), torch.empty(0, dtype=torch.int64)
    copy_blocks(kv_cache, nothing, nothing)
    assert torch.equal(kv_cache, before)
