"""The order of things: each batch in turn, and within it ours and the peers, alternating."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.errors import BenchError
from ops.bench.machine import Disturbance, DisturbanceMeter
from ops.bench.parts import rotated
from ops.bench.peers.catalog import PeerKind
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


@dataclass(frozen=True, slots=True)
class PeerSide:
    """A peer that stands."""

    kind: PeerKind
    side: Side


@dataclass(slots=True)
class BatchResult:
    """All alternations at one batch; `peers` by name, each with as many runs. Mutated while it is measured."""

    batch: int
    lengths: list[Lengths]
    ours: list[OursRun] = field(default_factory=list)
    peers: dict[str, list[PeerRun]] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    check: TokenCheck | None = None


class Measurement:
    """Runs the sides against one another. `ours` and `peers` stand already; there may be no peers.

    vocab_size, block_size, dtype: of the engine. num_shared: tokens at the start of each prompt that are the same in
    all, which the prefix cache may find. checks_tokens: whether the engine has the peers' very weights.
    say: told one line after each run.
    """

    def __init__(
        self,
        ours: Side,
        peers: Sequence[PeerSide],
        *,
        vocab_size: int,
        block_size: int,
        dtype: str,
        seed: int,
        num_alternations: int,
        say: Callable[[str], None],
        num_shared: int = 0,
        checks_tokens: bool = True,
    ) -> None:
        self._ours = ours
        self._peers = peers
        self._sides = [ours, *(peer.side for peer in peers)]
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._dtype = dtype
        self._seed = seed
        self._num_alternations = num_alternations
        self._say = say
        self._num_shared = num_shared
        self._judge = next((peer for peer in peers if peer.kind.is_judge and checks_tokens), None)
        self.facts: dict[str, dict[str, Any]] = {}

    def run_batch(self, batch: int, lengths: list[Lengths]) -> BatchResult:
        """Get all sides ready for this batch, warm them up, and alternate. Raises BenchError."""
        num_kv_blocks = num_blocks_for(lengths, batch, self._block_size)
        self._ours.ask("prepare", batch=batch, num_kv_blocks=num_kv_blocks)
        result = BatchResult(batch, lengths, peers={peer.kind.name: [] for peer in self._peers})
        warm_up = self._requests(warm_up_lengths(lengths), f"{batch} warm-up")
        self._run_ours(warm_up)
        most = max(each.num_prompt + each.num_output for each in lengths)
        for peer in self._peers:
            self.facts[peer.kind.name] = peer.side.ask("prepare", batch=batch, num_kv_tokens=most)
            self._run_peer(peer.side, warm_up, batch)
        for alternation in range(self._num_alternations):
            requests = self._requests(lengths, f"{batch} {alternation}")
            self._alternate(result, requests, alternation)
            if alternation == 0 and self._judge is not None:
                result.check = self._check(self._judge, result, requests[0])
            self._tell(result)
        return result

    def _alternate(self, result: BatchResult, requests: list[BenchRequest], alternation: int) -> None:
        with DisturbanceMeter(self._ours, self._sides) as meter:
            result.ours.append(self._run_ours(requests))
        result.disturbances.append(meter.result())
        for peer in rotated(self._peers, alternation):
            with DisturbanceMeter(peer.side, self._sides) as meter:
                result.peers[peer.kind.name].append(self._run_peer(peer.side, requests, result.batch))
            result.disturbances.append(meter.result())

    def _requests(self, lengths: list[Lengths], salt: str) -> list[BenchRequest]:
        return make_requests(
            lengths, vocab_size=self._vocab_size, seed=self._seed, salt=salt, num_shared=self._num_shared
        )

    def _run_ours(self, requests: list[BenchRequest]) -> OursRun:
        run = OursRun(**self._ours.ask("run", requests=_plain(requests)))
        wanted = sum(request.num_output for request in requests)
        if run.num_output_tokens != wanted:
            raise BenchError(f"the engine made {run.num_output_tokens} tokens instead of {wanted}")
        if run.num_prefix_hits and not self._num_shared:
            raise BenchError(
                f"{run.num_prefix_hits} prompt tokens came from the prefix cache instead of being computed"
            )
        return run

    @staticmethod
    def _run_peer(peer: Side, requests: list[BenchRequest], batch: int) -> PeerRun:
        return PeerRun(**peer.ask("run", requests=_plain(requests), batch=batch))

    def _check(self, judge: PeerSide, result: BatchResult, request: BenchRequest) -> TokenCheck:
        ours, theirs = result.ours[-1].first_ids, result.peers[judge.kind.name][-1].first_ids
        if ours == theirs:
            return TokenCheck(result.batch, len(ours), "equal")
        position = next(i for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other)
        gap = max(judge.side.ask("judge", prompt_ids=request.prompt_ids, ids=ours))
        if gap == 0:  # the peer chose ids that its tokenizer doesn't know, or its padded batch rounds otherwise
            return TokenCheck(result.batch, len(ours), "equal")
        verdict = "tie" if gap <= TIE_GAP[self._dtype] else "different"
        return TokenCheck(result.batch, len(ours), verdict, position, gap)

    def _tell(self, result: BatchResult) -> None:
        words = f"batch {result.batch}, {len(result.ours)} of {self._num_alternations}: "
        words += f"ours {result.ours[-1].tokens_per_s:.1f} tokens/s"
        for name, runs in result.peers.items():
            words += f", {name} {runs[-1].tokens_per_s:.1f}"
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
