"""The offline API: the same engine, without Redis."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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
