"""A model runner with a KV cache full of random numbers, which is told single steps."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.decoder import Decoder
from model.kv_cache import KVCache
from model.loader import load_checkpoint
from model.model_runner import ModelRunner, RunnerConfig
from ops.bench.options import itemsizes_of
from ops.bench.step_profile import StepProfile
from ops.bench.work import num_head_parameters, num_layer_parameters, slot_bytes, step_weight_bytes
from scheduler.output import Chunks, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from worker.engine_builder import KERNEL_FOLDER
from worker.engine_config import EngineConfig
from worker.engine_model import DTYPES

if TYPE_CHECKING:
    from ops.bench.steps import StepCase


class StepRunner:
    """The checkpoint's model, with room for the largest of `cases`."""

    def __init__(self, config: EngineConfig, cases: "tuple[StepCase, ...]") -> None:
        from ops.bench.steps import NUM_STEPS

        is_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        device = torch.device("cuda" if is_cuda else "cpu")
        checkpoint = load_checkpoint(
            config.model_path,
            cache_dir=None if config.cache_dir is None else Path(config.cache_dir),
            load_format=config.load_format,
            device=device,
        )
        own_dtype = checkpoint.config.dtype if is_cuda else "float32"
        dtype = DTYPES[own_dtype if config.dtype == "auto" else config.dtype]
        self._config = checkpoint.config
        self._block_size = config.block_size
        self._room = 2 * NUM_STEPS
        most = max(case.context_len for case in cases) + self._room
        self._decoder = Decoder(
            checkpoint.config,
            checkpoint.weights,
            device=device,
            dtype=dtype,
            max_positions=most,
            quantization=config.quantization,
        )
        self._num_blocks = max(case.num_seqs * self._blocks_of(case) for case in cases)
        kv_cache = KVCache(
            checkpoint.config, num_blocks=self._num_blocks, block_size=config.block_size, dtype=dtype, device=device
        )
        # Pages that nobody has written are all one page of zeros, which lies in the caches.
        kv_cache.blocks.normal_()
        limits = RunnerConfig(
            max_num_seqs=max(case.num_seqs for case in cases),
            max_model_len=most,
            num_threads=config.num_threads,
            kernel_cache_dir=None if config.cache_dir is None else Path(config.cache_dir) / KERNEL_FOLDER,
        )
        self._runner = ModelRunner(self._decoder, kv_cache, limits)
        self._runner.warm_up()
        self._profile = StepProfile(self._decoder)
        self._itemsizes = itemsizes_of(config.quantization, self.dtype)

    @property
    def dtype(self) -> str:
        """Of weights and KV cache, by its name in torch."""
        return str(self._decoder.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where it computes."""
        return self._decoder.device.type

    def time_steps(self, case: "StepCase", num_steps: int) -> list[dict[str, float]]:
        """Of each of `num_steps` steps, after one that warms up, the seconds by what they were spent on.

        A decode goes on from step to step, so that its context grows by one each; a prompt begins anew.
        """
        rows = self._rows(case)
        seq_ids = tuple(row.seq_id for row in rows)
        steps = []
        is_new = True
        with self._profile.running():
            for number in range(num_steps + 1):
                grown = number if case.query_len == 1 else 0
                start = case.context_len - case.query_len + grown
                chunks = Chunks(seq_ids, (start,) * len(rows), (case.query_len,) * len(rows), (True,) * len(rows))
                output = SchedulerOutput(step=number, new_rows=rows if is_new else (), chunks=chunks)
                started = time.perf_counter()
                self._runner.execute(output)
                spent = self._profile.take(time.perf_counter() - started)
                if number:
                    steps.append(spent)
                is_new = case.query_len > 1
                if is_new:
                    self._runner.execute(SchedulerOutput(step=number, removed_ids=seq_ids))
            if not is_new:
                self._runner.execute(SchedulerOutput(step=num_steps, removed_ids=seq_ids))
        return steps

    def work_of(self, case: "StepCase") -> dict[str, float]:
        """Bytes that the step must read, and operations of its products. Logits are needed of the last tokens alone."""
        layers, head = num_layer_parameters(self._config), num_head_parameters(self._config)
        num_tokens = case.num_seqs * case.query_len
        return {
            "weight_bytes": step_weight_bytes(self._config, self._itemsizes),
            "kv_bytes": case.num_seqs * case.context_len * slot_bytes(self._config, self._decoder.dtype.itemsize),
            "linear_operations": 2 * (layers * num_tokens + head * case.num_seqs),
        }

    def _rows(self, case: "StepCase") -> tuple[NewRow, ...]:
        """Sequences whose blocks lie scattered over the cache."""
        blocks_each = self._blocks_of(case)
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(self._num_blocks, generator=generator)[: case.num_seqs * blocks_each]
        tokens = tuple(range(1, case.context_len + 1))
        vocab_size = self._config.vocab_size
        return tuple(
            NewRow(
                seq_id=str(index),
                token_ids=tuple(token % vocab_size for token in tokens),
                num_prompt_tokens=case.context_len,
                sampling=SamplingParams(temperature=0, max_tokens=self._room, ignore_eos=True),
                seed=0,
                block_ids=tuple(blocks[index * blocks_each : (index + 1) * blocks_each].tolist()),
            )
            for index in range(case.num_seqs)
        )

    def _blocks_of(self, case: "StepCase") -> int:
        return -(-(case.context_len + self._room) // self._block_size)
