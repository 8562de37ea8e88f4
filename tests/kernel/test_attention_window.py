"""A sliding window in the compiled kernel: which keys a row sees, which it doesn't even read, and equal bits."""

from dataclasses import replace

import pytest
import torch

from kernels.attention_inputs import AttentionOptions
from kernels.compiled import launch
from kernels.dispatch import has_compiled
from kernels.paged_attention import paged_attention
from tests.kernel.batches import Batch, error, pick, ragged_batch
from tests.kernel.triton_attention import expected

pytestmark = pytest.mark.skipif(not has_compiled(), reason="numba is not installed: there is no compiled attention")

TOLERANCE = 2e-6
# Around the ends of tiles of 32 keys and splits of 512.
WINDOWS = [1, 2, 31, 32, 33, 100, 511, 512, 513, 700, 5000]
LONG = [(1, 40), (5, 530), (1, 512), (1, 513), (50, 700), (1, 1100), (3, 3), (2, 0)]


@pytest.fixture(autouse=True)
def _compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that would fall back fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("the compiled kernel did not take this call")

    monkeypatch.setattr("kernels.paged_attention.attend_with_torch", refuse)


def attend(batch: Batch, window: int) -> torch.Tensor:
    options = AttentionOptions(window=window)
    return paged_attention(batch.query, batch.kv_cache, 0, batch.meta, 0.125, options=options)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_sees_its_window_and_nothing_before_it(window: int) -> None:
    batch = ragged_batch(LONG, num_heads=2, num_kv_heads=1, head_dim=16, num_layers=1)
    assert error(attend(batch, window), expected(batch, AttentionOptions(window=window), layer=0)) < TOLERANCE


@pytest.mark.parametrize("window", WINDOWS)
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(window: int) -> None:
    """In pieces the first tile and the first split of a row are others than in one."""
    batch = ragged_batch([(640, 1300)], num_heads=6, num_kv_heads=2, head_dim=16, num_layers=1)
    whole = attend(batch, window)
    for cut in (1, 31, 32, 95, 300, 511, 639):
        pieces = torch.cat((attend(pick(batch, 0, 0, cut), window), attend(pick(batch, 0, cut), window)))
        assert torch.equal(pieces, whole), f"cut at {cut}"
    for row in (0, 15, 127, 128, 400, 639):
        assert torch.equal(attend(pick(batch, 0, row, row + 1), window)[0], whole[row]), f"row {row} alone"


@pytest.mark.parametrize("window", [40, 513, 5000])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(3, 3, 64), (5, 1, 32), (8, 4, 128), (2, 7, 80)])
def test_a_decode_that_computes_several_heads_at_once_has_the_bits_of_one_alone(
    num_kv_heads: int, group: int, head_dim: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch of many, heads share the tile and what is fetched ahead; a prompt beside them changes nothing."""
    heads_at_once: list[int] = []

    def recording(body: str, arguments: tuple[int, ...], num_threads: int) -> None:
        heads_at_once.append(arguments[-1])
        launch(body, arguments, num_threads)

    monkeypatch.setattr("kernels.paged_attention.launch", recording)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # with many threads the batch would have to be larger
    lengths = [0, 1, 15, 16, 17, 32, 33, 64, 511, 512, 513, 700]
    seqs = [(1, context_len) for context_len in lengths] + [(40, 90)]
    batch = ragged_batch(
        seqs, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, head_dim=head_dim, num_layers=1
    )
    together = attend(batch, window)
    assert heads_at_once[0] > 1
    for seq in range(len(lengths)):
        assert torch.equal(attend(pick(batch, seq), window)[0], together[seq]), f"{lengths[seq]} keys"
    assert set(heads_at_once[1:]) == {1}


def test_a_window_that_holds_the_context_changes_no_bit() -> None:
    batch = ragged_batch(LONG, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=1)
    without = paged_attention(batch.query, batch.kv_cache, 0, batch.meta, 0.125)
    assert torch.equal(attend(batch, 1100), without)
    assert torch.equal(attend(batch, 2**62), without)
    assert not torch.equal(attend(batch, 1099), without)


@pytest.mark.parametrize("query_len", [1, 40])
def test_tiles_before_the_window_are_not_read(query_len: int) -> None:
    """Their blocks are NaN, and their table entries lead nowhere."""
    batch = ragged_batch([(query_len, 1100)], num_heads=4, num_kv_heads=2, head_dim=16, num_layers=1)
    wanted = attend(batch, 70)
    first_tile = (1100 - query_len + 1 - 70) // 32 * 32
    tables = batch.meta.block_tables.clone()
    batch.kv_cache[tables[0, : first_tile // 16].long()] = torch.nan
    tables[0, : first_tile // 16] = 2**31 - 1
    unread = Batch(batch.query, batch.kv_cache, replace(batch.meta, block_tables=tables))
    assert torch.equal(attend(unread, 70), wanted)


def test_infinite_and_undefined_keys_before_the_window_do_no_harm() -> None:
    """In the tile where the window begins: what is masked counts for nothing, be it what it may."""
    batch = ragged_batch([(1, 64)], num_heads=4, num_kv_heads=2, head_dim=16, num_layers=1)
    wanted = attend(batch, 10)
    block = int(batch.meta.block_tables[0, 2])
    for value in (torch.inf, -torch.inf, torch.nan):
        batch.kv_cache[block, 0, 0] = value  # the keys; a masked value is multiplied by 0
        assert torch.equal(attend(batch, 10), wanted)
