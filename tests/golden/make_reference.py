"""Makes smollm2_greedy.json: python -m tests.golden.make_reference [path of the GGUF file]

Takes some minutes. What was made by the same versions from the same weights is kept, so it can be interrupted.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import platformdirs

from model.loader import load_checkpoint
from model.tokenizer import Tokenizer
from tests.golden.reference import REFERENCE, Continuation, continue_greedily, load_oracle, sha256_of
from tests.golden.reference_prompts import reference_prompts
from worker.demo_model import ensure_demo_model


def main() -> None:
    """Make what is missing."""
    import torch
    import transformers

    arguments = sys.argv[1:]
    path = Path(arguments[0]) if arguments else ensure_demo_model(platformdirs.user_cache_path("pagemill"))
    origin = {
        "model": path.name,
        "sha256": sha256_of(path),
        "made_by": "transformers LlamaForCausalLM.generate, float32 on the CPU, GGUF read by transformers",
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }
    stored = json.loads(REFERENCE.read_text()) if REFERENCE.is_file() else {}
    kept = stored["continuations"] if stored.get("origin") == origin else {}
    model = load_oracle(path)
    for name, tensor in load_checkpoint(path).weights.items():
        if not torch.equal(tensor, model.state_dict()[name]):
            raise SystemExit(f"{name} is dequantised differently by transformers and by us")
    made: dict[str, dict[str, object]] = {}
    for name, prompt_ids in reference_prompts(Tokenizer.from_checkpoint(path)).items():
        entry = kept.get(name)
        if entry is None or entry["prompt_ids"] != prompt_ids:
            entry = asdict(continue_greedily(model, prompt_ids))
        made[name] = entry
        _write(origin, made)
        _report(name, Continuation(**entry))


def _write(origin: dict[str, str], made: dict[str, dict[str, object]]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in made.items()]
    text = f'{{"origin": {json.dumps(origin, indent=1)},\n"continuations": {{\n' + ",\n".join(lines) + "\n}}\n"
    partial = REFERENCE.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(REFERENCE)


def _report(name: str, made: Continuation) -> None:
    sys.stdout.write(f"{name}: {len(made.prompt_ids)} tokens, smallest gap {min(made.gaps):.6f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
