"""The sampler: what it keeps, what it draws, and what it never returns."""

import math
from dataclasses import dataclass

import pytest
import torch

from kernels import noise, reference
from kernels.dispatch import implementation
from kernels.errors import KernelInputError
from kernels.noise import gumbel, row_keys
from kernels.sampling import keep_min_p, keep_top_k, keep_top_p, sample

pytestmark = pytest.mark.usefixtures("kernels_in_use")

VOCAB = 200


@pytest.fixture
def num_rows(kernels_in_use: str) -> int:
    """Rows of a batch: the interpreter takes a tenth of a second for each."""
    return 6 if kernels_in_use == "triton" else 64


@dataclass(slots=True)
class Rows:
    """Arguments of `sample`, one entry a row."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    min_p: torch.Tensor

    def sample(self, vocab_limit: int | None = None) -> torch.Tensor:
        limit = self.logits.shape[1] if vocab_limit is None else vocab_limit
        return sample(
            self.logits, self.temperature, self.top_k, self.top_p, self.seeds, self.positions, limit, self.min_p
        )  # fmt: skip

    def expected(self, vocab_limit: int) -> torch.Tensor:
        return reference.sample(
            self.logits, self.temperature, self.top_k, self.top_p, self.seeds, self.positions, vocab_limit, self.min_p
        )

    def pick(self, *rows: int) -> "Rows":
        index = torch.tensor(rows)
        return Rows(*(getattr(self, name)[index] for name in Rows.__slots__))


def rows_of(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Rows:
    n = logits.shape[0]
    return Rows(
        logits,
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.arange(n) + 1000,
        torch.full((n,), 7),
        torch.full((n,), min_p),
    )


def mixed_rows(num_rows: int = 64, vocab: int = VOCAB, seed: int = 0) -> Rows:
    """Rows of all kinds: greedy or not, filtered by any, all or none of the three, with ties and without."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn((num_rows, vocab + 5), generator=g)[:, :vocab] * 4
    logits[::3] = (logits[::3] * 2).round() / 2  # ties
    top_k = torch.randint(1, vocab + 20, (num_rows,), generator=g)
    top_k[torch.rand(num_rows, generator=g) < 0.3] = 0
    top_p = torch.rand(num_rows, generator=g)
    top_p[torch.rand(num_rows, generator=g) < 0.3] = 1.0
    temperature = torch.rand(num_rows, generator=g) + 0.2
    temperature[::7] = 0.0
    return Rows(
        logits, temperature, top_k, top_p,
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g),
        torch.randint(0, 2**20, (num_rows,), generator=g),
        (torch.rand(num_rows, generator=g) - 0.5).clamp(min=0) * 0.2,
    )  # fmt: skip


@pytest.mark.triton
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, VOCAB])
def test_rows_of_all_kinds_choose_the_tokens_of_the_twin(vocab: int, num_rows: int) -> None:
    rows = mixed_rows(num_rows, vocab=vocab)
    assert rows.sample().tolist() == rows.expected(vocab).tolist()


@pytest.mark.triton
def test_all_implementations_choose_the_same_tokens_of_a_large_vocabulary(kernels_in_use: str) -> None:
    """Of several pieces, the last of which is not full."""
    rows = mixed_rows(num_rows=15, vocab=49155, seed=3)
    if kernels_in_use == "triton":
        rows = mixed_rows(num_rows=3, vocab=8300, seed=3)
        rows.temperature[0] = 0.5  # all three are drawn
    ids = rows.sample()
    with implementation("torch"):
        assert rows.sample().tolist() == ids.tolist()


@pytest.mark.slow
@pytest.mark.triton
def test_many_rows_of_a_vocabulary_of_many_tiles_choose_the_tokens_of_the_compiled_kernel() -> None:
    rows = mixed_rows(num_rows=40, vocab=20_011, seed=4)
    ids = rows.sample()
    with implementation("auto"):
        assert rows.sample().tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.triton
def test_logits_of_another_dtype_are_taken_for_the_float32_numbers_that_they_are(dtype: torch.dtype) -> None:
    rows = mixed_rows(3)
    rows.logits = rows.logits.to(dtype)
    ids = rows.sample().tolist()
    rows.logits = rows.logits.float()
    assert rows.sample().tolist() == ids


@pytest.mark.triton
def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, [150, 31, 17]] = 5.0
    logits[1, [16, 15]] = 5.0
    logits[2] = -3.0
    logits[3, VOCAB - 1] = 1.0
    assert rows_of(logits, temperature=0.0).sample().tolist() == [17, 15, 0, VOCAB - 1]


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Upper tail of Pearson's statistic, by the Wilson-Hilferty approximation of the chi-square distribution."""
    wanted = probabilities.double() * counts.sum()
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    degrees = len(counts) - 1
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


WISHES = [
    *((1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0)),
    *((1.5, 20, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.05)),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), WISHES)
def test_a_hundred_thousand_draws_follow_the_softmax(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Of one row of logits under 100,000 seeds and positions; p > 1e-3."""
    check_draws(100_000, temperature, top_k, top_p, min_p)


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), WISHES[1:3])
def test_two_thousand_draws_follow_the_softmax(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    check_draws(2000, temperature, top_k, top_p, min_p)


def check_draws(num_draws: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    row = torch.randn(40, generator=torch.Generator().manual_seed(11)) * 1.5
    kept = reference.kept_tokens((row - row.max()) / temperature, top_k, top_p, min_p)
    rows = rows_of(row.repeat(num_draws, 1), temperature, top_k, top_p, min_p)
    rows.seeds, rows.positions = torch.arange(num_draws) // 100, torch.arange(num_draws) % 100
    counts = torch.bincount(rows.sample(), minlength=40)
    assert sorted(counts.nonzero().flatten().tolist()) == kept
    probabilities = torch.softmax(row[kept].double() / temperature, dim=0)
    assert chi_square_p_value(counts[kept], probabilities) > 1e-3


@pytest.mark.triton
def test_a_seed_draws_the_same_token_in_another_slot_and_batch(num_rows: int) -> None:
    rows = mixed_rows(num_rows)
    ids = rows.sample().tolist()
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(5)).tolist()
    assert rows.pick(*order).sample().tolist() == [ids[row] for row in order]
    assert [int(rows.pick(row).sample()) for row in range(num_rows)] == ids


def test_another_seed_or_position_draws_other_noise() -> None:
    keys = row_keys(torch.tensor([1, 2, 1, 0, -1]), torch.tensor([1, 1, 2, 0, 0]))
    noise = gumbel(keys, 1000)
    assert len({tuple(row.tolist()) for row in keys}) == 5
    assert noise.isfinite().all()
    for one in range(5):
        for other in range(one):
            assert abs(float(torch.corrcoef(noise[[one, other]])[0, 1])) < 0.15


def test_keys_and_noise_are_these_numbers() -> None:
    """Computed with Python's whole numbers, and its library's logarithm: what any implementation has to give."""
    mask = 2**64 - 1

    def splitmix64(x: int) -> int:
        x = (x + noise.GOLDEN) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    seeds, positions = [0, 1, -1, 2**63 - 1, -(2**63), 123456789], [0, 7, 2**31, 1, 5, 40]
    keys = row_keys(torch.tensor(seeds), torch.tensor(positions))
    wanted = [
        splitmix64((seed + noise.GOLDEN * splitmix64(position)) & mask)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert keys.tolist() == [[key & 0xFFFFFFFF, key >> 32] for key in wanted]
    hashes = noise.token_hash(keys, 500)
    logs = [[-math.log(-math.log1p(-(h + 0.5) / 2**32)) for h in row] for row in hashes.tolist()]
    exact = torch.tensor(logs, dtype=torch.float64)
    # Half a unit in the last place of float32, and hardly more: both logarithms are float64 throughout.
    torch.testing.assert_close(gumbel(keys, 500).double(), exact, rtol=6.1e-8, atol=1e-9)


def test_gumbel_noise_has_the_mean_and_variance_of_its_distribution() -> None:
    noise = gumbel(row_keys(torch.arange(20), torch.zeros(20, dtype=torch.int64)), 50_000).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02


@pytest.mark.triton
def test_ids_at_and_above_the_limit_are_never_chosen(num_rows: int) -> None:
    rows = mixed_rows(num_rows)
    rows.logits = rows.logits.clone()
    rows.logits[:, 150:] = 1000.0
    ids = rows.sample(vocab_limit=150)
    assert int(ids.max()) < 150
    assert int(ids.min()) >= 0


@pytest.mark.triton
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_only_finite_logits_are_chosen(bad: float, num_rows: int) -> None:
    rows = mixed_rows(num_rows)
    rows.logits = rows.logits.clone()
    rows.logits[:, ::2] = bad
    ids = rows.sample()
    assert bool((ids % 2 == 1).all())
    assert ids.tolist() == rows.expected(VOCAB).tolist()


@pytest.mark.triton
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_is_told_by_minus_one(bad: float, temperature: float) -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0))
    logits[1] = bad
    ids = rows_of(logits, temperature, top_k=5, top_p=0.9).sample().tolist()
    assert ids[1] == -1
    assert min(ids[0], ids[2]) >= 0


@pytest.mark.triton
def test_all_but_one_at_minus_infinity_leaves_that_one() -> None:
    logits = torch.full((4, VOCAB), -torch.inf)
    logits[:, 123] = -5.0
    rows = rows_of(logits)
    rows.temperature = torch.tensor([0.0, 1.0, 0.01, 5.0])
    rows.top_k, rows.top_p = torch.tensor([0, 3, 0, 3]), torch.tensor([1.0, 1.0, 0.5, 0.5])
    assert rows.sample().tolist() == [123] * 4


@pytest.mark.triton
def test_a_tiny_top_p_a_top_k_of_one_or_a_min_p_of_one_keeps_the_largest_and_its_equals(kernels_in_use: str) -> None:
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)).clamp(max=2.0)
    row[[40, 90]] = 3.0
    num_draws = 8 if kernels_in_use == "triton" else 300
    for top_k, top_p, min_p in ((0, 1e-6, 0.0), (1, 1.0, 0.0), (0, 0.0, 0.0), (0, 1.0, 1.0), (0, 1.0, 2.0)):
        drawn = set(rows_of(row.repeat(num_draws, 1), 1.0, top_k, top_p, min_p).sample().tolist())
        assert drawn == {40, 90}, f"top_k {top_k}, top_p {top_p}, min_p {min_p}"


@pytest.mark.triton
def test_a_top_k_of_the_vocabulary_a_top_p_of_one_and_a_min_p_of_nothing_change_nothing(num_rows: int) -> None:
    logits = torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(0))
    plain = rows_of(logits).sample().tolist()
    for top_k, top_p, min_p in ((VOCAB, 1.0, 0.0), (VOCAB + 100, 1.0, 0.0), (-1, 1.0, -1.0), (0, 2.0, 1e-40)):
        assert rows_of(logits, 1.0, top_k, top_p, min_p).sample().tolist() == plain


@pytest.mark.triton
def test_a_temperature_near_zero_draws_the_largest() -> None:
    logits = torch.randn((10, VOCAB), generator=torch.Generator().manual_seed(0)) * 30
    assert rows_of(logits, 1e-30).sample().tolist() == rows_of(logits, 0.0).sample().tolist()


@pytest.mark.triton
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (9, 0.7, 0.02)])
def test_no_draw_leaves_the_kept_set_and_each_of_it_is_drawn(
    top_k: int, top_p: float, min_p: float, kernels_in_use: str
) -> None:
    """Flat logits with ties at the cut, so that few draws reach all that is kept."""
    row = torch.tensor([0.0, 0.5, 0.5, -0.5, 0.25, 0.5, 0.0, 0.25, -3.0, 0.75])
    kept = reference.kept_tokens((row - row.max()) / 0.5, top_k, top_p, min_p)
    num_draws = 8 if kernels_in_use == "triton" else 300
    drawn = set(rows_of(row.repeat(num_draws, 1), 0.5, top_k, top_p, min_p).sample().tolist())
    assert drawn <= set(kept)
    assert len(drawn) == len(kept) or num_draws < 300


def test_the_sets_that_are_kept_equal_those_of_sorting() -> None:
    rows = mixed_rows()
    scaled = rows.logits - rows.logits.max(dim=1, keepdim=True).values
    kept = keep_top_p(keep_top_k(keep_min_p(scaled, rows.min_p), rows.top_k), rows.top_p).isfinite()
    for row in range(64):
        wishes = int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row])
        wanted = reference.kept_tokens(scaled[row], *wishes)
        assert kept[row].nonzero().flatten().tolist() == wanted, f"row {row}"


@pytest.mark.triton
def test_no_rows_give_no_ids() -> None:
    assert rows_of(torch.empty(0, VOCAB)).sample().tolist() == []


def test_a_limit_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(KernelInputError, match="vocab_limit"):
        rows_of(torch.zeros(1, VOCAB)).sample(vocab_limit=VOCAB + 1)
    with pytest.raises(KernelInputError, match="vocab_limit"):
        rows_of(torch.zeros(1, VOCAB)).sample(vocab_limit=0)


def test_a_column_of_another_length_is_refused() -> None:
    rows = rows_of(torch.zeros(2, VOCAB))
    rows.seeds = rows.seeds[:1]
    with pytest.raises(KernelInputError, match="seeds"):
        rows.sample()
