"""The side of `transformers` generate on the same weights, as a static batch or one by one.

    python -m ops.bench.peers.transformers_static '{"model_path": ..., "cache_dir": ..., "dtype": ..., ...}'

It is run as it performs best without changes to it: inference mode, SDPA attention, its default KV cache, torch's own
number of threads unless one was asked for.
"""

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from model.tokenizer import Tokenizer
from ops.bench.errors import BenchError
from ops.bench.peers.streaming import Request
from ops.bench.peers.transformers_model import PAD_ID, LoadedModel
from ops.bench.runs import PeerRun
from ops.bench.serving import serve

if TYPE_CHECKING:
    import torch


class TransformersPeer(LoadedModel):
    """A static batch, or one by one."""

    def prepare(self, batch: int = 1, num_kv_tokens: int = 0) -> dict[str, Any]:
        """Load the model, which is the same for every batch; answers what it runs with."""
        return self._load()

    def run(self, requests: list[Request], batch: int) -> dict[str, Any]:
        """Take the requests in groups of `batch`, each until its longest reply is reached; answers a PeerRun."""
        reply_s: list[float] = []
        num_steps = 0
        first_ids: list[int] = []
        started = time.perf_counter()
        for start in range(0, len(requests), batch):
            group = requests[start : start + batch]
            group_started = time.perf_counter()
            replies = self._generate(group)
            reply_s.extend([time.perf_counter() - group_started] * len(group))
            num_steps += max(num_output for _, num_output in group)
            if start == 0:
                first_ids = replies[0]
        run = PeerRun(
            wall_s=time.perf_counter() - started,
            num_output_tokens=sum(num_output for _, num_output in requests),
            num_steps=num_steps,
            reply_s=reply_s,
            first_ids=first_ids,
        )
        return asdict(run)

    def _generate(self, group: list[Request]) -> list[list[int]]:
        """Each request's wanted ids. Raises BenchError where the peer stops early: its time would count for less."""
        import torch

        input_ids, mask = left_padded([prompt_ids for prompt_ids, _ in group])
        longest = max(num_output for _, num_output in group)
        with torch.inference_mode():
            ids = self._model.generate(
                input_ids.to(self._device), attention_mask=mask.to(self._device), max_new_tokens=longest
            )
        generated = ids[:, input_ids.shape[1] :].tolist()
        if len(generated[0]) != longest:
            raise BenchError(f"generate made {len(generated[0])} tokens instead of {longest}")
        return [reply[:num_output] for reply, (_, num_output) in zip(generated, group, strict=True)]

    def judge(self, prompt_ids: list[int], ids: list[int]) -> list[float]:
        """For each of `ids`, by how much the peer's largest logit exceeds this id's, given all that is before it.

        Only ids that the tokenizer knows are looked at: the engine draws no others.
        """
        import torch

        vocab_size = Tokenizer.from_checkpoint(self._path, self._load_format).vocab_size
        with torch.inference_mode():
            known = torch.tensor([prompt_ids + ids[:-1]], device=self._device)
            logits = self._model(known).logits[0, len(prompt_ids) - 1 :, :vocab_size].float()
        chosen = logits.gather(1, torch.tensor(ids, device=self._device)[:, None])[:, 0]
        gaps: list[float] = (logits.max(dim=1).values - chosen).tolist()
        return gaps


def left_padded(prompts: list[list[int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Ids and attention mask, int64 [num_prompts, longest prompt]: every prompt ends in the last column."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = [[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def main() -> None:
    """Entry point of the process."""
    peer = TransformersPeer(**json.loads(sys.argv[1]))
    serve({"prepare": peer.prepare, "run": peer.run, "judge": peer.judge})


if __name__ == "__main__":
    main()
