"""The offline API: the same engine, without Redis."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.decoder import Decoder
from model.model_runner import ModelRunner
from model.sampler import Sampler
from model.step_inputs import SamplingRows
from scheduler.errors import InvalidSamplingParamsError
from scheduler.family import choice_seed
from scheduler.output import FinishReason
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker import LLM, SamplingParams
from worker.errors import StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    with LLM(str(folder), num_kv_blocks=32, max_num_seqs=8, num_threads=1, check_invariants="step") as made:
        yield made


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {i}" * (i + 1) for i in range(12)]
    together = llm.generate(prompts, GREEDY)
    assert [completion.prompt for completion in together] == prompts
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert completion.token_ids == alone.token_ids
        assert completion.text == alone.text == llm.tokenizer.decode(alone.token_ids)
        assert completion.finish_reason is FinishReason.LENGTH


def test_a_prompt_can_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the same")
    (by_ids,) = llm.generate(ids, GREEDY)
    (by_text,) = llm.generate("the same", GREEDY)
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.prompt is None


def test_each_prompt_can_have_its_own_params(llm: LLM) -> None:
    lengths = [1, 5, 9]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(c.token_ids) for c in llm.generate(["a", "b", "c"], params)] == lengths
    with pytest.raises(ValueError, match="3 prompts and 2 params"):
        llm.generate(["a", "b", "c"], params[:2])


def test_a_stop_string_cuts_the_text_and_ends_the_sequence(llm: LLM) -> None:
    (free,) = llm.generate("where to stop", GREEDY)
    stop = next(char for char in free.text[2:] if char.isascii())
    (cut,) = llm.generate("where to stop", SamplingParams(temperature=0, max_tokens=24, stop=(stop,), ignore_eos=True))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.token_ids) <= len(free.token_ids)
    assert not llm.engine.has_work


def test_a_seed_repeats_and_no_seed_does_not(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1.2, max_tokens=24, seed=5, ignore_eos=True)
    first, second = llm.generate(["x", "x"], seeded)
    assert first.token_ids == second.token_ids
    free = SamplingParams(temperature=1.2, max_tokens=24, ignore_eos=True)
    one, other = llm.generate(["x", "x"], free)
    assert one.token_ids != other.token_ids


def test_a_chat_is_rendered_by_the_checkpoints_template(llm: LLM) -> None:
    completion = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    written_out = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_token_ids == tuple(llm.tokenizer.encode(written_out))


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([5, 320], GREEDY, "320"),
        ([1] * 600, GREEDY, "doesn't fit"),
        ("a", SamplingParams(max_tokens=5000), "doesn't fit"),
    ],
)
def test_what_can_not_run_is_refused_before_anything_runs(
    llm: LLM, prompt: str | list[int], params: SamplingParams, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(["fine", prompt], params)
    assert not llm.engine.has_work


def test_a_missing_model_says_so_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_choices_of_a_greedy_prompt_are_all_what_one_is(llm: LLM) -> None:
    (alone,) = llm.generate("one prompt, four answers", GREEDY)
    (four,) = llm.generate("one prompt, four answers", replace(GREEDY, n=4))
    assert [choice.token_ids for choice in four.choices] == [alone.token_ids] * 4
    assert [choice.text for choice in four.choices] == [alone.text] * 4
    assert four.text == alone.text
    assert four.stats is not None
    assert (four.stats.num_prompt_tokens, four.stats.num_generated_tokens) == (24, 4 * 24)


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17, 40])
def test_seeded_choices_are_those_of_single_runs_with_the_seeds_that_follow(llm: LLM, num_prompt_tokens: int) -> None:
    prompt = list(range(1, num_prompt_tokens + 1))
    params = SamplingParams(temperature=1.3, max_tokens=24, seed=11, ignore_eos=True)
    num_forks = llm.engine.stats().num_forks
    (four,) = llm.generate(prompt, replace(params, n=4))
    assert llm.engine.stats().num_forks == num_forks + 3
    singles = [llm.generate(prompt, replace(params, seed=choice_seed(11, index)))[0] for index in range(4)]
    assert [choice.token_ids for choice in four.choices] == [single.token_ids for single in singles]
    assert len({choice.token_ids for choice in four.choices}) == 4
    assert singles[0].token_ids == llm.generate(prompt, params)[0].token_ids


def test_choices_under_pressure_are_the_same(llm: LLM) -> None:
    """Families that don't fit the pool of 32 blocks together are preempted, and fork again."""
    prompts = [list(range(at, at + 60)) for at in (1, 70, 140)]
    params = SamplingParams(temperature=1.3, max_tokens=60, seed=3, ignore_eos=True)
    num_preempted = llm.engine.stats().num_preemptions_recompute
    together = llm.generate(prompts, replace(params, n=6))
    assert llm.engine.stats().num_preemptions_recompute > num_preempted
    for prompt, completion in zip(prompts, together, strict=True):
        for index in (0, 5):
            (single,) = llm.generate(prompt, replace(params, seed=choice_seed(3, index)))
            assert completion.choices[index].token_ids == single.token_ids
    assert llm.engine.stats().num_saved_blocks == 0


def test_choices_that_are_swapped_are_the_same(llm: LLM, tmp_path: Path) -> None:
    """Without a prefix cache, so that only forks share; with a CPU tier, so that nothing is computed twice."""
    folder = write_tiny_checkpoint(tmp_path)
    options: dict[str, Any] = {"num_kv_blocks": 32, "max_num_seqs": 8, "num_threads": 1, "check_invariants": "step"}
    options |= {"num_swap_blocks": 200, "preemption_mode": "swap", "enable_prefix_caching": False}
    prompts = [list(range(at, at + 60)) for at in (1, 70)]
    params = SamplingParams(temperature=1.3, max_tokens=60, seed=3, ignore_eos=True, n=6)
    with LLM(str(folder), **options) as swapping:
        swapped = swapping.generate(prompts, params)
        stats = swapping.engine.stats()
    assert stats.num_preemptions_swap > 0
    assert stats.num_forks > 0
    assert stats.num_recomputed_tokens == 0
    plain = llm.generate(prompts, params)
    for ours, theirs in zip(swapped, plain, strict=True):
        assert [choice.token_ids for choice in ours.choices] == [choice.token_ids for choice in theirs.choices]


def test_a_stop_string_ends_one_choice_and_leaves_the_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.3, max_tokens=24, seed=5, ignore_eos=True, n=3)
    (free,) = llm.generate("where to stop", params)
    second = free.choices[1].text
    stop = next(
        second[i : i + 2] for i in range(1, 20) if all(second[i : i + 2] not in free.choices[k].text for k in (0, 2))
    )
    (cut,) = llm.generate("where to stop", replace(params, stop=(stop,)))
    assert cut.choices[1].text == second[: second.index(stop)]
    assert [cut.choices[k].text for k in (0, 2)] == [free.choices[k].text for k in (0, 2)]
    assert [choice.finish_reason.value for choice in cut.choices] == ["length", "stop", "length"]


class ListeningSampler:
    """Draws as the sampler of the runner does, and sums what each token's logits say of it, in a way of its own."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.total = 0.0

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        ids = self.sampler(logits, rows)
        chances = logits[:, : self.sampler.vocab_limit].double().softmax(dim=1)
        self.total += sum(math.log(chances[row, token_id]) for row, token_id in enumerate(ids.tolist()))
        return ids


def test_best_of_returns_the_choices_of_the_largest_log_probability_best_first(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=10, ignore_eos=True)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    singles = []
    for index in range(6):
        with monkeypatch.context() as patch:
            listening = ListeningSampler(runner._sampler)
            patch.setattr(runner, "_sampler", listening)
            (single,) = llm.generate("which is best", replace(params, seed=choice_seed(10, index)))
        singles.append((listening.total, single.token_ids))
    expected = [token_ids for _, token_ids in sorted(singles, reverse=True)]
    assert expected != [token_ids for _, token_ids in singles]
    (best,) = llm.generate("which is best", replace(params, n=2, best_of=6))
    assert [choice.token_ids for choice in best.choices] == expected[:2]
    assert best.stats is not None
    assert best.stats.num_generated_tokens == 6 * 12


def test_best_of_as_many_as_are_returned_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=9, ignore_eos=True, n=3)
    (free,), (same,) = llm.generate("same", params), llm.generate("same", replace(params, best_of=3))
    assert [choice.token_ids for choice in same.choices] == [choice.token_ids for choice in free.choices]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"n": 0}, "n is 0"), ({"n": 17}, "from 1 to 16"), ({"n": 3, "best_of": 2}, "from n, which is 3, to 16")],
)
def test_numbers_of_choices_out_of_range_are_refused(fields: dict[str, int], words: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=words):
        SamplingParams(**fields)  # type: ignore[arg-type]  # a mix of fields, all whole numbers


BEAMS = SamplingParams(beam_width=4, n=3, max_tokens=20, ignore_eos=True)


def test_beam_search_returns_the_n_best_with_their_log_probabilities(llm: LLM) -> None:
    prompts = ["which is likeliest", "and of this"]
    for prompt, completion in zip(prompts, llm.generate(prompts, BEAMS), strict=True):
        choices = completion.choices
        assert len({choice.token_ids for choice in choices}) == 3
        assert all(choice.text == llm.tokenizer.decode(choice.token_ids) for choice in choices)
        scores = [choice.score for choice in choices]
        assert scores == sorted(scores, key=lambda score: -(score or 0.0))
        for choice in choices:
            assert choice.logprob is not None
            assert choice.score == pytest.approx(choice.logprob / 20)
        (greedy,) = llm.generate(prompt, replace(GREEDY, max_tokens=20, best_of=2))
        assert greedy.choices[0].logprob is not None
        assert choices[0].logprob is not None
        assert choices[0].logprob >= greedy.choices[0].logprob - 1e-6


def test_four_beams_of_a_long_prompt_take_little_more_than_one_sequence(llm: LLM) -> None:
    """Of 15 blocks of a prompt and 2 of a reply four sequences would take 68; beams share all but the reply's."""
    prompt = list(range(40, 240)) + list(range(40, 80))
    (completion,) = llm.generate([prompt], replace(BEAMS, max_tokens=32))
    assert completion.stats is not None
    assert 3 * 15 <= completion.stats.num_saved_blocks <= 3 * 17
    assert llm.engine.stats().num_saved_blocks == 0


def test_a_stop_token_ends_a_hypothesis_and_is_no_part_of_its_text(llm: LLM) -> None:
    (free,) = llm.generate("where to stop", BEAMS)
    stop = free.choices[0].token_ids[4]
    (cut,) = llm.generate("where to stop", replace(BEAMS, stop_token_ids=(stop,), length_penalty=-5.0))
    first = cut.choices[0]
    assert first.finish_reason is FinishReason.STOP
    assert first.token_ids[-1] == stop
    assert first.text == llm.tokenizer.decode(first.token_ids[:-1])
    assert cut.choices[0].token_ids.count(stop) == 1


def test_beams_whose_step_is_split_for_want_of_memory_find_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = llm.generate("what is likeliest", BEAMS)
    num_splits, hidden, limit = llm.engine.stats().num_step_splits, Decoder.hidden, 3

    def short_of_memory(self: Decoder, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(input_ids) > limit:
            raise torch.OutOfMemoryError(f"no memory for {len(input_ids)} tokens")
        return hidden(self, input_ids, *rest)

    monkeypatch.setattr(Decoder, "hidden", short_of_memory)
    (parts,) = llm.generate("what is likeliest", BEAMS)
    assert [choice.token_ids for choice in parts.choices] == [choice.token_ids for choice in whole.choices]
    assert llm.engine.stats().num_step_splits > num_splits
    limit = 0
    (failed,) = llm.generate("and of this", BEAMS)
    (only,) = failed.choices
    assert only.finish_reason is FinishReason.ERROR
    assert "out of memory" in (only.error or "")
    assert not llm.engine.has_work


def test_beams_that_never_fit_are_refused_with_numbers_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"4 beams of 5 prompt tokens and up to 200 more may hold 52 blocks .* has 32"):
        llm.generate([[1, 2, 3, 4, 5]], replace(BEAMS, max_tokens=200))
    with pytest.raises(ValueError, match="beam_width is 16, but at most 8 sequences run at once"):
        llm.generate("x", replace(BEAMS, beam_width=16))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"beam_width": 0}, "from 1 .no beam search. to 16"),
        ({"beam_width": 17}, "from 1 .no beam search. to 16"),
        ({"beam_width": 2, "n": 3}, "use an n up to beam_width"),
        ({"beam_width": 3, "best_of": 3}, "leave one of them out"),
        ({"beam_width": 3, "stop": ("x",)}, "use stop_token_ids"),
        ({"length_penalty": math.nan}, "length_penalty is nan"),
        ({"early_stopping": "always"}, "use true, false or never"),
    ],
)
def test_what_beam_search_can_not_do_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=words):
        SamplingParams(**fields)
