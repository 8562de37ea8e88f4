"""A real engine whose KV cache is too small: it swaps, and no token changes, whatever happens meanwhile."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from model.kv_cache import KVCache
from model.model_runner import ModelRunner
from model.swap_copies import SwapCopies
from scheduler.output import FinishReason, Transfer, TransferResult
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import SequenceStatus
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.model_runner.late_device import PromptDevice
from tests.unit.model_runner.late_streams import late_streams
from worker.engine import Engine, EngineRequest
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.errors import StartupError
from worker.memory import Headroom
from worker.startup_memory import REST_BYTES

NUM_NEW_TOKENS = 40
TINY_BLOCK_BYTES = 2 * 2 * 8 * 16 * 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """16 blocks of 8 tokens: two or three of the requests fit at their full length."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(
        str(folder),
        block_size=8,
        max_model_len=128,
        num_kv_blocks=16,
        num_swap_blocks=80,
        preemption_mode="swap",
        max_num_seqs=8,
        num_threads=1,
        check_invariants="step",
    )


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    """Greedy and drawn ones, some with a common beginning."""
    rng = random.Random(8)
    common = [rng.randrange(256) for _ in range(12)]
    made = []
    for number in range(10):
        prompt = common * (number % 2) + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(temperature=[0.0, 0.8][number % 3 == 0], max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        made.append(EngineRequest(f"r{number}", tuple(prompt), sampling, seed=number))
    return made


@pytest.fixture(scope="module")
def undisturbed(config: EngineConfig, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """What each request gives where nothing is ever preempted."""
    engine = made(replace(config, num_kv_blocks=128, num_swap_blocks=0, preemption_mode="auto"))[0]
    tokens = served(engine, requests)
    assert engine.stats().num_preemptions_recompute == 0
    return tokens


def made(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    return build_engine(config)


def cache_of(engine: Engine) -> KVCache:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    return runner._kv_cache


def served(
    engine: Engine, requests: list[EngineRequest], after_step: Callable[[], None] = lambda: None
) -> dict[str, list[int]]:
    """The tokens of each request."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.seq_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            tokens[output.seq_id] += output.new_token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH)
        after_step()
    return tokens


def late(cache: KVCache, monkeypatch: pytest.MonkeyPatch, rng: random.Random, max_delay: int = 3) -> None:
    """Have the end of each transfer reported up to `max_delay` steps late."""
    ended = cache.ended_transfers
    kept: list[tuple[int, TransferResult]] = []

    def ended_late(*, is_waiting: bool = False) -> tuple[TransferResult, ...]:
        kept.extend((rng.randint(0, max_delay), result) for result in ended(is_waiting=is_waiting))
        due = tuple(result for steps, result in kept if steps == 0)
        kept[:] = [(steps - 1, result) for steps, result in kept if steps > 0]
        return due

    monkeypatch.setattr(cache, "ended_transfers", ended_late)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_delay", [0, 3])
def test_swapping_changes_no_token_and_recomputes_none(
    config: EngineConfig,
    requests: list[EngineRequest],
    undisturbed: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    enable_prefix_caching: bool,
    max_delay: int,
) -> None:
    engine, info = made(replace(config, enable_prefix_caching=enable_prefix_caching))
    late(cache_of(engine), monkeypatch, random.Random(1), max_delay)
    assert served(engine, requests) == undisturbed
    stats = engine.stats()
    assert stats.num_preemptions_swap > 3
    assert stats.num_preemptions_recompute == stats.num_recomputed_tokens == stats.num_damaged_blocks == 0
    assert stats.swapped_out_bytes == stats.num_swapped_out_blocks * info.kv_bytes_per_block > 0
    assert stats.num_used_cpu_blocks == 0


@pytest.mark.parametrize("is_staging", [False, True])
def test_copies_that_lag_behind_the_steps_change_no_token(
    config: EngineConfig, requests: list[EngineRequest], undisturbed: dict[str, list[int]], is_staging: bool
) -> None:
    """On streams of their own, as with CUDA, which do nothing before somebody waits for them or polls."""
    engine, _ = made(config)
    cache = cache_of(engine)
    assert cache.cpu_tier is not None
    streams = late_streams(PromptDevice(), seed=4)
    cache._copies = SwapCopies(cache.blocks, cache.cpu_tier, is_staging=is_staging, new_stream=streams)
    assert served(engine, requests) == undisturbed
    stats = engine.stats()
    assert stats.num_preemptions_swap > 3
    assert stats.num_recomputed_tokens == stats.num_damaged_blocks == stats.num_used_cpu_blocks == 0


@pytest.mark.parametrize(("swap_step_mib", "max_blocks"), [(1e-6, 1), (3 * TINY_BLOCK_BYTES / 2**20, 3), (0.0, 16)])
def test_a_step_copies_no_more_of_real_blocks_than_it_may(
    config: EngineConfig,
    requests: list[EngineRequest],
    undisturbed: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    swap_step_mib: float,
    max_blocks: int,
) -> None:
    engine, info = made(replace(config, swap_step_mib=swap_step_mib))
    assert info.kv_bytes_per_block == TINY_BLOCK_BYTES
    cache, copied = cache_of(engine), list[int]()
    begin = cache.begin_transfers

    def begin_and_count(outs: Sequence[Transfer], ins: Sequence[Transfer]) -> None:
        copied.extend(sum(len(transfer.copies) for transfer in way) for way in (outs, ins))
        begin(outs, ins)

    monkeypatch.setattr(cache, "begin_transfers", begin_and_count)
    assert served(engine, requests) == undisturbed
    assert 0 < max(copied) <= max_blocks
    assert max_blocks < 16 or max(copied) > 3
    assert engine.stats().num_recomputed_tokens == 0


def test_damage_in_the_cpu_tier_is_recomputed_and_never_served(
    config: EngineConfig, requests: list[EngineRequest], undisturbed: dict[str, list[int]]
) -> None:
    """Every few steps a bit flips in a block of a swapped sequence."""
    engine, _ = made(config)
    rng, tier = random.Random(2), cache_of(engine).cpu_tier
    assert tier is not None

    def flip_a_bit() -> None:
        swapped = [seq for seq in engine.scheduler.waiting if seq.status is SequenceStatus.SWAPPED]
        if swapped and rng.random() < 0.3:
            block_id = rng.choice(rng.choice(swapped).cpu_table.block_ids())
            bytes_ = tier.blocks(block_id, 1).view(-1).numpy().view("uint8")
            bytes_[rng.randrange(len(bytes_))] ^= 1 << rng.randrange(8)

    assert served(engine, requests, flip_a_bit) == undisturbed
    stats = engine.stats()
    assert stats.num_damaged_blocks > 0
    assert stats.num_recomputed_tokens > 0


def test_a_tier_that_gets_no_memory_means_recomputing(
    config: EngineConfig, requests: list[EngineRequest], undisturbed: dict[str, list[int]]
) -> None:
    engine, _ = made(config)
    tier = cache_of(engine).cpu_tier
    assert tier is not None
    tier._slabs.clear()
    tier._available_bytes = lambda: 0
    assert served(engine, requests) == undisturbed
    assert engine.stats().num_recomputed_tokens > 0
    assert tier.num_bytes == 0


def test_a_tier_that_is_full_means_recomputing(
    config: EngineConfig, requests: list[EngineRequest], undisturbed: dict[str, list[int]]
) -> None:
    engine, _ = made(replace(config, num_swap_blocks=4))
    assert served(engine, requests) == undisturbed
    stats = engine.stats()
    assert stats.num_full_tier_recomputes == stats.num_preemptions_recompute > 0


def test_aborts_in_every_state_leave_nothing_behind_and_disturb_nobody(
    config: EngineConfig,
    requests: list[EngineRequest],
    undisturbed: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, states = random.Random(3), Counter[str]()
    engine, _ = made(config)
    late(cache_of(engine), monkeypatch, rng)
    scheduler = engine.scheduler
    num_rounds = 0
    wanted = {status.name for status in SequenceStatus} - {"FINISHED"}
    while any(states[name] < 2 for name in wanted):
        num_rounds += 1
        assert num_rounds < 40, f"not every state was met: {states}"
        aborted: set[str] = set()

        def abort_one(aborted: set[str] = aborted) -> None:
            alive = [*scheduler.running, *scheduler.waiting, *scheduler.moving.values()]
            if len(alive) > 2 and rng.random() < 0.08:
                _, rarest = min((states[seq.status.name], seq.status.name) for seq in alive)
                seq = rng.choice([seq for seq in alive if seq.status.name == rarest])
                states[rarest] += 1
                aborted.add(seq.seq_id)
                assert engine.abort(seq.seq_id)

        tokens = served(engine, requests, abort_one)
        for seq_id, made_tokens in tokens.items():
            expected = undisturbed[seq_id]
            assert made_tokens == (expected[: len(made_tokens)] if seq_id in aborted else expected), seq_id
        stats = engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert (stats.num_used_cpu_blocks, stats.num_transfers) == (0, 0)


def test_an_engine_with_a_swap_space_knows_its_rates(config: EngineConfig) -> None:
    _, info = made(config)
    assert info.num_swap_blocks == 80
    assert info.swap_bytes_per_s is not None
    assert info.prefill_tokens_per_s is not None
    assert min(info.swap_bytes_per_s, info.prefill_tokens_per_s) > 0


def test_by_default_the_cpu_has_no_swap_space(config: EngineConfig) -> None:
    _, info = made(replace(config, num_swap_blocks=None, preemption_mode="auto"))
    assert (info.num_swap_blocks, info.swap_bytes_per_s) == (0, None)


def test_the_swap_space_can_be_told_in_gib(config: EngineConfig) -> None:
    _, info = made(replace(config, num_swap_blocks=None, swap_space_gib=1 / 1024))
    assert info.num_swap_blocks == (1 << 20) // TINY_BLOCK_BYTES


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with little more free memory than what a process takes beside its weights."""
    free = REST_BYTES + (4 << 20)
    monkeypatch.setattr("worker.engine_sizes.headroom", lambda: Headroom(free, "the machine's memory"))
    return free


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_swap_blocks": 10**9}, r"swap space of 1000000000 blocks .* use at most \d+ blocks .*num_swap_blocks"),
        ({"num_swap_blocks": None, "swap_space_gib": 8.0}, r"takes 8.0 GiB .* or 0\.\d+ GiB \(swap_space_gib\)"),
        ({"num_swap_blocks": 0}, "preemption_mode is swap, but the swap space holds no block"),
        ({"num_swap_blocks": None, "swap_space_gib": 1e-9}, "holds no block"),
    ],
)
def test_a_swap_space_that_cannot_work_is_refused_with_what_would(
    config: EngineConfig, little_memory: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        made(replace(config, **changes))
    assert "\n" not in str(caught.value)


def test_the_numbers_in_the_refusal_work(config: EngineConfig, little_memory: int) -> None:
    with pytest.raises(StartupError) as caught:
        made(replace(config, num_swap_blocks=10**9))
    most = int(str(caught.value).partition("use at most ")[2].split()[0])
    assert most == (little_memory - 16 * TINY_BLOCK_BYTES) // TINY_BLOCK_BYTES
    assert made(replace(config, num_swap_blocks=most))[1].num_swap_blocks == most
    with pytest.raises(StartupError):
        made(replace(config, num_swap_blocks=most + 1))
