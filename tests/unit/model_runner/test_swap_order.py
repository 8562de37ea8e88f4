"""The order of copies between the tiers: on streams that lag behind, no block is copied too early or given too soon."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from model.copy_streams import CopyStream
from model.cpu_tier import CpuTier
from model.swap_copies import SwapCopies
from scheduler.output import BlockCopy, Transfer
from tests.unit.model_runner.late_device import LateDevice
from tests.unit.model_runner.late_streams import LateCopyEvent, LateCopyStream, late_streams

SHAPE = (2, 2, 8, 1, 4)
NUM_BLOCKS, NUM_CPU_BLOCKS = 12, 24
NUM_STEPS = 200
Streams = Callable[[torch.device], CopyStream]


@dataclass
class Content:
    """What somebody has written to as many blocks as this has numbers: `blocks` are on the device, or in the tier."""

    numbers: list[float]
    blocks: list[int]


@dataclass
class Life:
    """Owners of blocks who write, are swapped out, come back elsewhere and find what they have written.

    Kernels are launched on `compute`, which is as late as the copies. A block goes to the next owner, who writes to it
    at once, as soon as its transfer was named.
    """

    compute: LateDevice
    copies: SwapCopies
    blocks: torch.Tensor
    rng: random.Random
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    free_cpu: list[int] = field(default_factory=lambda: list(range(NUM_CPU_BLOCKS)))
    here: list[Content] = field(default_factory=list)
    away: list[Content] = field(default_factory=list)
    moving: dict[int, tuple[Content, list[int], bool]] = field(default_factory=dict)
    wrong: list[int] = field(default_factory=list)
    num_returned: int = 0

    def step(self, number: int) -> None:
        """What a step of the engine does with blocks, in its order."""
        outs, ins = [], []
        if self.here and self.rng.random() < 0.5 and len(self.free_cpu) >= 4:
            outs.append(self._move(2 * number, self.here, self.free_cpu, is_out=True))
        if self.away and self.rng.random() < 0.5 and len(self.free) >= 4:
            ins.append(self._move(2 * number + 1, self.away, self.free, is_out=False))
        self.copies.begin(outs, ins)
        if len(self.free) >= 4 and self.rng.random() < 0.7:
            self._write(number)
        for content in self.here:
            self._check(content)
        for among, free in ((self.here, self.free), (self.away, self.free_cpu)):
            if among and self.rng.random() < 0.25:  # one ends: whoever gets its blocks writes to them at once
                free.extend(among.pop(self.rng.randrange(len(among))).blocks)
        for result in self.copies.ended(is_waiting=not self.here):
            content, places, is_out = self.moving.pop(result.transfer_id)
            self.wrong.extend(result.failed_dst)
            (self.free if is_out else self.free_cpu).extend(content.blocks)
            content.blocks = places
            (self.away if is_out else self.here).append(content)
            self.num_returned += not is_out
            self.rng.shuffle(self.free)

    def _move(self, transfer_id: int, among: list[Content], free: list[int], *, is_out: bool) -> Transfer:
        content = among.pop(self.rng.randrange(len(among)))
        places = [free.pop() for _ in content.blocks]
        self.moving[transfer_id] = (content, places, is_out)
        return Transfer(transfer_id, tuple(BlockCopy(*pair) for pair in zip(content.blocks, places, strict=True)))

    def _write(self, number: int) -> None:
        count = self.rng.randint(1, 4)
        content = Content([10.0 * number + at for at in range(count)], [self.free.pop() for _ in range(count)])
        for block, value in zip(content.blocks, content.numbers, strict=True):
            self.compute.launch(partial(self.blocks[block].fill_, value))
        self.here.append(content)

    def _check(self, content: Content) -> None:
        """A kernel that reads the blocks, when it runs."""
        for block, value in zip(tuple(content.blocks), content.numbers, strict=True):
            self.compute.launch(partial(self._read, block, value))

    def _read(self, block: int, value: float) -> None:
        if not bool((self.blocks[block] == value).all()):
            self.wrong.append(block)


def lived(new_stream: Callable[[LateDevice], Streams], seed: int, *, is_staging: bool = False) -> Life:
    """A whole life, to its last kernel."""
    rng, compute = random.Random(seed), LateDevice()
    blocks = torch.zeros(NUM_BLOCKS, *SHAPE)
    tier = CpuTier(NUM_CPU_BLOCKS, SHAPE, torch.float32)
    life = Life(compute, SwapCopies(blocks, tier, is_staging=is_staging, new_stream=new_stream(compute)), blocks, rng)
    for number in range(NUM_STEPS):
        life.step(number)
        compute.run_until(rng.randint(compute.num_done, len(compute.todo)))
    compute.run_until(len(compute.todo))
    assert life.num_returned > NUM_STEPS / 10
    return life


@pytest.mark.parametrize("is_staging", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_however_late_copies_and_kernels_run_everybody_finds_what_they_wrote(seed: int, is_staging: bool) -> None:
    life = lived(lambda compute: late_streams(compute, seed), seed, is_staging=is_staging)
    assert life.wrong == [], f"seed {seed}"


class NotAfterCompute(LateCopyStream):
    """Breaks rule 1: it doesn't wait for the kernels that write its blocks."""

    def run(self, work: Callable[[], None]) -> None:
        """See CopyStream."""
        self.own.launch(work)


class NamedTooSoon(LateCopyEvent):
    """Has come to pass before the copy was made."""

    def query(self) -> bool:
        """See CopyEvent."""
        return True

    def hold_compute(self) -> None:
        """See CopyEvent."""


class ToldTooSoon(LateCopyStream):
    """Breaks rules 2 and 3: a block is somebody's again before its copy was made, and no kernel waits for it."""

    def record(self) -> LateCopyEvent:
        """See CopyStream."""
        return NamedTooSoon(self.own.record(), self)


@pytest.mark.parametrize("broken", [NotAfterCompute, ToldTooSoon])
def test_a_stream_that_breaks_a_rule_shows_as_damage(broken: type[LateCopyStream]) -> None:
    """So that the life above would have shown it."""
    life = lived(lambda compute: lambda device: broken(compute, random.Random(1)), 1)
    assert life.wrong
