"""Draws the next token of each row: one vectorised pass, whatever each row asks for."""

import torch

from kernels.penalties import apply_penalties
from kernels.sampling import sample
from kernels.top_logprobs import top_logprobs
from model.step_inputs import SamplingRows
from scheduler.output import Candidate


class Sampler:
    """`vocab_limit` is how many ids the tokenizer knows: the padding rows of an embedding are never drawn."""

    def __init__(self, vocab_limit: int) -> None:
        self.vocab_limit = vocab_limit

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """int64 [num_rows] token ids from logits [num_rows, vocab_size]; -1 where no logit is a finite number.

        The logits stay as they are: penalties change a copy.
        """
        if rows.penalties is not None:
            logits = logits.to(torch.float32, copy=True)
            apply_penalties(logits, rows.penalties)
        return sample(
            *(logits, rows.temperature, rows.top_k, rows.top_p, rows.seeds, rows.positions),
            vocab_limit=self.vocab_limit,
            min_p=rows.min_p,
        )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float64 [num_rows]: log probability of ids [num_rows] by raw logits [num_rows, vocab_size].

        Temperature, top-k and top-p have no part in it, so it compares texts whatever they were drawn with. Meaningless
        where the id is -1.
        """
        usable = logits[:, : self.vocab_limit].double()
        chosen = usable.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
        return chosen - usable.logsumexp(dim=1)

    def candidates(self, logits: torch.Tensor, num: int) -> list[tuple[Candidate, ...]]:
        """The `num` likeliest tokens of each row of logits [num_rows, vocab_size], fewer where there are no more."""
        values, ids = top_logprobs(logits.float(), num, self.vocab_limit)
        return [
            tuple([Candidate(*each) for each in zip(*row, strict=True) if each[0] >= 0])
            for row in zip(ids.tolist(), values.tolist(), strict=True)
        ]
