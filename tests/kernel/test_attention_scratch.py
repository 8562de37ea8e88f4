"""The compiled attention keeps to the working memory that it asks for."""

import pytest
import torch

from kernels.dispatch import has_compiled
from kernels.paged_attention import AttentionMetadata, paged_attention

GUARD = 4096


@pytest.mark.skipif(not has_compiled(), reason="numba is not installed: there is no compiled attention to check")
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 256])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("is_decode", [False, True])
def test_nothing_is_written_beyond_the_scratch(
    head_dim: int, group: int, is_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode of several sequences takes as many heads at once as its tile has rows for."""
    given: list[torch.Tensor] = []

    def guarded(num_bytes: int) -> torch.Tensor:
        given.append(torch.full((num_bytes + GUARD,), 0xAB, dtype=torch.uint8))
        return given[-1]

    monkeypatch.setattr("kernels.paged_attention.scratch", guarded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    num_seqs, num_tokens, num_kv_heads, context_len = (4, 1, 20, 130) if is_decode else (1, 130, 1, 130)
    cache = torch.randn(9, 1, 2, 16, num_kv_heads, head_dim)
    meta = AttentionMetadata(
        torch.arange(9, dtype=torch.int32).repeat(num_seqs, 1),
        torch.arange(num_seqs + 1, dtype=torch.int32) * num_tokens,
        torch.full((num_seqs,), context_len, dtype=torch.int32),
        num_tokens,
        context_len,
    )
    paged_attention(torch.randn(num_seqs * num_tokens, num_kv_heads * group, head_dim), cache, 0, meta, 0.1)
    assert given, "the compiled kernel did not run"
    assert bool((given[-1][-GUARD:] == 0xAB).all())
