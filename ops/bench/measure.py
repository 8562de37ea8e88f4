"""The order of things: each batch in turn, and within it ours and the peer, alternating."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.errors import BenchError
from ops.bench.machine import Disturbance, DisturbanceMeter
from ops.bench.runs import OursRun, PeerRun
from ops.bench.side import Side
from ops.bench.workload import BenchRequest, Lengths, make_requests, warm_up_lengths

# By how much another token's logit may exceed the chosen one's where rounding alone can tell them apart.
TIE_GAP = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 0.5}


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Whether the first request got the peer's greedy tokens.

    verdict: `equal`, each is the peer's argmax; `tie` where they part at a token that the peer's own logits hardly
    prefer; `different`. position: of the first token that differs. gap: by how much the peer's logits, given our tokens
    so far, ever prefer another one than ours.
    """

    batch: int
    num_tokens: int
    verdict: str
    position: int | None = None
    gap: float | None = None


@dataclass(slots=True)
class BatchResult:
    """All alternations at one batch; `peer` is empty where there is none. Mutated while it is measured."""

    batch: int
    lengths: list[Lengths]
    ours: list[OursRun] = field(default_factory=list)
    peer: list[PeerRun] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    check: TokenCheck | None = None


class Measurement:
    """Runs the sides against one another. `ours` and `peer` stand already; `peer` may be missing.

    vocab_size, block_size, dtype: of the engine. say: told one line after each run.
    """

    def __init__(
        self,
        ours: Side,
        peer: Side | None,
        *,
        vocab_size: int,
        block_size: int,
        dtype: str,
        seed: int,
        num_alternations: int,
        say: Callable[[str], None],
    ) -> None:
        self._ours = ours
        self._peer = peer
        self._sides = [ours] if peer is None else [ours, peer]
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._dtype = dtype
        self._seed = seed
        self._num_alternations = num_alternations
        self._say = say

    def run_batch(self, batch: int, lengths: list[Lengths]) -> BatchResult:
        """Build the engine for this batch, warm both sides up, and alternate. Raises BenchError."""
        self._ours.ask("prepare", batch=batch, num_kv_blocks=num_blocks_for(lengths, batch, self._block_size))
        result = BatchResult(batch, lengths)
        warm_up = self._requests(warm_up_lengths(lengths), f"{batch} warm-up")
        self._run_ours(warm_up)
        if self._peer is not None:
            self._run_peer(self._peer, warm_up, batch)
        for alternation in range(self._num_alternations):
            requests = self._requests(lengths, f"{batch} {alternation}")
            self._alternate(result, requests)
            if alternation == 0 and self._peer is not None:
                result.check = self._check(self._peer, result, requests[0])
            self._tell(result)
        return result

    def _alternate(self, result: BatchResult, requests: list[BenchRequest]) -> None:
        with DisturbanceMeter(self._ours, self._sides) as meter:
            result.ours.append(self._run_ours(requests))
        result.disturbances.append(meter.result())
        if self._peer is not None:
            with DisturbanceMeter(self._peer, self._sides) as meter:
                result.peer.append(self._run_peer(self._peer, requests, result.batch))
            result.disturbances.append(meter.result())

    def _requests(self, lengths: list[Lengths], salt: str) -> list[BenchRequest]:
        return make_requests(lengths, vocab_size=self._vocab_size, seed=self._seed, salt=salt)

    def _run_ours(self, requests: list[BenchRequest]) -> OursRun:
        run = OursRun(**self._ours.ask("run", requests=_plain(requests)))
        wanted = sum(request.num_output for request in requests)
        if run.num_output_tokens != wanted:
            raise BenchError(f"the engine made {run.num_output_tokens} tokens instead of {wanted}")
        if run.num_prefix_hits:
            raise BenchError(
                f"{run.num_prefix_hits} prompt tokens came from the prefix cache instead of being computed"
            )
        return run

    @staticmethod
    def _run_peer(peer: Side, requests: list[BenchRequest], batch: int) -> PeerRun:
        return PeerRun(**peer.ask("run", requests=_plain(requests), batch=batch))

    def _check(self, peer: Side, result: BatchResult, request: BenchRequest) -> TokenCheck:
        ours, theirs = result.ours[-1].first_ids, result.peer[-1].first_ids
        if ours == theirs:
            return TokenCheck(result.batch, len(ours), "equal")
        position = next(i for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other)
        gap = max(peer.ask("judge", prompt_ids=request.prompt_ids, ids=ours))
        if gap == 0:  # the peer chose ids that its tokenizer doesn't know, or its padded batch rounds otherwise
            return TokenCheck(result.batch, len(ours), "equal")
        verdict = "tie" if gap <= TIE_GAP[self._dtype] else "different"
        return TokenCheck(result.batch, len(ours), verdict, position, gap)

    def _tell(self, result: BatchResult) -> None:
        words = f"batch {result.batch}, {len(result.ours)} of {self._num_alternations}: "
        words += f"ours {result.ours[-1].tokens_per_s:.1f} tokens/s"
        if result.peer:
            words += f", transformers {result.peer[-1].tokens_per_s:.1f}"
        self._say(words)


def num_blocks_for(lengths: Sequence[Lengths], batch: int, block_size: int) -> int:
    """KV blocks that hold the `batch` largest sequences at once: nothing is ever preempted."""
    needed = sorted((-(-(each.num_prompt + each.num_output) // block_size) for each in lengths), reverse=True)
    return max(2, sum(needed[:batch]))


def _plain(requests: list[BenchRequest]) -> list[tuple[Any, int]]:
    return [(request.prompt_ids, request.num_output) for request in requests]


def say(line: str) -> None:
    """A line on stderr: stdout is for the result."""
    print(line, file=sys.stderr, flush=True)
