"""An engine process of the real kind without a model: real scheduler, real pipe, no torch, and any speed.

    python -m ops.bench.scripted_engine FD CONFIG_JSON

Variables of the environment: PAGEMILL_STEP_MS is how long one step takes, PAGEMILL_START_MS (0) the start;
PAGEMILL_SCHEDULED, if it is set, names a file that gets a line for each sequence when it is first part of a step: its
name and the monotonic clock in ns.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Final

from scheduler.config import CacheConfig, SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput, TransferResult
from scheduler.scheduler import Scheduler
from worker.engine import Engine, Runner
from worker.engine_config import EngineConfig, EngineInfo
from worker.engine_messages import Command, Died, Event, Ready, pack_event
from worker.engine_process import EngineLoop, read_commands

BLOCK_SIZE: Final = 16
DEFAULT_NUM_BLOCKS: Final = 128
DEFAULT_NUM_BATCHED_TOKENS: Final = 512
VOCAB_SIZE: Final = 320
STEP_VARIABLE: Final = "PAGEMILL_STEP_MS"
SCHEDULED_VARIABLE: Final = "PAGEMILL_SCHEDULED"
START_VARIABLE: Final = "PAGEMILL_START_MS"
# What each sequence says, again and again.
TOKEN: Final = 70

MakeRunner = Callable[[float], Runner]
"""Makes what computes the steps; its argument is how long each takes, in seconds."""


class ScriptedRunner:
    """Takes its time for each step and draws TOKEN for whoever wants one."""

    last_forward_s = 0.0

    def __init__(self, step_s: float, scheduled: IO[str] | None = None) -> None:
        """`scheduled` gets the lines that PAGEMILL_SCHEDULED is about."""
        self._step_s = step_s
        self._scheduled = scheduled
        self._known: set[str] = set()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Do a step and sleep."""
        if self._scheduled is not None:
            self._note(output, self._scheduled)
        time.sleep(self._step_s)
        self.last_forward_s = self._step_s
        ended = [TransferResult(transfer.transfer_id) for transfer in (*output.swap_outs, *output.swap_ins)]
        return ModelRunnerOutput(dict.fromkeys(output.chunks.sampled_ids, TOKEN), transfers=tuple(ended))

    def _note(self, output: SchedulerOutput, scheduled: IO[str]) -> None:
        now_ns = time.monotonic_ns()
        for seq_id in output.chunks.seq_ids:
            if seq_id not in self._known:
                self._known.add(seq_id)
                scheduled.write(f"{seq_id} {now_ns}\n")


def make_scripted_runner(step_s: float) -> Runner:
    """As the environment says."""
    path = os.environ.get(SCHEDULED_VARIABLE)
    return ScriptedRunner(step_s, open(path, "a", buffering=1) if path else None)


def build(config: EngineConfig, make_runner: MakeRunner) -> tuple[Engine, EngineInfo]:
    """A scheduler as `config` says over that runner."""
    num_blocks = config.num_kv_blocks or DEFAULT_NUM_BLOCKS
    max_model_len = config.max_model_len or num_blocks * BLOCK_SIZE
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or DEFAULT_NUM_BATCHED_TOKENS,
        ),
        CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, num_cpu_blocks=config.num_swap_blocks or 0),
    )
    info = EngineInfo(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=config.max_num_seqs,
        vocab_size=VOCAB_SIZE,
        kv_bytes_per_block=BLOCK_SIZE,
        device="none",
        dtype="none",
        fingerprint="scripted",
        pid=os.getpid(),
    )
    runner = make_runner(float(os.environ[STEP_VARIABLE]) / 1000)
    return Engine(scheduler, runner, check_invariants=config.check_invariants), info


def main(make_runner: MakeRunner = make_scripted_runner) -> None:
    """Serve an engine at the socket until the service closes it."""
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
    time.sleep(float(os.environ.get(START_VARIABLE, "0")) / 1000)
    engine, info = build(EngineConfig(**json.loads(sys.argv[2])), make_runner)
    emit(Ready(info))
    try:
        EngineLoop(engine, commands, emit).run()
    except Exception as error:
        emit(Died(f"{type(error).__name__}: {error}"))
        sys.exit(3)


if __name__ == "__main__":
    main()
