"""The compiled attention keeps to the working memory that it asks for."""

import pytest
import torch

from kernels.dispatch import has_compiled
from kernels.paged_attention import AttentionMetadata, paged_attention

GUARD = 4096


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed: there is no compiled attention to check")
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_nothing_is_written_beyond_the_scratch(head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def guarded(num_bytes: int) -> torch.Tensor:
        given.append(torch.full((num_bytes + GUARD,), 0xAB, dtype=torch.uint8))
        return given[-1]

    monkeypatch.setattr("kernels.paged_attention.scratch", guarded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    num_tokens, num_blocks = 130, 9
    cache = torch.randn(num_blocks, 1, 2, 16, 1, head_dim)
    tables = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0)
    meta = AttentionMetadata(
        tables,
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        num_tokens,
        num_tokens,
    )
    paged_attention(torch.randn(num_tokens, group, head_dim), cache, 0, meta, 0.1)
    assert given, "the compiled kernel did not run"
    assert bool((given[-1][-GUARD:] == 0xAB).all())
