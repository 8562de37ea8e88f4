"""Computes the scheduler's steps: rows, block copies, one forward pass, one draw for each sampled chunk."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kernels.compiled import is_compiled, set_cache_root, warmup
from model.cuda_graphs import Capture, CudaCapture
from model.decode_shapes import decode_shapes
from model.decoder import Decoder
from model.forward import ForwardPass
from model.input_batch import InputBatch
from model.kv_cache import KVCache
from model.sampler import Sampler
from model.staging import HostCopy, transport_for
from model.step_inputs import IntArray, StepInputs
from model.step_splitter import SplitStep, compute_in_parts
from model.threads import set_num_threads
from scheduler.output import Candidate, Chunks, ModelRunnerOutput, NewRow, SchedulerOutput, TransferResult
from scheduler.sampling_params import SamplingParams

NO_FINITE_LOGIT = "the model gave no finite logit to choose a token from: the weights or the prompt overflow its dtype"

COMPILE_STAGE = "compiling kernels"


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Limits of the runner, which the scheduler keeps to.

    sampled_vocab_size: ids from here on are never drawn (None: the model's vocabulary).
    max_logits_rows: rows whose logits exist at once; more are computed in pieces.
    num_threads: CPU threads of a step (None: one a physical core).
    kernel_cache_dir: where compiled kernels are kept (None: the user's cache folder).
    use_cuda_graphs: on CUDA pad decodes to a few shapes, whose graphs `capture_graphs` makes.
    is_deterministic: attention has tiles and splits of fixed sizes; else it may size them by the batch, which is faster
        on CUDA (AttentionMetadata).
    """

    max_num_seqs: int
    max_model_len: int
    sampled_vocab_size: int | None = None
    max_logits_rows: int = 256
    num_threads: int | None = None
    kernel_cache_dir: Path | None = None
    use_cuda_graphs: bool = False
    is_deterministic: bool = False


@dataclass(slots=True)
class _Drawn:
    """What one forward pass has drawn: ids int64 [num_sampled] on the device, and on their way to the host."""

    inputs: StepInputs
    ids: torch.Tensor
    host_ids: HostCopy


@dataclass(slots=True)
class _Extras:
    """What a step brings beside drawn tokens, by sequence: see ModelRunnerOutput."""

    logprobs: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, tuple[Candidate, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class PendingStep:
    """A step that was launched: `step` is None where it computes nothing."""

    step: SplitStep[_Drawn] | None = None
    extras: _Extras = field(default_factory=_Extras)
    forward_s: float = 0.0


class ModelRunner:
    """Owns the input batch; computes the steps in the order in which they are launched. Not thread-safe.

    `last_forward_s` is what the last step that was collected spent in the forward pass and sampling, in seconds; the
    rest is host work.
    """

    is_queueing = True

    def __init__(self, decoder: Decoder, kv_cache: KVCache, config: RunnerConfig) -> None:
        self.last_forward_s = 0.0
        self._device = decoder.device
        self._last_launched: PendingStep | None = None
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._max_logits_rows = config.max_logits_rows
        vocab_size = decoder.config.vocab_size
        self._sampler = Sampler(min(config.sampled_vocab_size or vocab_size, vocab_size))
        self._forward = ForwardPass(decoder, kv_cache)
        self._transport = transport_for(decoder.device)
        self._batch = InputBatch(
            config.max_num_seqs,
            config.max_model_len,
            kv_cache.block_size,
            decoder.device,
            is_deterministic=config.is_deterministic,
            shapes=decode_shapes(config.max_num_seqs, config.max_model_len) if config.use_cuda_graphs else None,
        )
        self.num_threads = set_num_threads(config.num_threads)
        set_cache_root(config.kernel_cache_dir)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step's work in the order that SchedulerOutput states, and draw the tokens of its sampled chunks.

        Where memory runs out it is computed in parts (step_splitter.py).
        Raises RunnerInputError where the step asks for what the runner doesn't hold.
        """
        return self.collect(self.launch(output))

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Begin a step: the GPU computes it beside what the host does next, the CPU has done it on return.

        Between this and `collect`, which is called once for each step and in the order of the launches, the next step
        may be launched, and no other: it gets the ids that this one draws on the device. Memory that runs out shows
        here, and so do errors of the input; what a step has computed wrong shows when it is collected.
        """
        self._batch.apply(output)
        self._kv_cache.begin_transfers(output.swap_outs, output.swap_ins)
        self._kv_cache.copy(output.block_copies)
        pending = PendingStep()
        if output.chunks:
            pending.step = compute_in_parts(output.chunks, lambda chunks: self._compute_chunks(chunks, pending))
        parts = [] if pending.step is None else pending.step.parts
        self._batch.drawn_on_device([(drawn.inputs, drawn.ids) for drawn in parts])
        self._last_launched = pending
        return pending

    def collect(self, pending: PendingStep) -> ModelRunnerOutput:
        """Wait for the oldest step that was launched; what it has brought."""
        if pending.step is None:
            self.last_forward_s = 0.0
            # With nothing to compute, the next thing that can happen is that a copy ends.
            return ModelRunnerOutput({}, transfers=self._kv_cache.ended_transfers(is_waiting=True))
        started = time.perf_counter()
        arrived: list[tuple[_Drawn, IntArray]] = [(drawn, drawn.host_ids.numpy()) for drawn in pending.step.parts]
        self.last_forward_s = pending.forward_s + time.perf_counter() - started
        sampled: dict[str, int] = {}
        for drawn, token_ids in arrived:
            self._batch.append_sampled(drawn.inputs, token_ids)
            sampled |= zip(drawn.inputs.sampled_ids, token_ids.tolist(), strict=True)
        if pending is self._last_launched:
            self._batch.drawn_on_device([])  # the host knows all
        return _as_output(sampled, pending.step, pending.extras, self._kv_cache.ended_transfers())

    def _compute_chunks(self, chunks: Chunks, pending: PendingStep) -> _Drawn:
        """The token drawn for each sampled chunk, by sequence; -1 where there was none to draw.

        Adds to `pending` what some want beside it.
        """
        inputs = self._batch.prepare(chunks)
        started = time.perf_counter()
        ids = self._compute(inputs, pending.extras)
        host_ids = HostCopy(ids, self._transport)
        pending.forward_s += time.perf_counter() - started
        return _Drawn(inputs, ids, host_ids)

    @torch.inference_mode()
    def _compute(self, inputs: StepInputs, extras: "_Extras") -> torch.Tensor:
        """The drawn ids, int64 [num_sampled]."""
        hidden = self._forward.hidden(inputs)
        pieces = []
        for start in range(0, len(hidden), self._max_logits_rows):
            end = min(start + self._max_logits_rows, len(hidden))
            logits = self._decoder.logits(hidden[start:end])
            pieces.append(self._sampler(logits, inputs.sampling.rows(start, end)))
            self._add_extras(extras, inputs, start, logits, pieces[-1])
        if not pieces:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _add_extras(
        self, extras: "_Extras", inputs: StepInputs, start: int, logits: torch.Tensor, ids: torch.Tensor
    ) -> None:
        """What rows from `start` on, whose logits these are, want beside the drawn ids [num_rows]."""
        end = start + len(logits)
        wanted = inputs.wants_logprob[start:end].nonzero()[0]
        if len(wanted):
            rows = torch.from_numpy(wanted).to(logits.device)
            values = self._sampler.logprobs(logits[rows], ids[rows]).tolist()
            extras.logprobs |= {inputs.sampled_ids[start + at]: value for at, value in zip(wanted, values, strict=True)}
        num_candidates = inputs.num_candidates[start:end]
        wanted = num_candidates.nonzero()[0]
        if len(wanted):
            most = int(num_candidates.max())
            rows = torch.from_numpy(wanted).to(logits.device)
            for at, found in zip(wanted, self._sampler.candidates(logits[rows], most), strict=True):
                extras.candidates[inputs.sampled_ids[start + at]] = found[: num_candidates[at]]

    @property
    def num_graphs(self) -> int:
        """Shapes of decodes that a captured graph computes."""
        return self._forward.num_graphs

    def capture_graphs(self, capture: Capture | None = None, num_shapes: int | None = None) -> bool:
        """Capture a graph of each shape that decodes are padded to, or of the `num_shapes` largest.

        Call it after `warm_up`, while no sequence has a row. False where there is nothing to capture, or it can't be
        done, which the log tells: steps are then computed without.
        """
        shapes = self._batch.shapes
        if shapes is None:
            return False
        wanted = shapes.largest_first()[:num_shapes]
        is_captured = self._forward.capture(
            wanted, self._batch.idle_decode, capture or CudaCapture(self._decoder.device)
        )
        if not is_captured:
            self._batch.shapes = None
        return is_captured

    def warm_up(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Load the kernels, then run a prompt and a decode, greedy and not, so that the first request is not slow.

        Call it while no sequence has a row: it computes in the cache's first block. progress(stage, done, total) is
        called where kernels have to be compiled, once on a machine; loading them takes no time to speak of.
        """
        if self._decoder.device.type == "cpu":  # elsewhere the first launch of each shape compiles
            self._load_kernels(progress)
        prompt_len = min(self._kv_cache.block_size - 1, self._batch.max_model_len - 1)
        rows = [
            NewRow(
                seq_id=f"warm-up-{temperature}",
                token_ids=(0,) * prompt_len,
                num_prompt_tokens=prompt_len,
                sampling=SamplingParams(temperature=temperature, top_k=2, top_p=0.5),
                seed=0,
                block_ids=(0,),
            )
            for temperature in (0.0, 1.0)[: self._batch.num_free_rows]
        ]
        num_rows, seq_ids = len(rows), tuple(row.seq_id for row in rows)
        are_sampled = (True,) * num_rows
        prompts = Chunks(seq_ids, (0,) * num_rows, (prompt_len,) * num_rows, are_sampled)
        decodes = Chunks(seq_ids, (prompt_len,) * num_rows, (1,) * num_rows, are_sampled)
        self.execute(SchedulerOutput(step=0, new_rows=tuple(rows), chunks=prompts))
        self.execute(SchedulerOutput(step=0, chunks=decodes))
        self.execute(SchedulerOutput(step=0, removed_ids=seq_ids))
        self.last_forward_s = 0.0

    def _load_kernels(self, progress: Callable[[str, int, int], None] | None) -> None:
        config = self._decoder.config
        shape = (self._decoder.dtype, config.head_dim, config.num_heads, config.num_kv_heads)
        quantization = self._decoder.quantization
        if progress is None or is_compiled(*shape, quantization):
            warmup(*shape, quantization=quantization)
        else:
            warmup(*shape, lambda done, total, _: progress(COMPILE_STAGE, done, total), quantization)


def _as_output(
    drawn: dict[str, int], step: SplitStep[_Drawn], extras: _Extras, transfers: tuple[TransferResult, ...]
) -> ModelRunnerOutput:
    """-1 becomes a failure of that sequence alone."""
    failed = dict(step.failed)
    if drawn and min(drawn.values()) < 0:
        failed |= {seq_id: NO_FINITE_LOGIT for seq_id, token_id in drawn.items() if token_id < 0}
        drawn = {seq_id: token_id for seq_id, token_id in drawn.items() if token_id >= 0}
    return ModelRunnerOutput(
        drawn, failed, transfers, frozenset(step.failed), step.num_splits, extras.logprobs, extras.candidates
    )
