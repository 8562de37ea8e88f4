"""An engine process of the real kind with a made-up model: real scheduler, real pipe, no torch, and any speed.

    python scripted_engine.py FD CONFIG_JSON

What it answers is known without running it: `tests.unit.scheduler.fake_runner.generate`. PAGEMILL_STEP_MS in the
environment is how long one step takes, PAGEMILL_START_MS how long it says nothing before it stands.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput
from scheduler.scheduler import Scheduler
from tests.faults.poison import strike
from tests.unit.scheduler.fake_runner import FakeRunner
from worker.engine import Engine
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_messages import Command, Died, Event, Ready, pack_event
from worker.engine_process import EngineLoop, read_commands

BLOCK_SIZE = 16


class PacedRunner(FakeRunner):
    """Takes its time for each step, as a model does."""

    last_forward_s = 0.0

    def __init__(self, block_size: int, step_s: float) -> None:
        super().__init__(block_size)
        self._step_s = step_s
        self._num_prompt_tokens: dict[str, int] = {}

    def execute(self, output: SchedulerOutput, failing: dict[str, str] | None = None) -> ModelRunnerOutput:
        """Do a step and sleep, unless one of its sequences ends this process."""
        self._num_prompt_tokens |= {new.seq_id: new.num_prompt_tokens for new in output.new_rows}
        chunks = output.chunks
        for seq_id, start, count in zip(chunks.seq_ids, chunks.starts, chunks.num_tokens, strict=True):
            strike(seq_id, start + count - self._num_prompt_tokens[seq_id])
        time.sleep(self._step_s)
        self.last_forward_s = self._step_s
        return super().execute(output, failing)


def build(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """A scheduler as `config` says over the made-up model."""
    num_blocks = config.num_kv_blocks or 128
    max_model_len = config.max_model_len or num_blocks * BLOCK_SIZE
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=max_model_len, max_num_seqs=config.max_num_seqs),
        CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        vocab_size=320,
        kv_bytes_per_block=BLOCK_SIZE,
        device="none",
        dtype="none",
        fingerprint="scripted",
        pid=os.getpid(),
    )
    runner = PacedRunner(BLOCK_SIZE, float(os.environ["PAGEMILL_STEP_MS"]) / 1000)
    return Engine(scheduler, runner, check_invariants=config.check_invariants), info


def main() -> None:
    """Serve the engine at the socket until the service closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))

    def emit(event: Event) -> None:
        try:
            connection.sendall(pack_event(event))
        except ConnectionError:
            os._exit(0)

    commands: SimpleQueue[Command] = SimpleQueue()
    threading.Thread(target=read_commands, args=(connection, commands), daemon=True).start()
    time.sleep(float(os.environ.get("PAGEMILL_START_MS", "0")) / 1000)
    engine, info = build(EngineConfig(**json.loads(sys.argv[2])))
    emit(Ready(info))
    try:
        EngineLoop(engine, commands, emit).run()
    except Exception as error:
        emit(Died(f"{type(error).__name__}: {error}"))
        sys.exit(3)


if __name__ == "__main__":
    main()
