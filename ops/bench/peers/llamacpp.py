"""llama.cpp's side, through the binding `xllamacpp`: its server with as many slots as the batch.

    python -m ops.bench.peers.llamacpp '{"model_path": ..., "cache_dir": ..., "weights": "F32", "num_threads": ...}'

Each request is a thread that waits for its pieces. A piece is a token's text, but for tokens that end in the middle of
a letter, which come with the next one: those that are missing in the end are counted at the last piece's time. Ids are
not told. `weights` is the type of all matrices; see gguf_files.py.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ops.bench.errors import BenchError
from ops.bench.peers.gguf_files import converted
from ops.bench.peers.streaming import Played, Request, handlers_of
from ops.bench.serving import serve

# A slot's context is a multiple of this.
CONTEXT_STEP: Final = 256
# Warnings and errors.
VERBOSITY: Final = 1


class LlamaCppPeer:
    """A StreamingPeer. The server is made anew for another batch."""

    def __init__(
        self, model_path: str, cache_dir: str, weights: str, num_threads: int | None, shares_prefix: bool = False
    ) -> None:
        self._path = converted(Path(model_path), weights, Path(cache_dir))
        self._weights = weights
        self._num_threads = num_threads
        self._shares_prefix = shares_prefix
        self._made: tuple[int, int] | None = None
        self._server: Any = None

    def prepare(self, batch: int, num_kv_tokens: int) -> dict[str, Any]:
        """See StreamingPeer."""
        import xllamacpp

        if self._made != (batch, num_kv_tokens):
            self._server = None
            self._server = xllamacpp.Server(self._params(batch, num_kv_tokens))
            self._made = (batch, num_kv_tokens)
        return {"version": xllamacpp.__version__, "weights": self._weights, "threads": self._num_threads}

    def _params(self, batch: int, num_kv_tokens: int) -> Any:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(self._path)
        params.n_parallel = batch
        # Slots share the context evenly: each is as long as the longest request could be.
        params.n_ctx = batch * -(-num_kv_tokens // CONTEXT_STEP) * CONTEXT_STEP
        params.verbosity = VERBOSITY
        if not self._shares_prefix:
            params.cache_ram_mib = 0
        if self._num_threads is not None:
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._num_threads
        return params

    def play(self, requests: list[Request], arrivals_s: Sequence[float]) -> Played:
        """See StreamingPeer."""
        token_s: list[list[float]] = [[] for _ in requests]
        problems: list[str] = []
        started = time.perf_counter()
        threads = [
            threading.Thread(target=self._ask, args=(request, token_s[index], problems))
            for index, request in enumerate(requests)
        ]
        for thread, arrival in zip(threads, arrivals_s, strict=True):
            time.sleep(max(0.0, started + arrival - time.perf_counter()))
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise BenchError(problems[0])
        return Played(started, token_s, [])

    def _ask(self, request: Request, times: list[float], problems: list[str]) -> None:
        prompt_ids, num_output = request

        def take(piece: dict[str, Any]) -> bool:
            now = time.perf_counter()
            if "choices" not in piece:
                problems.append(f"llama.cpp answered {json.dumps(piece)}")
            elif piece["choices"][0]["finish_reason"] is None:
                times.append(now)
            else:
                times.extend([now] * (piece["usage"]["completion_tokens"] - len(times)))
            return False

        wanted = {
            "prompt": prompt_ids,
            "n_predict": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": self._shares_prefix,
            "stream": True,
        }
        try:
            self._server.handle_completions(wanted, take)
        except Exception as error:  # of whatever kind: a thread must not die unheard
            problems.append(f"{type(error).__name__}: {error}")


def main() -> None:
    """Entry point of the process."""
    serve(handlers_of(LlamaCppPeer(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
