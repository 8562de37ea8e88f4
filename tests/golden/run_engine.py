"""Runs the reference's prompts through the engine in a process that can't import transformers' models.

    python -m tests.golden.run_engine MODEL.gguf MODE

MODE is one_by_one, all_at_once, shuffled (the pool hands blocks out in a random order), preempted (a pool so small
that sequences are preempted) or swapped (every sequence, but for the first that runs, is swapped out and in again every
few tokens). One JSON object on stdout: token ids by prompt, the number of preemptions, and of swaps of each prompt.
"""

import json
import random
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 20260214
# Each of the long prompts alone needs 42 blocks of 16 with its reply: a few fit, all of them never do.
PREEMPTED_BLOCKS = 64
# Swapped: with a pool that all of them don't fit into either, every sequence is swapped about every fourth step.
SWAPPED_BLOCKS = 256
SWAP_BLOCKS = 1024
STEPS_BETWEEN_SWAPS = 4


class NoTransformers(MetaPathFinder):
    """Makes transformers unimportable, so that nothing of it can have made the answer."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuses transformers, knows nothing of the rest."""
        if fullname.partition(".")[0] == "transformers":
            raise ImportError(f"{fullname} is out of bounds here")
        return None


def run(model: Path, mode: str) -> dict[str, object]:
    """The ids that the engine generates in this mode."""
    from scheduler.sampling_params import SamplingParams
    from tests.golden.reference import NUM_NEW_TOKENS, load_reference
    from worker.llm import LLM

    if mode == "swapped":
        return run_swapped(model)
    num_kv_blocks = PREEMPTED_BLOCKS if mode == "preempted" else 1024
    prompts = {name: made.prompt_ids for name, made in load_reference().items()}
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    with LLM(str(model), num_kv_blocks=num_kv_blocks, check_invariants="step") as llm:
        if mode == "shuffled":
            pool = llm.engine.scheduler.kv.pool
            blocks = pool.allocate(1024)
            assert blocks is not None
            random.Random(SEED).shuffle(blocks)
            pool.free(blocks)
        if mode == "one_by_one":
            made = [llm.generate(ids, params)[0] for ids in prompts.values()]
        else:
            made = llm.generate(list(prompts.values()), params)
        num_preemptions = llm.engine.stats().num_preemptions_recompute
    ids = {name: list(completion.token_ids) for name, completion in zip(prompts, made, strict=True)}
    return {"ids": ids, "num_preemptions": num_preemptions}


def run_swapped(model: Path) -> dict[str, object]:
    """The same ids, each sequence swapped out and in every few tokens. Nothing is found in the device's prefix cache.

    A leader that is not of them runs all the time, since a leader is never preempted.
    """
    from scheduler.sampling_params import SamplingParams
    from tests.golden.reference import NUM_NEW_TOKENS, load_reference
    from worker.engine import EngineRequest
    from worker.llm import LLM

    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    tiers: dict[str, Any] = {"num_kv_blocks": SWAPPED_BLOCKS, "num_swap_blocks": SWAP_BLOCKS}
    options: dict[str, Any] = {"preemption_mode": "swap", "enable_prefix_caching": False, "check_invariants": "step"}
    with LLM(str(model), **tiers, **options) as llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        engine.add(EngineRequest("leader", (1, 2, 3), SamplingParams(max_tokens=2000, ignore_eos=True), seed=0))
        engine.step()
        ids: dict[str, list[int]] = {}
        num_swaps: dict[str, int] = {}
        for name, made in load_reference().items():
            engine.add(EngineRequest(name, tuple(made.prompt_ids), greedy, seed=0))
            ids[name] = []
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
    return {
        "ids": ids,
        "num_preemptions": stats.num_preemptions_swap,
        "num_swaps": num_swaps,
        "num_recomputed_tokens": stats.num_recomputed_tokens,
        "num_swapped_blocks": [stats.num_swapped_out_blocks, stats.num_swapped_in_blocks],
    }


def main() -> None:
    """Run one mode and print its outcome."""
    sys.meta_path.insert(0, NoTransformers())
    outcome = run(Path(sys.argv[1]), sys.argv[2])
    assert "transformers" not in sys.modules
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
