"""The bench's workload: requests of lognormal lengths, a pure function of shape, seed and salt."""

import math
import random
from dataclasses import dataclass
from typing import Final

# Lengths are cut at so many times their mean: a lone giant would decide the whole run.
MAX_FACTOR: Final = 8


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Lognormal lengths in tokens: the mean, and the standard deviation of the length's logarithm."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request's prompt, and of the reply that is wanted: no fewer, no more."""

    num_prompt: int
    num_output: int

    @property
    def num_slots(self) -> int:
        """KV slots that the request fills in the end: its last token is drawn, but not computed any more."""
        return self.num_prompt + self.num_output - 1


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: token ids, and how many more are to be generated."""

    prompt_ids: tuple[int, ...]
    num_output: int


def draw_lengths(shape: WorkloadShape, num_requests: int, seed: int) -> list[Lengths]:
    """Lengths of the first `num_requests` requests; a longer list begins with the shorter one."""
    generator = random.Random(f"lengths {seed}")
    return [
        Lengths(
            _draw(generator, shape.prompt_mean, shape.prompt_sigma),
            _draw(generator, shape.output_mean, shape.output_sigma),
        )
        for _ in range(num_requests)
    ]


def make_requests(
    lengths: list[Lengths], *, vocab_size: int, seed: int, salt: str, num_shared: int = 0
) -> list[BenchRequest]:
    """Requests of these lengths, with random ids; the first `num_shared` of each prompt, as far as it goes, are alike.

    Another salt gives other ids of the same lengths, so that no run finds the prompts of an earlier one in a cache.
    """
    shared = _ids(f"shared ids {seed} {salt}", num_shared, vocab_size)
    requests = []
    for index, each in enumerate(lengths):
        own = _ids(f"ids {seed} {salt} {index}", each.num_prompt, vocab_size)
        prompt_ids = (*shared, *own[num_shared:])[: each.num_prompt]
        requests.append(BenchRequest(prompt_ids, each.num_output))
    return requests


def _ids(name: str, count: int, vocab_size: int) -> tuple[int, ...]:
    generator = random.Random(name)
    return tuple(generator.randrange(vocab_size) for _ in range(count))


def warm_up_lengths(lengths: list[Lengths]) -> list[Lengths]:
    """A few short requests like the first ones: they bring code and memory in, and cost little."""
    return [Lengths(min(each.num_prompt, 32), min(each.num_output, 4)) for each in lengths[:8]]


def _draw(generator: random.Random, mean: float, sigma: float) -> int:
    # A lognormal's mean is exp(mu + sigma^2 / 2).
    value = generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(round(value), round(MAX_FACTOR * mean)))
