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
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SEED = 20260214
# Each of the long prompts alone needs 42 blocks of 16 with its reply: a few fit, all of them never do.
PREEMPTED_BLOCKS = 64
# Swapped: all of them don't fit into this one either.
SWAPPED_BLOCKS = 256
SWAP_BLOCKS = 1024


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
    from tests.golden.swapped_runs import run_swapped
    from worker.llm import LLM

    prompts = {name: made.prompt_ids for name, made in load_reference().items()}
    if mode == "swapped":
        return asdict(run_swapped(str(model), prompts, NUM_NEW_TOKENS, SWAPPED_BLOCKS, SWAP_BLOCKS))
    num_kv_blocks = PREEMPTED_BLOCKS if mode == "preempted" else 1024
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


def main() -> None:
    """Run one mode and print its outcome."""
    sys.meta_path.insert(0, NoTransformers())
    outcome = run(Path(sys.argv[1]), sys.argv[2])
    assert "transformers" not in sys.modules
    sys.stdout.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
