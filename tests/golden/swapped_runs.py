"""Greedy runs in which every sequence is swapped out and in again every few tokens."""

from dataclasses import dataclass
from typing import Any

from scheduler.sampling_params import SamplingParams
from worker.engine import EngineRequest
from worker.llm import LLM

STEPS_BETWEEN_SWAPS = 4


@dataclass(frozen=True, slots=True)
class SwappedRun:
    """What came of it: token ids and swaps by the name of the prompt, and what the engine counted."""

    ids: dict[str, list[int]]
    num_swaps: dict[str, int]
    num_preemptions: int
    num_recomputed_tokens: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int

    def check(self) -> None:
        """Everyone was swapped, and no token was computed twice."""
        assert min(self.num_swaps.values()) > 0
        assert sum(self.num_swaps.values()) == self.num_preemptions
        assert self.num_recomputed_tokens == 0
        assert self.num_swapped_out_blocks == self.num_swapped_in_blocks > 0


def run_swapped(
    model: str,
    prompts: dict[str, list[int]],
    num_new_tokens: int,
    num_kv_blocks: int,
    num_swap_blocks: int,
    **more: Any,
) -> SwappedRun:
    """Serve all prompts at once. Nothing is found in the device's prefix cache, so every block is copied both ways.

    A leader that is not of them runs all the time, since a leader is never preempted.
    `more` are fields of EngineConfig.
    """
    greedy = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    options: dict[str, Any] = {
        "preemption_mode": "swap",
        "enable_prefix_caching": False,
        "check_invariants": "step",
        **more,
    }
    with LLM(model, num_kv_blocks=num_kv_blocks, num_swap_blocks=num_swap_blocks, **options) as llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        room = scheduler.max_num_tokens - 3
        engine.add(EngineRequest("leader", (1, 2, 3), SamplingParams(max_tokens=room, ignore_eos=True), seed=0))
        engine.step()
        for name, prompt_ids in prompts.items():
            engine.add(EngineRequest(name, tuple(prompt_ids), greedy, seed=0))
        ids: dict[str, list[int]] = {name: [] for name in prompts}
        num_swaps: dict[str, int] = {}
        steps_run: dict[str, int] = dict.fromkeys(ids, 0)
        while len(num_swaps) < len(ids):
            for seq in list(scheduler.running):
                steps_run[seq.seq_id] = steps_run.get(seq.seq_id, 0) + 1
                if steps_run[seq.seq_id] % STEPS_BETWEEN_SWAPS == 0:
                    scheduler.preempt(seq.seq_id)
            for output in engine.step():
                if output.seq_id in ids:
                    ids[output.seq_id] += output.new_token_ids
                if output.stats is not None:
                    num_swaps[output.seq_id] = output.stats.num_preemptions
        engine.abort("leader")
        while engine.has_work:
            engine.step()
        stats = engine.stats()
    return SwappedRun(
        ids,
        num_swaps,
        stats.num_preemptions_swap,
        stats.num_recomputed_tokens,
        stats.num_swapped_out_blocks,
        stats.num_swapped_in_blocks,
    )
