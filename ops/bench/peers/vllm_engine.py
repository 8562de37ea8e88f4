"""vLLM's side: its asynchronous engine, in whatever Python it is installed.

    python -m ops.bench.peers.vllm_engine '{"model_path": FOLDER, "max_batch": ..., "dtype": ..., "device": ..., ...}'

As it performs best without changes to it: its engine is a process of its own, compiled, with its own choice of threads
unless a number was asked for. Since it compiles for a minute, and keeps that for the same sizes, it is built once, for
MAX_NUM_SEQS or the largest batch where that is more; at a smaller one the next request is offered when one ends, which
it may learn of a step late.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ops.bench.errors import BenchError
from ops.bench.peers.streaming import Played, Request, handlers_of
from ops.bench.serving import serve

MAX_NUM_SEQS: Final = 32
# Room for keys and values.
KV_GIB: Final = 4
# What vLLM reads from its environment, which is left as the user has it but for this.
KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
LOGGING: Final = "VLLM_LOGGING_LEVEL"
THREADS: Final = "VLLM_CPU_OMP_THREADS_BIND"
# Its manual wants this library, which it depends on, loaded first "for best performance" on a CPU.
OPENMP: Final = "lib/libiomp5.so"


class VllmPeer:
    """A StreamingPeer. `prepare` and `play` run on one event loop, which is asleep in between."""

    def __init__(
        self,
        model_path: str,
        max_batch: int,
        dtype: str,
        device: str,
        num_threads: int | None,
        shares_prefix: bool = False,
    ) -> None:
        self._path = model_path
        self._max_batch = max_batch
        self._dtype = dtype
        self._device = device
        self._shares_prefix = shares_prefix
        self._runner = asyncio.Runner()
        self._engine: Any = None
        self._batch = max_batch
        self._num_runs = 0
        os.environ.setdefault(LOGGING, "ERROR")
        if device == "cpu":
            os.environ.setdefault(KV_SPACE, str(KV_GIB))
            if num_threads is not None:
                os.environ.setdefault(THREADS, f"0-{num_threads - 1}")
            openmp = Path(sys.prefix) / OPENMP
            if openmp.exists():
                os.environ.setdefault("LD_PRELOAD", str(openmp))  # of the engine's process, which starts later

    def prepare(self, batch: int, num_kv_tokens: int) -> dict[str, Any]:
        """See StreamingPeer."""
        import vllm

        if self._engine is None:
            self._runner.run(self._build())
        self._batch = batch
        return {
            "version": vllm.__version__,
            "dtype": self._dtype,
            "threads": os.environ.get(THREADS, "as it chooses") if self._device == "cpu" else None,
        }

    async def _build(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=self._path,
            skip_tokenizer_init=True,
            dtype=self._dtype,
            max_num_seqs=max(self._max_batch, MAX_NUM_SEQS),
            enable_prefix_caching=self._shares_prefix,
            disable_log_stats=True,
        )
        self._engine = AsyncLLM.from_engine_args(arguments)

    def play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        """See StreamingPeer."""
        return self._runner.run(self._play(requests, arrivals_s))

    async def _play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        self._num_runs += 1
        token_s: list[list[float]] = [[] for _ in requests]
        first_ids: list[int] = []
        places = asyncio.Semaphore(self._batch)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index, (request, arrival) in enumerate(zip(requests, arrivals_s, strict=True)):
                wait_s = started + arrival - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                ids = first_ids if index == 0 else None
                group.create_task(self._ask(f"{self._num_runs}-{index}", request, places, token_s[index], ids))
        return Played(started, token_s, first_ids)

    async def _ask(
        self, name: str, request: Request, places: asyncio.Semaphore, times: list[float], ids: list[int] | None
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt_ids, num_output = request
        wanted = SamplingParams(
            temperature=0,
            max_tokens=num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async with places:
            async for output in self._engine.generate({"prompt_token_ids": prompt_ids}, wanted, name):
                new_ids = list(output.outputs[0].token_ids)
                times.extend([time.perf_counter()] * len(new_ids))
                if ids is not None:
                    ids.extend(new_ids)
        if not times:
            raise BenchError(f"vLLM made no token for request {name}")

    def close(self) -> None:
        """End its engine's process."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
        self._runner.close()


def main() -> None:
    """Entry point of the process."""
    peer = VllmPeer(**json.loads(sys.argv[1]))
    serve(handlers_of(peer))
    peer.close()


if __name__ == "__main__":
    main()
