"""The same engine offline: prompts in, texts out, in this process, with no Redis.

from worker import LLM, SamplingParams

llm = LLM(model="smollm2")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
    print(output.text)
"""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from model.tokenizer import Tokenizer
from scheduler.beam_intake import why_no_room
from scheduler.output import FinishReason, SequenceStats
from scheduler.sampling_params import SamplingParams
from worker.choices import Choices
from worker.demo_model import DEMO_MODEL_NAME, ensure_demo_model
from worker.dummy_model import find_dummy_model
from worker.engine import EngineRequest
from worker.engine_builder import ProgressCallback, build_engine
from worker.engine_config import EngineConfig
from worker.errors import PagemillError
from worker.generation import Generation

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `error` is set, and the text empty or partial, where `finish_reason` is `error`.

    `logprob` is the sum over its tokens, where the request chooses by it (`best_of`, `beam_width`); `score` is what a
    beam search puts them in order by.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None
    logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt: `choices` holds all `n` answers, and `text` and the rest are those of the first.

    `stats` is what all of them have cost together, and of a beam search how many blocks its beams saved by sharing.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    stats: SequenceStats | None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def error(self) -> str | None:
        """What was wrong, where the first choice failed."""
        return self.choices[0].error


class LLM:
    """An engine and its tokenizer. Not thread-safe.

    model: a folder with config.json and safetensors, a GGUF file, or `smollm2`, which fetches the demo model. With
        load_format dummy a folder with config.json, or a preset such as `Llama-3.1-8B`.
    cache_dir: where the demo model and converted weights are kept; default: the user's cache folder.
    options: the fields of EngineConfig (`block_size`, `num_kv_blocks`, `max_num_seqs`, ...).

    Raises StartupError with one line that says what to do.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL_NAME,
        *,
        cache_dir: str | Path | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> None:
        cache = Path(cache_dir) if cache_dir is not None else _user_cache()
        path = _find(model, options.get("load_format", "auto"), cache, progress)
        config = EngineConfig(model_path=str(path), cache_dir=str(cache), **options)
        self.engine, self.info = build_engine(config, progress=progress)
        self.tokenizer = Tokenizer.from_checkpoint(path, config.load_format)
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of weights and KV cache."""
        del self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete each prompt (text as it stands, or token ids); answers come in the order of the prompts.

        params: one for all prompts, or one for each. Raises ValueError where a prompt is empty, doesn't fit, or the
        numbers of prompts and params differ; then nothing has been computed.
        """
        listed = _as_list(prompts)
        each = self._params_for(listed, params)
        encoded = [
            tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt) for prompt in listed
        ]
        runs = [
            self._run_of(prompt if isinstance(prompt, str) else None, ids, sampling)
            for prompt, ids, sampling in zip(listed, encoded, each, strict=True)
        ]
        return self._run_all(runs)

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer one conversation, rendered by the checkpoint's chat template."""
        ids = tuple(self.tokenizer.encode_chat(messages))
        return self._run_all([self._run_of(None, ids, params or SamplingParams())])[0]

    def _run_of(self, prompt: str | None, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> "_Run":
        generations = [Generation(sampling, self.tokenizer, prompt_ids) for _ in range(sampling.num_sequences)]
        return _Run(prompt, prompt_ids, sampling, Choices(str(next(self._ids)), generations))

    @staticmethod
    def _params_for(
        prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} params: give one for all, or one for each")
        return list(params)

    def _run_all(self, runs: list["_Run"]) -> list[Completion]:
        for run in runs:
            self._check(run)
        by_id = {seq_id: run.choices for run in runs for seq_id in run.choices.seq_ids}
        try:
            for run in runs:
                base = EngineRequest("", run.prompt_ids, run.sampling, secrets.randbits(63))
                for request in run.choices.requests(base):
                    self.engine.add(request)
            while self.engine.has_work:
                for output in self.engine.step():
                    if by_id[output.seq_id].absorb(output):
                        self.engine.abort(output.seq_id)
        except BaseException:
            for seq_id in by_id:  # also on Ctrl-C: the next call starts with a clean engine
                self.engine.abort(seq_id)
            raise
        return [run.completion() for run in runs]

    def _check(self, run: "_Run") -> None:
        if not run.prompt_ids:
            raise ValueError("a prompt is empty: give at least one token")
        if bad := [token_id for token_id in run.prompt_ids if not 0 <= token_id < self.info.vocab_size]:
            raise ValueError(f"a prompt holds token id {bad[0]}: use ids from 0 to {self.info.vocab_size - 1}")
        info, num_prompt, max_tokens = self.info, len(run.prompt_ids), run.sampling.max_tokens
        if num_prompt + (max_tokens or 1) > info.max_sequence_tokens:
            raise ValueError(
                f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} doesn't fit the "
                f"{info.max_sequence_tokens} tokens of context"
            )
        num_tokens = info.max_sequence_tokens if max_tokens is None else num_prompt + max_tokens
        no_room = why_no_room(run.sampling, num_prompt, num_tokens, info.max_num_seqs, info.num_blocks, info.block_size)
        if no_room is not None:
            raise ValueError(no_room)


@dataclass(frozen=True, slots=True)
class _Run:
    """One prompt on its way."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    choices: Choices

    def completion(self) -> Completion:
        """The end result. Raises PagemillError if there is none, which would be a fault of the engine."""
        best = self.choices.best(self.sampling.n)
        found = self.choices.hypotheses
        scores = [hypothesis.score for hypothesis in found] if found else [None] * len(best)
        choices = tuple([_choice_of(generation, score) for generation, score in zip(best, scores, strict=True)])
        return Completion(self.prompt, self.prompt_ids, choices, self.choices.stats)


def _user_cache() -> Path:
    import platformdirs  # an engine with a folder of its own runs without it

    return platformdirs.user_cache_path("pagemill")


def _find(model: str, load_format: str, cache: Path, progress: ProgressCallback | None) -> Path:
    if load_format == "dummy":
        return find_dummy_model(model)
    return ensure_demo_model(cache, progress) if model == DEMO_MODEL_NAME else Path(model)


def _choice_of(generation: Generation, score: float | None) -> Choice:
    if generation.finish_reason is None:
        raise PagemillError("the engine ran out of work before this prompt was finished")
    text = generation.take_text() + generation.take_tail()
    logprob = generation.logprob if generation.sampling.is_told_at_the_end else None
    return Choice(text, tuple(generation.ids), generation.finish_reason, generation.error, logprob, score)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text is one, and so is a sequence of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # the check above says that it is one prompt of ids
    return list(prompts)  # type: ignore[arg-type]
