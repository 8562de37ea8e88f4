"""A device that runs behind the host: what it is asked for happens when somebody waits for it, and not before."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class LateEvent:
    """Comes to pass once the device has done all that was asked before it."""

    device: "LateDevice"
    after: int

    def synchronize(self) -> None:
        """Have the device catch up to here."""
        self.device.run_until(self.after)


@dataclass
class LateDevice:
    """A stream of work, as staging.Transport; copies read their source when they run, as CUDA's do."""

    todo: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0
    num_copies: int = 0
    num_waits: int = 0

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """See Transport."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """See Transport. Garbage, until something is copied there."""
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Transport."""
        self.num_copies += 1
        self.launch(lambda: target.copy_(source))

    def launch(self, work: Callable[[], object]) -> None:
        """Have this done after all that was asked for before."""
        self.todo.append(work)

    def record(self) -> LateEvent:
        """See Transport."""
        return LateEvent(self, len(self.todo))

    def run_until(self, number: int) -> None:
        """Do what was asked for before the work of this number."""
        if self.num_done < number:
            self.num_waits += 1
        while self.num_done < number:
            self.todo[self.num_done]()
            self.num_done += 1


class PromptDevice(LateDevice):
    """Does at once what it is asked for, like the CPU."""

    def launch(self, work: Callable[[], object]) -> None:
        """See LateDevice."""
        super().launch(work)
        self.run_until(len(self.todo))
