"""An engine process of the real kind with a made-up model: real scheduler, real pipe, no torch, and any speed.

    python scripted_engine.py FD CONFIG_JSON

What it answers is known without running it: `tests.unit.scheduler.fake_runner.generate`. PAGEMILL_STEP_MS in the
environment is how long one step takes, PAGEMILL_START_MS how long it says nothing before it stands.
"""

import time

from ops.bench.scripted_engine import BLOCK_SIZE, main
from scheduler.output import ModelRunnerOutput, SchedulerOutput
from tests.faults.poison import strike
from tests.unit.scheduler.fake_runner import FakeRunner


class PacedRunner(FakeRunner):
    """Takes its time for each step, as a model does."""

    last_forward_s = 0.0

    def __init__(self, step_s: float) -> None:
        super().__init__(BLOCK_SIZE)
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


if __name__ == "__main__":
    main(PacedRunner)
