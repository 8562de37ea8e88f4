"""A scheduler of a few lines: hands the model runner steps that a test spells out, and keeps the logits it computed."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from model.config import ModelConfig
from model.decoder import Decoder
from model.kv_cache import KVCache
from model.model_runner import ModelRunner, RunnerConfig
from scheduler.output import BlockCopy, ModelRunnerOutput, NewBlocks, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from tests.unit.chunks import make_chunks

GREEDY = SamplingParams(temperature=0)


class RecordingDecoder(Decoder):
    """Keeps every row of logits that it computes."""

    recorded: list[torch.Tensor]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the decoder's own, and remembered."""
        logits = super().logits(hidden)
        self.recorded.extend(logits.clone())
        return logits


@dataclass
class DrivenSequence:
    """What the driver knows of one sequence; `logits[i]` are those from which token i of `drawn` was taken."""

    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed: int = 0
    has_row: bool = False
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def drawn(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Runner, cache and decoder of one configuration. `block_ids`: the order in which blocks are handed out."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        block_size: int = 8,
        num_blocks: int = 64,
        block_ids: Iterable[int] | None = None,
        num_cpu_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        max_positions: int | None = None,
        runner: RunnerConfig | None = None,
        quantization: str = "none",
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        device = torch.device("cpu")
        self.decoder = RecordingDecoder(config, dict(weights), device, dtype, max_positions, quantization, kv_dtype)
        self.decoder.recorded = []
        self.kv_cache = KVCache(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.decoder.kv_dtype,
            device=device,
            num_cpu_blocks=num_cpu_blocks,
        )
        # What no sequence has written is poison: a read past a context's end shows as NaN.
        self.kv_cache.blocks.fill_(torch.nan)
        runner = runner or RunnerConfig(max_num_seqs=16, max_model_len=self.decoder.max_positions)
        # One thread: on tensors this small a second one only waits, and much longer where tests run side by side.
        self.runner = ModelRunner(self.decoder, self.kv_cache, replace(runner, num_threads=1))
        self.block_size = block_size
        self.free_blocks = list(block_ids if block_ids is not None else range(num_blocks))
        self.sequences: dict[str, DrivenSequence] = {}
        self.removed: list[str] = []
        self.num_steps = 0

    def add(
        self,
        seq_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        shared_block_ids: Iterable[int] = (),
    ) -> DrivenSequence:
        """A new sequence; `shared_block_ids` hold its first tokens already, computed by another."""
        prompt, shared = list(prompt), list(shared_block_ids)
        sequence = DrivenSequence(prompt, len(prompt), sampling, seed, shared, len(shared) * self.block_size)
        self.sequences[seq_id] = sequence
        return sequence

    def remove(self, seq_id: str) -> DrivenSequence:
        """Finish or preempt: its row goes with the next step, its blocks at once."""
        sequence = self.sequences.pop(seq_id)
        self.removed.append(seq_id)
        self.free_blocks.extend(reversed(sequence.block_ids))
        return sequence

    def resume(self, seq_id: str, sequence: DrivenSequence) -> None:
        """Bring a removed sequence back with all its tokens, none of them computed."""
        sequence.block_ids, sequence.num_computed, sequence.has_row = [], 0, False
        self.sequences[seq_id] = sequence

    def step(self, num_tokens: Mapping[str, int], block_copies: tuple[BlockCopy, ...] = ()) -> ModelRunnerOutput:
        """Compute so many tokens of each named sequence, in this order."""
        chunks, new_rows, new_blocks = [], [], []
        for seq_id, count in num_tokens.items():
            sequence = self.sequences[seq_id]
            end = sequence.num_computed + count
            needed = -(-end // self.block_size) - len(sequence.block_ids)
            block_ids = tuple(self.free_blocks.pop(0) for _ in range(needed))
            sequence.block_ids.extend(block_ids)
            if not sequence.has_row:
                new_rows.append(_new_row(seq_id, sequence))
                sequence.has_row = True
            elif block_ids:
                new_blocks.append(NewBlocks(seq_id, block_ids))
            is_sampled = end == len(sequence.token_ids)
            chunks.append((seq_id, sequence.num_computed, count, is_sampled))
            sequence.num_computed = end
        output = SchedulerOutput(
            step=self.num_steps,
            chunks=make_chunks(*chunks),
            new_rows=tuple(new_rows),
            new_blocks=tuple(new_blocks),
            removed_ids=tuple(self.removed),
            block_copies=block_copies,
        )
        self.removed, self.num_steps = [], self.num_steps + 1
        self.decoder.recorded = []
        result = self.runner.execute(output)
        for seq_id, logits in zip(output.chunks.sampled_ids, self.decoder.recorded, strict=True):
            if seq_id in result.sampled:
                self.sequences[seq_id].logits.append(logits)
                self.sequences[seq_id].token_ids.append(result.sampled[seq_id])
        return result

    def num_left(self, seq_id: str) -> int:
        """Tokens of a sequence that are known and not computed."""
        return len(self.sequences[seq_id].token_ids) - self.sequences[seq_id].num_computed

    def decode(self, num_new_tokens: int) -> None:
        """Step all sequences together, prompts whole, until each has at least so many drawn tokens."""
        while any(len(sequence.drawn) < num_new_tokens for sequence in self.sequences.values()):
            self.step({seq_id: self.num_left(seq_id) for seq_id in self.sequences})

    def decode_raggedly(self, num_new_tokens: int, rng: random.Random) -> None:
        """As `decode`, but each step takes some sequences in any order, and chunks of any size."""
        while True:
            waiting = [name for name, sequence in self.sequences.items() if len(sequence.drawn) < num_new_tokens]
            if not waiting:
                return
            chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
            self.step({seq_id: rng.randint(1, self.num_left(seq_id)) for seq_id in chosen})


def _new_row(seq_id: str, sequence: DrivenSequence) -> NewRow:
    return NewRow(
        seq_id=seq_id,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        seed=sequence.seed,
        block_ids=tuple(sequence.block_ids),
    )


def tiny_config(**changes: object) -> ModelConfig:
    """A decoder small enough for a test to run hundreds of steps."""
    settings: dict[str, object] = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return ModelConfig(**{**settings, **changes})  # type: ignore[arg-type]


def random_prompt(length: int, vocab_size: int, rng: random.Random) -> list[int]:
    """Token ids."""
    return [rng.randrange(vocab_size) for _ in range(length)]
