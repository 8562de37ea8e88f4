"""Streams of copies that lag behind the host and behind one another, as CUDA's may."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.unit.model_runner.late_device import LateDevice, LateEvent


@dataclass
class LateCopyEvent:
    """Comes to pass when somebody waits for it, or when polling finds that the stream has got there."""

    event: LateEvent
    stream: "LateCopyStream"

    def query(self) -> bool:
        """See CopyEvent. The stream moves on by a random piece of its work, or by none."""
        own = self.stream.own
        own.run_until(min(len(own.todo), own.num_done + self.stream.rng.choice((0, 0, 1, 2, 5))))
        return own.num_done >= self.event.after

    def synchronize(self) -> None:
        """See CopyEvent."""
        self.event.synchronize()

    def hold_compute(self) -> None:
        """See CopyEvent."""
        self.stream.compute.launch(self.event.synchronize)


@dataclass
class LateCopyStream:
    """A CopyStream beside `compute`, on which tests launch what writes and reads the blocks."""

    compute: LateDevice
    rng: random.Random
    own: LateDevice = field(default_factory=LateDevice)

    def run(self, work: Callable[[], None]) -> None:
        """See CopyStream."""
        self.own.launch(self.compute.record().synchronize)
        self.own.launch(work)

    def record(self) -> LateCopyEvent:
        """See CopyStream."""
        return LateCopyEvent(self.own.record(), self)


def late_streams(compute: LateDevice, seed: int) -> Callable[[torch.device], LateCopyStream]:
    """What makes the streams of SwapCopies: each is late in its own way."""
    rng = random.Random(seed)
    return lambda device: LateCopyStream(compute, random.Random(rng.random()))
