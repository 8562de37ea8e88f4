"""The ids that the device has drawn and the host doesn't know yet."""

import numpy as np
import torch

from model.step_inputs import IntArray, StepInputs


class DrawnIds:
    """Owns whose they are: of the step launched last alone. Those of the one before it are known by then.

    ids: int64 [num_drawn] on the device; None where the host knows all.
    """

    def __init__(self, num_rows: int) -> None:
        self.ids: torch.Tensor | None = None
        # Which of `ids` is each row's (-1: none), and at what position.
        self._draw_of = np.full(num_rows, -1, dtype=np.int64)
        self._positions = np.zeros(num_rows, dtype=np.int64)

    def replace(self, parts: list[tuple[StepInputs, torch.Tensor]]) -> None:
        """The step launched last draws these ids, int64 [num_sampled] each, and nothing else is unknown any more."""
        self.ids = None
        if not parts:
            return
        self._draw_of.fill(-1)
        start = 0
        for inputs, ids in parts:
            rows = inputs.sampled_rows
            self._draw_of[rows] = np.arange(start, start + len(ids))
            self._positions[rows] = inputs.sampled_positions
            start += len(ids)
        ids_of_parts = [ids for _, ids in parts]
        self.ids = None if start == 0 else torch.cat(ids_of_parts) if len(parts) > 1 else ids_of_parts[0]

    def forget(self, row: int) -> None:
        """The row is nobody's any more."""
        self._draw_of[row] = -1

    def find(self, rows: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
        """Of these rows' last tokens, before `ends`: indices of those only drawn yet, and which of `ids` they are."""
        draws = self._draw_of[rows]
        found = np.flatnonzero((draws >= 0) & (self._positions[rows] == ends - 1))
        return found, draws[found]
