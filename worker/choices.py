"""The choices of one request: as many sequences of the engine, which share the prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduler.family import choice_seed
from scheduler.output import Hypothesis, SequenceOutput, SequenceStats
from worker.engine import EngineRequest
from worker.generation import Generation


class Choices:
    """What the sequences of one request have brought so far, by index.

    A request of one choice is a sequence under the request's own name; those of several are called `NAME#INDEX`, and
    make a family in the engine. A beam search is one sequence there, whose hypotheses are the choices here.
    """

    def __init__(self, seq_id: str, generations: Sequence[Generation]) -> None:
        self.generations = tuple(generations)
        self._is_beam_search = self.generations[0].sampling.is_beam_search
        # What a beam search has found, the best first; its choices are those.
        self.hypotheses: tuple[Hypothesis, ...] = ()
        self.rename(seq_id)

    def rename(self, seq_id: str) -> None:
        """Go by another name in the engine from now on: what it still brings under the former one is not meant."""
        is_single = len(self.generations) == 1 or self._is_beam_search
        self._family = "" if is_single else seq_id
        self.seq_ids = (seq_id,) if is_single else tuple(f"{seq_id}#{index}" for index in range(len(self.generations)))

    def __len__(self) -> int:
        return len(self.generations)

    def __getitem__(self, index: int) -> Generation:
        return self.generations[index]

    def index_of(self, seq_id: str) -> int:
        """Which choice the engine's sequence is."""
        return self.seq_ids.index(seq_id)

    def requests(self, base: EngineRequest) -> list[EngineRequest]:
        """What the engine is asked for the choices that have not ended; `base` has what they have in common.

        `base.seed` is the request's; each choice's own follows from it.
        """
        seed = base.seed if base.sampling.seed is None else base.sampling.seed
        return [
            replace(
                base,
                seq_id=seq_id,
                sampling=replace(base.sampling, seed=choice_seed(seed, index)),
                seed=choice_seed(seed, index),
                generated_ids=tuple(generation.ids),
                family=self._family,
            )
            for index, (seq_id, generation) in enumerate(self._of_engine())
            if not generation.is_finished
        ]

    @property
    def unfinished_ids(self) -> list[str]:
        """The engine's names for those that have not ended."""
        return [seq_id for seq_id, generation in self._of_engine() if not generation.is_finished]

    def _of_engine(self) -> Iterator[tuple[str, Generation]]:
        """Each sequence of the engine, and its choice; of a beam search, the first of its choices."""
        return zip(self.seq_ids, self.generations, strict=not self._is_beam_search)

    def absorb(self, output: SequenceOutput) -> bool:
        """Take in what a step brought of one sequence. True if a stop string has ended it: the engine must be told."""
        if not output.hypotheses:
            if self._is_beam_search and output.finish_reason is not None:
                self.generations = self.generations[:1]  # it has failed, and once is enough to say so
            return self[self.index_of(output.seq_id)].absorb(output)
        # There are fewer than were asked for only where the vocabulary has not as many replies.
        self.hypotheses, self.generations = output.hypotheses, self.generations[: len(output.hypotheses)]
        stats = output.stats
        for generation, found in zip(self.generations, output.hypotheses, strict=True):
            one = SequenceOutput(
                output.seq_id, found.token_ids, found.finish_reason, stats=stats, logprob=found.logprob
            )
            generation.absorb(one)
            stats = None  # what they have cost is told once
        return False

    @property
    def is_finished(self) -> bool:
        """Whether all have ended."""
        return all(generation.is_finished for generation in self.generations)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices together."""
        return sum(len(generation.ids) for generation in self.generations)

    def best(self, num: int) -> list[Generation]:
        """The answer, once all have ended: all in their order, or the `num` of the largest log probability.

        Those of a beam search are in the order of their scores.

        Of equals the earlier choice is the better one.
        """
        if num >= len(self.generations) or self._is_beam_search:
            return list(self.generations)
        return sorted(self.generations, key=lambda generation: -generation.logprob)[:num]

    @property
    def stats(self) -> SequenceStats | None:
        """What all have cost together, of those that the engine has ended; None where it has ended none."""
        known = [generation.stats for generation in self.generations if generation.stats is not None]
        return merged(known) if known else None


def merged(stats: Sequence[SequenceStats]) -> SequenceStats:
    """The costs of sequences of one prompt, which counts once, as does what the prefix cache had of it."""
    if len(stats) == 1:
        return stats[0]
    scheduled = [each.first_scheduled_s for each in stats if each.first_scheduled_s is not None]
    first = [each.first_token_s for each in stats if each.first_token_s is not None]
    return SequenceStats(
        num_prompt_tokens=stats[0].num_prompt_tokens,
        num_generated_tokens=sum(each.num_generated_tokens for each in stats),
        num_cached_tokens=stats[0].num_cached_tokens,
        num_preemptions=sum(each.num_preemptions for each in stats),
        num_recomputed_tokens=sum(each.num_recomputed_tokens for each in stats),
        swapped_bytes=sum(each.swapped_bytes for each in stats),
        arrival_s=min(each.arrival_s for each in stats),
        first_scheduled_s=min(scheduled, default=None),
        first_token_s=min(first, default=None),
        finished_s=max(each.finished_s for each in stats),
        num_saved_blocks=max(each.num_saved_blocks for each in stats),
    )
