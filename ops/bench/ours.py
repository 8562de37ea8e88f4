"""Our side: the engine, in its own process as a worker runs it, or in this one.

    python -m ops.bench.ours '{"config": {...}, "mode": "process"}'

As many sequences are in flight as the batch says (max_num_seqs); the rest of the list waits in the engine, which lets
the next one in as soon as one ends.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from ops.bench.errors import BenchError
from ops.bench.parts import start_engine
from ops.bench.recorder import Recorder
from ops.bench.serving import serve
from scheduler.sampling_params import SamplingParams
from worker.engine import EngineRequest, StepTimes
from worker.engine_config import EngineConfig, EngineInfo


class Driver(Protocol):
    """An engine that is fed and listened to."""

    def start(self) -> EngineInfo:
        """Build the engine. Raises StartupError."""
        ...

    def drive(self, requests: list[EngineRequest], arrivals_s: list[float], recorder: Recorder) -> None:
        """Run all requests to their ends, telling the recorder of each step.

        Request i is offered `arrivals_s[i]` seconds after the recorder's start; times rise.
        """
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class InProcessDriver:
    """Calls `Engine.step` itself: no pipe, nobody else awake."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def start(self) -> EngineInfo:
        """See Driver."""
        self._engine, info = start_engine(self._config)
        return info

    def drive(self, requests: list[EngineRequest], arrivals_s: list[float], recorder: Recorder) -> None:
        """See Driver."""
        engine, num_added = self._engine, 0
        while not recorder.is_done:
            now = time.perf_counter() - recorder.started_s
            while num_added < len(requests) and arrivals_s[num_added] <= now:
                engine.add(requests[num_added])
                num_added += 1
            if not engine.has_work:
                time.sleep(max(0.0, arrivals_s[num_added] - now))
                continue
            outputs = engine.step()
            recorder.absorb(time.perf_counter(), outputs, engine.stats(), engine.times)
        while engine.has_work:  # rows of the last ones are dropped; nothing is computed
            engine.step()

    def close(self) -> None:
        """See Driver."""
        del self._engine


class ProcessDriver:
    """Talks to the engine over the worker's own pipe."""

    def __init__(self, config: EngineConfig) -> None:
        from worker.engine_client import ProcessEngine

        self._engine = ProcessEngine(config)
        self._runner = asyncio.Runner()

    def start(self) -> EngineInfo:
        """See Driver."""
        return self._runner.run(self._engine.start())

    def drive(self, requests: list[EngineRequest], arrivals_s: list[float], recorder: Recorder) -> None:
        """See Driver."""
        self._runner.run(self._drive(requests, arrivals_s, recorder))

    async def _drive(self, requests: list[EngineRequest], arrivals_s: list[float], recorder: Recorder) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._offer(requests, arrivals_s, recorder.started_s))
            while not recorder.is_done:
                report = await self._engine.next_report()
                recorder.absorb(time.perf_counter(), report.outputs, report.stats, report.times)

    async def _offer(self, requests: list[EngineRequest], arrivals_s: list[float], started_s: float) -> None:
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            wait_s = started_s + arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._engine.add(request)

    def close(self) -> None:
        """See Driver."""
        self._runner.run(self._engine.close())
        self._runner.close()


class Ours:
    """Builds an engine for each batch, one at a time, and runs requests through it."""

    def __init__(self, config: EngineConfig, mode: str) -> None:
        self._config = config
        kinds: dict[str, Callable[[EngineConfig], Driver]] = {"process": ProcessDriver, "inprocess": InProcessDriver}
        self._kind = kinds[mode]
        self._driver: Driver | None = None
        self._info: EngineInfo | None = None
        self._times = StepTimes()
        self._num_hits = 0

    def prepare(self, batch: int, num_kv_blocks: int) -> dict[str, Any]:
        """An engine with room for `batch` sequences, built unless it stands already; answers its EngineInfo."""
        config = dataclasses.replace(self._config, max_num_seqs=batch, num_kv_blocks=num_kv_blocks)
        if self._info is None or config != self._config:
            self.close()
            self._config = config
            driver = self._kind(config)
            self._info = driver.start()
            self._driver = driver
            self._times, self._num_hits = StepTimes(), 0
        return dataclasses.asdict(self._info)

    def run(self, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
        """Run (prompt ids, output tokens) requests, all offered at once; answers an OursRun."""
        recorder = self._drive(requests, [0.0] * len(requests))
        return dataclasses.asdict(recorder.run(self._config.max_num_seqs))

    def run_arrivals(self, requests: list[tuple[list[int], int]], arrivals_s: list[float]) -> dict[str, Any]:
        """The same, each offered so many seconds after the start, whatever is being served then."""
        return dataclasses.asdict(self._drive(requests, arrivals_s).run_of_arrivals(arrivals_s))

    def _drive(self, requests: list[tuple[list[int], int]], arrivals_s: list[float]) -> Recorder:
        if self._driver is None:
            raise BenchError("there is no engine yet: prepare comes before run")
        made = [
            EngineRequest(
                seq_id=str(index),
                prompt_ids=tuple(prompt_ids),
                sampling=SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True),
                seed=0,
            )
            for index, (prompt_ids, num_output) in enumerate(requests)
        ]
        recorder = Recorder(
            len(made), started_s=time.perf_counter(), before=self._times, num_hits_before=self._num_hits
        )
        self._driver.drive(made, arrivals_s, recorder)
        self._times, self._num_hits = recorder.times, recorder.num_hits
        return recorder

    def close(self) -> None:
        """Let go of the engine."""
        if self._driver is not None:
            self._driver.close()
            self._driver = self._info = None


def main() -> None:
    """Entry point of the process."""
    options = json.loads(sys.argv[1])
    ours = Ours(EngineConfig(**options["config"]), options["mode"])
    serve({"prepare": ours.prepare, "run": ours.run, "run_arrivals": ours.run_arrivals})
    ours.close()


if __name__ == "__main__":
    main()
