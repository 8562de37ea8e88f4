"""The steps of a simulation in Chrome's trace format, to be opened in Perfetto or chrome://tracing.

    process "engine"    row "steps": one bar a step; counters: blocks of the KV cache, sequences
    process "requests"  one row a request: waiting │ prefill │ decode │ lost │ catch up │ decode, marks where it lost
                        its blocks and how

Times are in microseconds of the simulation. It is written as it comes, so that a long run takes no memory.
"""

import json
from typing import Any, Final, TextIO

from ops.simulate.driver import SimulatedStep
from ops.simulate.traces import TraceRequest

ENGINE: Final = 1
REQUESTS: Final = 2


class ChromeTrace:
    """An observer that writes to `file`, which stays the caller's. `close` makes it complete."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._num_events = 0
        # By sequence: its row, what it is doing, and since when.
        self._phases: dict[str, tuple[int, str, float]] = {}
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._name("process_name", ENGINE, 0, "engine")
        self._name("process_name", REQUESTS, 0, "requests")
        self._name("thread_name", ENGINE, 1, "steps")

    def arrived(self, seq_id: str, request: TraceRequest) -> None:
        """See Observer."""
        row = request.index + 1
        shown = f"{seq_id}: {request.num_prompt_tokens} + {request.num_output_tokens} tokens"
        self._name("thread_name", REQUESTS, row, shown)
        self._phases[seq_id] = (row, "waiting", request.arrival_s)

    def stepped(self, step: SimulatedStep) -> None:
        """See Observer."""
        for seq_id, mode in step.preempted:
            self._mark(seq_id, f"preempted: {mode}", step.start_s)
            self._turn(seq_id, f"lost ({mode})", step.start_s)
        for row in step.output.new_rows:
            was_waiting = self._phases[row.seq_id][1] == "waiting"
            self._turn(row.seq_id, "prefill" if was_waiting else "catch up", step.start_s)
        for output in step.outputs:
            if output.finish_reason is not None:
                self._turn(output.seq_id, "", step.end_s)
                del self._phases[output.seq_id]
            elif self._phases[output.seq_id][1] != "decode":
                self._turn(output.seq_id, "decode", step.end_s)
        if step.end_s > step.start_s:
            self._step(step)

    def close(self) -> None:
        """Write the end. Call it once, when the simulation is over."""
        self._file.write("\n]}\n")

    def _step(self, step: SimulatedStep) -> None:
        output, stats = step.output, step.stats
        num_out, num_in = output.num_swapped_blocks
        facts = {
            "tokens": output.num_tokens,
            "sequences": len(output.chunks),
            "bound by": step.cost.bound,
            "swapped out": num_out,
            "swapped in": num_in,
        }
        self._bar(ENGINE, 1, f"step {output.step}", step.start_s, step.end_s, facts)
        owned = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        counts = {"owned": owned, "cached": stats.num_cached_blocks}
        self._write("C", ENGINE, 1, "KV blocks", step.end_s, args=counts)
        waiting = stats.num_waiting + stats.num_swapped
        self._write("C", ENGINE, 1, "sequences", step.end_s, args={"running": stats.num_running, "waiting": waiting})

    def _turn(self, seq_id: str, phase: str, now: float) -> None:
        """Close what a sequence was doing, and begin another phase."""
        row, last, since = self._phases[seq_id]
        self._bar(REQUESTS, row, last, since, now, {})
        self._phases[seq_id] = (row, phase, now)

    def _mark(self, seq_id: str, name: str, now: float) -> None:
        self._write("i", REQUESTS, self._phases[seq_id][0], name, now, s="t")

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write("M", pid, tid, kind, 0.0, args={"name": name})

    def _bar(self, pid: int, tid: int, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        self._write("X", pid, tid, name, start_s, dur=_micro(end_s) - _micro(start_s), args=args)

    def _write(self, ph: str, pid: int, tid: int, name: str, at_s: float, **rest: Any) -> None:
        event = {"ph": ph, "pid": pid, "tid": tid, "ts": _micro(at_s), "name": name, **rest}
        self._file.write((",\n" if self._num_events else "") + json.dumps(event))
        self._num_events += 1


def _micro(seconds: float) -> int:
    """Whole microseconds, so that what ends where the next begins ends at the same number."""
    return round(seconds * 1e6)
