"""How each row's sequence wants to be sampled, as columns over the rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.penalties import Penalties
from model.step_inputs import IntArray, SamplingRows
from scheduler.output import NewRow

ToDevice = Callable[[npt.NDArray[Any]], torch.Tensor]


class SamplingColumns:
    """Owns the columns, one element a row; a row's are written when it is taken, and left when it is freed.

    is_choosing, bool [num_rows]: whose log probabilities decide among choices. num_candidates, int64 [num_rows]: how
    many candidates a beam wants, 0 for all others.
    """

    def __init__(self, num_rows: int) -> None:
        self.is_choosing = np.zeros(num_rows, dtype=np.bool_)
        self.num_candidates = np.zeros(num_rows, dtype=np.int64)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        self._seeds = np.zeros(num_rows, dtype=np.int64)
        self._has_penalties = np.zeros(num_rows, dtype=np.bool_)
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        self._repetition = np.ones(num_rows, dtype=np.float32)
        self._frequency = np.zeros(num_rows, dtype=np.float32)
        self._presence = np.zeros(num_rows, dtype=np.float32)

    def write(self, row: int, new_row: NewRow) -> None:
        """Keep what a new sequence wants."""
        sampling = new_row.sampling
        # Nobody follows what is drawn of a beam: the largest logit is the least work.
        self._temperature[row] = 0.0 if new_row.num_candidates else sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seeds[row] = new_row.seed
        self._has_penalties[row] = sampling.has_penalties
        self._num_prompt[row] = new_row.num_prompt_tokens
        self._repetition[row] = sampling.repetition_penalty
        self._frequency[row] = sampling.frequency_penalty
        self._presence[row] = sampling.presence_penalty
        self.is_choosing[row] = sampling.is_choosing
        self.num_candidates[row] = new_row.num_candidates

    def have_penalties(self, rows: IntArray) -> bool:
        """Whether any of these rows has penalties."""
        return bool(self._has_penalties[rows].any())

    def sampling_rows(
        self, rows: IntArray, positions: IntArray, penalties: Penalties | None, to_device: ToDevice
    ) -> SamplingRows:
        """Those of these rows, whose next tokens have these positions."""
        return SamplingRows(
            temperature=to_device(self._temperature[rows]),
            top_k=to_device(self._top_k[rows]),
            top_p=to_device(self._top_p[rows]),
            min_p=to_device(self._min_p[rows]),
            seeds=to_device(self._seeds[rows]),
            positions=to_device(positions),
            penalties=penalties,
        )

    def penalties(
        self, rows: IntArray, positions: IntArray, token_ids: IntArray, token_rows: IntArray, to_device: ToDevice
    ) -> Penalties:
        """Those of these rows, whose tokens are the rows `token_rows` of `token_ids` up to these positions."""
        columns = (token_rows, self._num_prompt[rows], positions)
        amounts = (self._repetition[rows], self._frequency[rows], self._presence[rows])
        return Penalties(*(to_device(each) for each in (token_ids, *columns, *amounts)))
