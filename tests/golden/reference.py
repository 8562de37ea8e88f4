"""Greedy continuations by `transformers`, the oracle of the golden tests."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REFERENCE: Final = Path(__file__).with_name("smollm2_greedy.json")
NUM_NEW_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Continuation:
    """What greedy decoding adds to a prompt.

    gaps: for each new token, by how much its logit exceeded the second largest. Where a gap is below 1e-4, another
    order of additions may rightly choose the other token.
    """

    prompt_ids: list[int]
    ids: list[int]
    gaps: list[float]


def load_reference(path: Path = REFERENCE) -> dict[str, Continuation]:
    """The stored continuations, by the name of their prompt."""
    stored = json.loads(path.read_text())
    return {name: Continuation(**entry) for name, entry in stored["continuations"].items()}


def load_oracle(model_path: Path) -> Any:
    """LlamaForCausalLM in float32, with transformers' own reading and dequantising of the GGUF file."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    # An end of sequence is a token like any other here: plain argmax, 64 tokens from every prompt.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def continue_greedily(model: Any, prompt_ids: list[int]) -> Continuation:
    """The 64 likeliest next tokens, one prompt at a time, without padding."""
    import torch

    prompt = torch.tensor([prompt_ids])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.cat(made.logits).topk(2).values
    gaps = (top[:, 0] - top[:, 1]).tolist()
    return Continuation(prompt_ids, made.sequences[0, len(prompt_ids) :].tolist(), [round(gap, 6) for gap in gaps])


def recompute(model: Any, made: Continuation) -> list[int]:
    """Each new token anew, from the prompt and the stored tokens before it, in one pass instead of 64.

    By induction the result equals `made.ids` exactly where greedy decoding would give them again.
    """
    import torch

    ids = torch.tensor([made.prompt_ids + made.ids[:-1]])
    with torch.inference_mode():
        logits = model(ids, use_cache=False, logits_to_keep=NUM_NEW_TOKENS).logits
    tokens: list[int] = logits[0].argmax(-1).tolist()
    return tokens


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
