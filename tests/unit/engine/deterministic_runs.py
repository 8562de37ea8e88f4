"""One sequence among others, in every way that an engine may come to compute it."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler.output import SequenceStats
from scheduler.sampling_params import SamplingParams
from worker.engine import Engine, EngineRequest
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig

TARGET = "target"
NUM_OTHERS = 31
STEPS_BETWEEN_PREEMPTIONS = 5

Outcome = tuple[list[int], SequenceStats]


def target_of(prompt: tuple[int, ...], temperature: float, num_new: int) -> EngineRequest:
    """The sequence whose tokens are compared."""
    sampling = SamplingParams(temperature=temperature, top_p=0.95, max_tokens=num_new, ignore_eos=True)
    return EngineRequest(TARGET, prompt, sampling, seed=11)


def others(num_new: int, vocab_size: int, max_prompt: int) -> list[EngineRequest]:
    """Prompts of all lengths, each with its own way to sample."""
    rng = random.Random(5)
    made = []
    for number in range(NUM_OTHERS):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, max_prompt)))
        sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=num_new, ignore_eos=True)
        made.append(EngineRequest(f"other-{number}", prompt, sampling, seed=number))
    return made


def run(
    engine: Engine, requests: list[EngineRequest], after_step: Callable[[int], None] = lambda step: None
) -> Outcome:
    """Serve all; the target's tokens, and what it has cost."""
    tokens: list[int] = []
    stats = None
    for request in requests:
        engine.add(request)
    step = 0
    while engine.has_work:
        for output in engine.step():
            if output.seq_id == TARGET:
                tokens += output.new_token_ids
                stats = output.stats or stats
        step += 1
        after_step(step)
    assert stats is not None, "the target has not ended"
    return tokens, stats


def all_ways(config: EngineConfig, target: EngineRequest, max_prompt: int) -> dict[str, Outcome]:
    """The target alone, in a batch of 32, behind a cached prefix, swapped and recomputed every few steps."""
    vocab_size = 256
    num_new = target.sampling.max_tokens or 1
    crowd = others(num_new, vocab_size, max_prompt)
    engine = build_engine(config)[0]
    outcomes = {
        "alone": run(engine, [target]),
        # In the middle of the batch, and under a salt of its own, so that nothing of it is found.
        "in a batch of 32": run(engine, [*crowd[:15], replace(target, cache_salt="batch"), *crowd[15:]]),
        "behind a cached prefix": run(engine, [target]),
    }
    del engine
    changes: dict[str, dict[str, Any]] = {
        "swapped": {"preemption_mode": "swap", "num_swap_blocks": config.num_kv_blocks},
        "recomputed": {"preemption_mode": "recompute"},
    }
    for name, change in changes.items():
        engine = build_engine(replace(config, enable_prefix_caching=False, **change))[0]
        outcomes[name] = run(engine, [*crowd[:3], target], preempting(engine))
        del engine
    return outcomes


def preempting(engine: Engine) -> Callable[[int], None]:
    """Preempts the target every few steps. The first of the others leads, so the target never does."""

    def after_step(step: int) -> None:
        if step % STEPS_BETWEEN_PREEMPTIONS == 0:
            engine.scheduler.preempt(TARGET)

    return after_step


def check(outcomes: dict[str, Outcome]) -> None:
    """All ways were gone, and all gave the same tokens."""
    stats = {name: outcome[1] for name, outcome in outcomes.items()}
    assert stats["alone"].num_cached_tokens == stats["in a batch of 32"].num_cached_tokens == 0
    assert stats["behind a cached prefix"].num_cached_tokens > 0
    assert stats["swapped"].swapped_bytes > 0
    assert stats["swapped"].num_recomputed_tokens == 0
    assert stats["recomputed"].num_recomputed_tokens > 0
    tokens, _ = outcomes["alone"]
    for name, outcome in outcomes.items():
        assert outcome[0] == tokens, name
