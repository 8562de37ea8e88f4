"""Draws the next token of each row: one vectorised pass, whatever each row asks for."""

import torch

from kernels.sampling import sample
from model.input_batch import SamplingRows


class Sampler:
    """`vocab_limit` is how many ids the tokenizer knows: the padding rows of an embedding are never drawn."""

    def __init__(self, vocab_limit: int) -> None:
        self.vocab_limit = vocab_limit

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """int64 [num_rows] token ids from logits [num_rows, vocab_size]; -1 where no logit is a finite number."""
        return sample(
            logits.float(), rows.temperature, rows.top_k, rows.top_p, rows.seeds, rows.positions, self.vocab_limit
        )

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float64 [num_rows]: log probability of ids [num_rows] by raw logits [num_rows, vocab_size].

        Temperature, top-k and top-p have no part in it, so it compares texts whatever they were drawn with. Meaningless
        where the id is -1.
        """
        usable = logits[:, : self.vocab_limit].double()
        chosen = usable.gather(1, ids.clamp(min=0).unsqueeze(1)).squeeze(1)
        return chosen - usable.logsumexp(dim=1)
