"""Streams that copies between the tiers run on, beside the step's computation.

compute   ── step 1 ──┬── step 2 ────────────┬── step 3          the stream that steps are launched on
                      │ run()                │ hold_compute()
copies                └── copy ── record() ──┘
"""

from collections.abc import Callable
from typing import Protocol

import torch


class CopyEvent(Protocol):
    """Comes to pass when all that its stream was asked for before has been done."""

    def query(self) -> bool:
        """Whether it has."""
        ...

    def synchronize(self) -> None:
        """Have the host wait for it."""
        ...

    def hold_compute(self) -> None:
        """Have whatever is launched on the compute stream from now on wait for it; the host goes on."""
        ...


class CopyStream(Protocol):
    """Work that is done one after the other: a stream of CUDA's, nothing on the CPU, or a double in tests."""

    def run(self, work: Callable[[], None]) -> None:
        """Begin this, after all that was asked for here and all that was launched on the compute stream so far."""
        ...

    def record(self) -> CopyEvent:
        """The end of what was asked for so far."""
        ...


class CudaCopyStream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> None:
        """See CopyStream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> "CudaCopyEvent":
        """See CopyStream."""
        return CudaCopyEvent(self._stream.record_event(), self._device)


class CudaCopyEvent:
    """A CUDA event."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        """See CopyEvent."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """See CopyEvent."""
        self._event.synchronize()

    def hold_compute(self) -> None:
        """See CopyEvent."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class AtOnce:
    """The CPU's: work has been done when `run` returns. It is its own event."""

    def run(self, work: Callable[[], None]) -> None:
        """See CopyStream."""
        work()

    def record(self) -> "AtOnce":
        """See CopyStream."""
        return self

    def query(self) -> bool:
        """See CopyEvent."""
        return True

    def synchronize(self) -> None:
        """See CopyEvent."""

    def hold_compute(self) -> None:
        """See CopyEvent."""


def copy_stream(device: torch.device) -> CopyStream:
    """A new stream beside the device's compute stream."""
    return CudaCopyStream(device) if device.type == "cuda" else AtOnce()
