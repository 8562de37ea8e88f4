"""Penalties on tokens that a sequence already holds, applied to its logits before anything is drawn.

What was said is not kept as counts, which would have to follow a sequence through preemptions, restarts and forks: it
is read off the sequence's own token ids in each step. A row's walk over 1,000 tokens touches a few kilobytes, where a
row of counts over the vocabulary has 200 KB to 1 MB; and there is nothing to rebuild when a sequence comes back.
"""

from dataclasses import dataclass

import torch

from kernels.checks import check_devices, check_dtypes
from kernels.compiled import launch, scratch
from kernels.dispatch import use_compiled, use_triton
from kernels.errors import KernelInputError


@dataclass(frozen=True, slots=True)
class Penalties:
    """What each row of logits is penalised for, and by how much; all on the device of the logits.

    token_ids int64 [n, max_len], columns adjacent: the tokens of sequences, of which row i's is number sequences[i].
    sequences, num_prompt, num_tokens int64 [rows]: its prompt are the first num_prompt, its output those from there up
        to num_tokens. Ids outside the vocabulary count for nothing.
    repetition float32 [rows]: the logit of each token of the prompt or the output is divided by it if it is positive,
        and multiplied if not; 1 is neutral.
    frequency, presence float32 [rows]: the logit of a token that is n > 0 times in the output falls by n * frequency,
        then by presence; 0 is neutral.
    """

    token_ids: torch.Tensor
    sequences: torch.Tensor
    num_prompt: torch.Tensor
    num_tokens: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def rows(self, start: int, end: int) -> "Penalties":
        """Those of rows [start, end)."""
        return Penalties(self.token_ids, *(each[start:end] for each in self.columns))

    @property
    def wholes(self) -> dict[str, torch.Tensor]:
        """The tensors of one whole number a row, by name."""
        return {"sequences": self.sequences, "num_prompt": self.num_prompt, "num_tokens": self.num_tokens}

    @property
    def amounts(self) -> dict[str, torch.Tensor]:
        """The tensors of one amount a row, by name."""
        return {"repetition": self.repetition, "frequency": self.frequency, "presence": self.presence}

    @property
    def columns(self) -> tuple[torch.Tensor, ...]:
        """The tensors of one element a row."""
        return (*self.wholes.values(), *self.amounts.values())


def apply_penalties(logits: torch.Tensor, penalties: Penalties) -> None:
    """Change logits float32 [rows, vocab] in place. Each operation rounds once, to float32, in all implementations.

    On CUDA the host waits for nothing. Raises KernelInputError.
    """
    token_ids, wholes, amounts = penalties.token_ids, penalties.wholes, penalties.amounts
    check_devices("logits", logits, token_ids=token_ids, **wholes, **amounts)
    check_dtypes((torch.float32,), logits=logits, **amounts)
    check_dtypes((torch.int64,), token_ids=token_ids, **wholes)
    if logits.ndim != 2 or token_ids.ndim != 2:
        raise KernelInputError(
            f"logits are {tuple(logits.shape)} and token_ids {tuple(token_ids.shape)}; they must be of two dimensions"
        )
    if any(each.shape != logits.shape[:1] for each in penalties.columns):
        raise KernelInputError(f"each column of the penalties must have {len(logits)} elements, one a row of logits")
    if logits.stride(1) != 1 or token_ids.stride(1) != 1:
        _apply_with_torch(logits, penalties)
    elif use_triton("penalties", logits):
        from kernels.gpu.penalties import apply_penalties as apply_with_triton

        apply_with_triton(logits, penalties)
    elif use_compiled("penalties", logits):
        _launch(logits, penalties)
    else:
        _apply_with_torch(logits, penalties)


def _apply_with_torch(logits: torch.Tensor, penalties: Penalties) -> None:
    vocab_size = logits.shape[1]
    tokens = penalties.token_ids.index_select(0, penalties.sequences)
    places = torch.arange(tokens.shape[1], device=logits.device)
    is_known = (tokens >= 0) & (tokens < vocab_size) & (places < penalties.num_tokens[:, None])
    is_prompt = places < penalties.num_prompt[:, None]
    tokens = tokens.masked_fill(~is_known, 0)
    counts, times_in_prompt = (
        torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_add_(1, tokens, is_counted.int())
        for is_counted in (is_known & ~is_prompt, is_known & is_prompt)
    )
    repetition, frequency, presence = (each[:, None] for each in penalties.amounts.values())
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(counts + times_in_prompt > 0, repeated, logits)
    logits.copy_(torch.where(counts > 0, penalised - frequency * counts - presence, penalised))


def _launch(logits: torch.Tensor, penalties: Penalties) -> None:
    from kernels.cpu.penalties import scratch_bytes

    num_rows, vocab_size = logits.shape
    num_threads = min(torch.get_num_threads(), max(1, num_rows))
    thread_bytes = scratch_bytes(vocab_size)
    columns = [each.contiguous() for each in penalties.columns]
    launch(
        "penalties",
        (
            logits.data_ptr(), logits.stride(0) * 4, vocab_size, num_rows,
            penalties.token_ids.data_ptr(), penalties.token_ids.stride(0) * 8,
            *(each.data_ptr() for each in columns),
            scratch(num_threads * thread_bytes).data_ptr(), thread_bytes,
        ),
        num_threads,
    )  # fmt: skip
