"""The runner under the real scheduler, with a pool so small that it preempts."""

import random

import pytest
import torch

from model.decoder import Decoder
from model.kv_cache import KVCache
from model.model_runner import ModelRunner, RunnerConfig
from model.weights import random_weights
from scheduler import invariants
from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import FinishReason
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.unit.model_runner.driver import Driver, random_prompt, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
NUM_NEW_TOKENS = 24


def served(sequences: list[Sequence], num_blocks: int, rng: random.Random) -> tuple[dict[str, list[int]], Scheduler]:
    """Tokens of each sequence, which arrive at any step of one engine."""
    decoder = Decoder(CONFIG, dict(WEIGHTS))
    kv_cache = KVCache(CONFIG, num_blocks=num_blocks, block_size=8, dtype=torch.float32, device=torch.device("cpu"))
    runner = ModelRunner(decoder, kv_cache, RunnerConfig(max_num_seqs=6, max_model_len=128, num_threads=1))
    kv_cache.blocks.fill_(torch.nan)
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=128, max_num_seqs=6, max_num_batched_tokens=32), CacheConfig(num_blocks, 8)
    )
    tokens: dict[str, list[int]] = {sequence.seq_id: [] for sequence in sequences}
    arriving = list(sequences)
    while arriving or scheduler.has_work:
        while arriving and (not scheduler.has_work or rng.random() < 0.4):
            scheduler.add(arriving.pop(0))
        output = scheduler.schedule(0.0)
        for result in scheduler.update(output, runner.execute(output), 0.0):
            tokens[result.seq_id].extend(result.new_token_ids)
            assert result.finish_reason in (None, FinishReason.LENGTH)
        invariants.check(scheduler)
    return tokens, scheduler


@pytest.mark.parametrize("seed", range(4))
def test_a_small_pool_preempts_and_changes_no_token(seed: int) -> None:
    """Greedy and drawn sequences, some with a common prefix, some with penalties, give what each gives alone."""
    rng = random.Random(seed)
    prefix = random_prompt(17, CONFIG.vocab_size, rng)
    sequences, expected = [], {}
    for number in range(10):
        prompt = prefix * (number % 2) + random_prompt(rng.randint(1, 40), CONFIG.vocab_size, rng)
        sampling = SamplingParams(
            temperature=[0.0, 1.2][number % 3 == 0],
            max_tokens=NUM_NEW_TOKENS,
            ignore_eos=True,
            presence_penalty=0.5 * (number % 2),
            repetition_penalty=1 + 0.2 * (number % 4 == 3),
        )
        sequences.append(Sequence(f"s{number}", prompt, sampling, seed=number))
        driver = Driver(CONFIG, WEIGHTS)
        alone = driver.add("alone", prompt, sampling, seed=number)
        driver.decode(NUM_NEW_TOKENS)
        expected[f"s{number}"] = alone.drawn
    tokens, scheduler = served(sequences, num_blocks=18, rng=rng)
    assert tokens == expected
    stats = scheduler.stats()
    assert stats.num_preemptions_recompute > 0, "the pool is too large for this test"
    assert stats.prefix_hit_tokens > 0
