"""The jobs of a run, and what each must answer: known beforehand, without any queue."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from model.tokenizer import Tokenizer
from scheduler.sampling_params import SamplingParams
from tests.faults.history import Expected
from tests.unit.scheduler.fake_runner import generate
from worker.streams.keys import LANES

WORDS = ("a", "slow", "river", "carries", "small", "boats", "past", "the", "quiet", "town", "where", "nobody", "sleeps")
# How many of a hundred jobs are of which kind. All are greedy.
KINDS = {"plain": 56, "stop": 10, "unstreamed": 10, "choices": 7, "chunked": 7, "cancelled": 8, "poison": 2}
# What poison does to its engine: see `poison`.
DEEDS = ("engine", "abort", "exit", "error")
# Tokens of a reply: long enough that a fault finds it half done.
MIN_TOKENS, MAX_TOKENS = 16, 100
MAX_CANCEL_S = 1.5

Answer = tuple[tuple[int, ...], str]
"""Greedy ids, and their text."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as a client sends it. `cancel_after_s`: the client calls it off so long after the XADD; None: never."""

    job_id: str
    lane: str
    prompt: str
    expected: Expected
    fields: dict[str, Any] = field(default_factory=dict)
    cancel_after_s: float | None = None


class Oracle(Protocol):
    """Knows what the model answers, and whether it can be made to kill its engine."""

    can_kill: bool

    def answer(self, prompts: Sequence[tuple[str, int]]) -> list[Answer]:
        """To each prompt the given number of tokens; an end of sequence is a token like any other."""
        ...


class ScriptedOracle:
    """Of the made-up model. `model` is the folder whose tokenizer the workers use."""

    can_kill = True

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_checkpoint(model)

    def answer(self, prompts: Sequence[tuple[str, int]]) -> list[Answer]:
        """Computed on its own."""
        ids = [tuple(generate("", self._tokenizer.encode(prompt), num_tokens)) for prompt, num_tokens in prompts]
        return [(some, self._tokenizer.decode(some)) for some in ids]


class RealOracle:
    """Of a checkpoint: the same engine offline, which nobody disturbs."""

    can_kill = False

    def __init__(self, model: Path) -> None:
        self._model = model

    def answer(self, prompts: Sequence[tuple[str, int]]) -> list[Answer]:
        """One engine for all prompts."""
        from worker.llm import LLM

        params = [SamplingParams(temperature=0, max_tokens=number, ignore_eos=True) for _, number in prompts]
        with LLM(str(self._model), num_kv_blocks=256, max_num_seqs=16, num_threads=1) as llm:
            answers = llm.generate([prompt for prompt, _ in prompts], params)
        return [(answer.token_ids, answer.text) for answer in answers]


def make_jobs(rng: random.Random, oracle: Oracle, num_jobs: int, prefix: str) -> list[Job]:
    """`num_jobs` jobs of all kinds, with ids that begin with `prefix`."""
    prompts = [
        (" ".join(rng.choices(WORDS, k=rng.randint(1, 12))), rng.randint(MIN_TOKENS, MAX_TOKENS))
        for _ in range(num_jobs)
    ]
    answers = oracle.answer(prompts)
    weights = {kind: weight for kind, weight in KINDS.items() if kind != "poison" or oracle.can_kill}
    kinds = rng.choices(list(weights), list(weights.values()), k=num_jobs)
    return [
        _make_job(rng, f"{prefix}-{number}", kinds[number], prompt, answers[number])
        for number, (prompt, _) in enumerate(prompts)
    ]


def _clear_words(answer: Answer) -> list[str]:
    """Three characters in a row that are known as soon as their last token is.

    None where a token is no character; and a byte that begins none is known as that only by the token after it.
    """
    ids, text = answer
    words = [text[start : start + 3] for start in range(len(text) - 2)] if len(text) == len(ids) else []
    return [word for word in words if "\N{REPLACEMENT CHARACTER}" not in word]


def _make_job(rng: random.Random, name: str, kind: str, prompt: str, answer: Answer) -> Job:
    ids, text = answer
    job_id, lane = f"{name}-{kind}", rng.choice(LANES)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": len(ids), "ignore_eos": 1}
    expected = Expected(ids, text)
    cancel_after_s = None
    match kind:
        case "stop" if words := _clear_words(answer):
            word = rng.choice(words)
            start = text.index(word)
            fields["stop"] = word
            expected = Expected(ids[: start + 3], text[:start], "stop")
        case "unstreamed":
            fields["stream"] = 0
        case "choices":
            fields["n"] = 2
            expected = Expected(ids, text, num_choices=2)
        case "chunked":
            fields["chunk_ms"] = 150
        case "poison":
            job_id = f"{name}-{rng.choice(DEEDS)}-at-{rng.randrange(len(ids))}"
            expected = Expected(ids, text, error="poison")
        case "cancelled":
            cancel_after_s = rng.uniform(0, MAX_CANCEL_S)
    return Job(job_id, lane, prompt, expected, fields, cancel_after_s)
