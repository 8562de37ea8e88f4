"""Steps that overlap on a real engine: the tokens are those of one step after the other, whatever happens meanwhile."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from model.decoder import Decoder
from model.layers import ForwardContext
from model.model_runner import ModelRunner
from scheduler.lookahead import Wait
from scheduler.output import FinishReason, ModelRunnerOutput, SchedulerOutput, SequenceOutput
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine import Engine, EngineRequest
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig
from worker.step_pipeline import ThreadedRunner

# On a thread of its own each step begins when the outcome of the one before is known; queued, it doesn't wait for it.
WAYS = ["on a thread", "queued"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Blocks for three or four of eight sequences, and prompts in pieces."""
    return EngineConfig(
        str(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))),
        block_size=8,
        max_model_len=128,
        num_kv_blocks=16,
        num_swap_blocks=80,
        preemption_mode="swap",
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_threads=1,
        check_invariants="step",
    )


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    """Greedy and drawn ones that end at their limit, by a token or at once; some begin alike."""
    rng = random.Random(8)
    common = [rng.randrange(256) for _ in range(20)]
    made = []
    for number in range(16):
        prompt = common * (number % 2) + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            temperature=[0.0, 0.8, 1.0][number % 3],
            top_k=[0, 20][number % 2],
            top_p=[1.0, 0.9][number % 5 == 0],
            max_tokens=[1, 40, 50, 60][number % 4],
            stop_token_ids=tuple(range(0, 256, 40)) if number % 4 == 3 else (),
            ignore_eos=True,
        )
        made.append(EngineRequest(f"r{number}", tuple(prompt), sampling, seed=number, priority=number % 3))
    return made


Tokens = dict[str, list[int]]


def overlapping(config: EngineConfig, way: str) -> Engine:
    engine = build_engine(replace(config, overlap_scheduling=False))[0]
    assert isinstance(engine.runner, ModelRunner)
    runner = ThreadedRunner(engine.runner) if way == "on a thread" else engine.runner
    return Engine(engine.scheduler, engine.runner, check_invariants="step", overlapping=runner)


def served(
    engine: Engine, requests: list[EngineRequest], after_step: Callable[[], None] = lambda: None
) -> tuple[Tokens, dict[str, SequenceOutput]]:
    """The tokens of each request, and the last that was told of it."""
    for request in requests:
        engine.add(request)
    tokens: Tokens = {request.seq_id: [] for request in requests}
    ends: dict[str, SequenceOutput] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.seq_id not in ends, f"{output} comes after the end"
            tokens[output.seq_id] += output.new_token_ids
            if output.finish_reason is not None:
                ends[output.seq_id] = output
        after_step()
    assert engine.in_flight_ids == ()
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    return tokens, ends


def reasons(ends: dict[str, SequenceOutput]) -> dict[str, FinishReason | None]:
    return {seq_id: end.finish_reason for seq_id, end in ends.items()}


@pytest.fixture(scope="module")
def one_by_one(config: EngineConfig, requests: list[EngineRequest]) -> tuple[Tokens, dict[str, SequenceOutput]]:
    """What each request gives with one step after the other, and a KV cache for all."""
    config = replace(config, num_kv_blocks=128, num_swap_blocks=0, preemption_mode="auto")
    tokens, ends = served(build_engine(config)[0], requests)
    assert set(reasons(ends).values()) == {FinishReason.LENGTH, FinishReason.STOP}
    return tokens, ends


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_overlapping_changes_no_token_with_too_few_blocks(
    config: EngineConfig,
    requests: list[EngineRequest],
    one_by_one: tuple[Tokens, dict[str, SequenceOutput]],
    way: str,
    is_caching: bool,
    mode: str,
) -> None:
    engine = overlapping(replace(config, preemption_mode=mode, enable_prefix_caching=is_caching), way)
    tokens, ends = served(engine, requests)
    assert tokens == one_by_one[0]
    assert reasons(ends) == reasons(one_by_one[1])
    stats, waits = engine.stats(), engine.scheduler.lookahead.num_waits
    assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
    assert 0 < waits[Wait.BLOCKS] < engine.times.num_steps // 2
    assert all(end.stats and end.stats.num_generated_tokens == len(tokens[name]) for name, end in ends.items())


@pytest.mark.parametrize("way", WAYS)
def test_aborts_in_flight_disturb_nobody(
    config: EngineConfig, requests: list[EngineRequest], one_by_one: tuple[Tokens, object], way: str
) -> None:
    """The id of one that was aborted comes again at once, while the step that computes it is in flight."""
    rng, engine, expected = random.Random(2), overlapping(config, way), one_by_one[0]
    aborted: set[str] = set()
    by_id = {request.seq_id: request for request in requests}

    def abort_one() -> None:
        in_flight = [seq_id for seq_id in engine.in_flight_ids if seq_id not in aborted]
        if in_flight and rng.random() < 0.2 and len(aborted) < 8:
            seq_id = rng.choice(in_flight)
            if engine.abort(seq_id):
                aborted.add(seq_id)
                engine.add(replace(by_id[seq_id], seq_id=seq_id, prompt_ids=by_id["r2"].prompt_ids[:5]))

    tokens, _ = served(engine, requests, abort_one)
    assert len(aborted) > 3
    assert {name: made for name, made in tokens.items() if name not in aborted} == {
        name: made for name, made in expected.items() if name not in aborted
    }


@pytest.mark.parametrize("way", WAYS)
def test_choices_and_beam_searches_wait_for_each_outcome_and_find_the_same(config: EngineConfig, way: str) -> None:
    config = replace(config, num_kv_blocks=100)
    forked = SamplingParams(n=3, best_of=4, temperature=1.0, max_tokens=12, ignore_eos=True)
    prompt = tuple(range(5, 40))
    beams = SamplingParams(beam_width=3, n=2, max_tokens=10, ignore_eos=True)
    family = [
        EngineRequest(f"choice-{index}", prompt, forked, seed=index, family="choices")
        for index in range(forked.num_sequences)
    ]
    alone = EngineRequest("alone", prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), seed=1)
    requests = [*family, EngineRequest("beams", prompt, beams, seed=3), alone]
    expected, ends = served(build_engine(config)[0], requests)
    engine = overlapping(config, way)
    tokens, found = served(engine, requests)
    assert tokens == expected
    assert found["beams"].hypotheses == ends["beams"].hypotheses
    waits = engine.scheduler.lookahead.num_waits
    assert waits[Wait.FAMILY] + waits[Wait.BEAMS] >= 9
    assert sum(waits.values()) < engine.times.num_steps - 20


class Disturbed:
    """Stands before a decoder: runs out of memory above `max_tokens` tokens, and gives no number after `poison`."""

    def __init__(self, decoder: Decoder, max_tokens: int, poison: int) -> None:
        self._decoder = decoder
        self._max_tokens = max_tokens
        self._poison = poison
        self.cos_sin = decoder.cos_sin
        self.logits = decoder.logits

    def hidden(
        self, input_ids: torch.Tensor, context: ForwardContext, logits_rows: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = self._decoder.hidden(input_ids, context, logits_rows)
        if len(input_ids) > self._max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        rows = input_ids if logits_rows is None else input_ids[logits_rows]
        hidden[rows == self._poison] = torch.nan
        return hidden


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_is_split_and_a_row_without_a_number_end_as_with_one_step_after_the_other(
    config: EngineConfig, requests: list[EngineRequest], one_by_one: tuple[Tokens, object], way: str
) -> None:
    """The poison is a token that some draw: in the next step, which is in flight when they do, they fail."""
    config = replace(config, num_kv_blocks=128)
    drawn = [token for made in one_by_one[0].values() for token in made[3:-1]]
    poison = max(set(drawn), key=drawn.count)

    def disturbed(engine: Engine) -> tuple[Tokens, dict[str, SequenceOutput]]:
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        disturbed = Disturbed(runner._decoder, 4, poison)
        runner._decoder = runner._forward.decoder = disturbed  # type: ignore[assignment]
        return served(engine, requests)

    expected, ends = disturbed(build_engine(config)[0])
    assert FinishReason.ERROR in reasons(ends).values()
    engine = overlapping(config, way)
    tokens, found = disturbed(engine)
    assert tokens == expected
    assert {name: (end.finish_reason, end.error) for name, end in found.items()} == {
        name: (end.finish_reason, end.error) for name, end in ends.items()
    }
    assert engine.stats().num_step_splits > 0


@pytest.mark.parametrize("way", WAYS)
def test_what_breaks_a_step_comes_out_of_the_engine_while_the_next_is_decided(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    engine = overlapping(config, way)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    launch, steps = runner.launch, []

    def launch_until_it_breaks(output: SchedulerOutput) -> object:
        steps.append(output.step)
        if len(steps) == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(output)

    monkeypatch.setattr(runner, "launch", launch_until_it_breaks)
    engine.add(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True), seed=0))
    told: list[int] = []

    def run() -> None:
        while engine.has_work:
            told.extend(token for output in engine.step() for token in output.new_token_ids)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run()
    assert len(told) in (2, 3), "what was told before is what was computed before"


def test_the_next_step_is_decided_while_the_first_is_computed(config: EngineConfig) -> None:
    """The runner ends no step before the scheduler has the next one."""
    built = build_engine(replace(config, num_kv_blocks=128))[0]
    decided = threading.Event()

    class Waiting:
        last_forward_s = 0.0

        def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
            if output.step == 1:
                assert decided.wait(30), "nobody decides the next step"
            return built.runner.execute(output)

    scheduler = built.scheduler
    schedule_ahead = scheduler.try_schedule_ahead

    def schedule_and_tell(now: float) -> SchedulerOutput | None:
        output = schedule_ahead(now)
        decided.set()
        return output

    scheduler.try_schedule_ahead = schedule_and_tell  # type: ignore[method-assign]
    engine = Engine(scheduler, built.runner, check_invariants="step", overlapping=ThreadedRunner(Waiting()))
    tokens, _ = served(engine, [EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True), seed=0)])
    assert len(tokens["a"]) == 4


def test_the_switch_turns_it_on_and_off_and_the_cpu_has_it_off_by_default(config: EngineConfig) -> None:
    on, off, default = (build_engine(replace(config, overlap_scheduling=is_on))[0] for is_on in (True, False, None))
    request = EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True), seed=0)
    for engine, expected in ((on, ("a",)), (off, ()), (default, ())):
        engine.add(request)
        engine.step()
        assert engine.in_flight_ids == expected
        while engine.has_work:
            engine.step()
