"""The side of `transformers`' own continuous batching, the manager behind `generate_batch`, on the same weights.

    python -m ops.bench.peers.transformers_continuous '{"model_path": ..., "cache_dir": ..., "dtype": ..., ...}'

`generate_batch` has one length for all replies, so requests go to its manager, one by one and each with its own length.
SDPA attention, in pages of the size that it chooses; its cache is as large as the requests of a batch need.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from ops.bench.errors import BenchError
from ops.bench.peers.streaming import Played, Request, handlers_of
from ops.bench.peers.transformers_model import LoadedModel
from ops.bench.serving import serve

# Tokens of a page, transformers' own default.
PAGE_TOKENS: Final = 256
# Tokens that a step may compute, as our engine on a CPU: without a limit of its own it would take what a GPU can.
MAX_BATCH_TOKENS: Final = 512
POLL_S: Final = 1.0


class ContinuousPeer(LoadedModel):
    """A StreamingPeer. Its thread runs while it plays, and is gone while it sleeps."""

    def prepare(self, batch: int, num_kv_tokens: int) -> dict[str, Any]:
        """See StreamingPeer."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        facts = self._load()
        self._model.destroy_cached_continuous_batching_manager()
        self._config: Any = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=batch * (-(-num_kv_tokens // PAGE_TOKENS) + 1),
            max_batch_tokens=max(MAX_BATCH_TOKENS, batch),
            max_requests_per_batch=batch,
        )
        return facts

    def play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        """See StreamingPeer."""
        import torch

        token_s: list[list[float]] = [[] for _ in requests]
        first_ids: list[int] = []
        num_added = num_done = 0
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=self._model.generation_config,
                continuous_batching_config=self._config,
                persistent_manager=True,
                warmup=False,
            ) as manager,
        ):
            started = time.perf_counter()
            while num_done < len(requests):
                now = time.perf_counter() - started
                while num_added < len(requests) and arrivals_s[num_added] <= now:
                    prompt_ids, num_output = requests[num_added]
                    manager.add_request(
                        prompt_ids,
                        request_id=str(num_added),
                        max_new_tokens=num_output,
                        record_timestamps=True,
                        eos_token_id=-1,
                    )
                    num_added += 1
                wait_s = POLL_S if num_added == len(requests) else max(0.001, arrivals_s[num_added] - now)
                result = manager.get_result(timeout=min(POLL_S, wait_s))
                if result is None:
                    if not manager.is_running():
                        raise BenchError("transformers' continuous batching ended before its requests did")
                    continue
                if not result.is_finished():
                    continue
                if result.error is not None:
                    raise BenchError(f"transformers' continuous batching: {result.error}")
                index = int(result.request_id)
                token_s[index] = list(result.timestamps)
                if index == 0:
                    first_ids = list(result.generated_tokens)
                num_done += 1
        return Played(started, token_s, first_ids)


def main() -> None:
    """Entry point of the process."""
    serve(handlers_of(ContinuousPeer(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
