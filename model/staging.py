"""What a step hands to the device, in one copy, and what it hands back, without waiting.

A copy from pinned memory reads its source when it runs, not when it is asked for. Pinned memory that is written again
too early is thus somebody's corrupted step; here each piece of it has an event, which is waited for first:

    ring      | buffer 0 | buffer 1 | buffer 2 |        begin() takes the next one, once its last copy has run
                   │
                   └─ put(a) put(b) put(c) ── flush() ──►  device buffer, the same one each step, one copy

The device side is one buffer, since whatever reads it is launched on the same stream before the next step's copy is. So
addresses stay, which CUDA graphs rely on.
"""

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

# Starts of arrays in the buffer: vector loads of any kernel, and Triton's idea of a well-aligned pointer.
ALIGNMENT: Final = 256
NUM_BUFFERS: Final = 3


class Event(Protocol):
    """Something that comes to pass on the device."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Transport(Protocol):
    """Moves bytes between host and device in the order of the current stream: CUDA's, or a double of it in tests."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] that copies can read and write while the host goes on."""
        ...

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the device, aligned to ALIGNMENT."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy; it runs when the stream gets there."""
        ...

    def record(self) -> Event:
        """What has passed once all that was begun so far has ended."""
        ...


class CudaTransport:
    """The current CUDA stream's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """See Transport."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """See Transport. Torch's allocator aligns to 512 bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Transport."""
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        """See Transport."""
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


@dataclass(slots=True)
class _Buffer:
    """One piece of pinned memory. `asides` are arrays that had no room in it; they live as long as its copy runs."""

    memory: torch.Tensor
    copied: Event | None = None
    asides: list[torch.Tensor] = field(default_factory=list)


class Staging:
    """Owns the ring and the device buffer. begin, any number of put, flush; again.

    What `put` returns may be read by what is launched after `flush` and before the next `flush`, on the same stream.
    """

    def __init__(self, transport: Transport, capacity_bytes: int, num_buffers: int = NUM_BUFFERS) -> None:
        self._transport = transport
        self._capacity = -(-capacity_bytes // ALIGNMENT) * ALIGNMENT
        self._ring = [_Buffer(transport.host_memory(self._capacity)) for _ in range(num_buffers)]
        self._on_device = transport.device_memory(self._capacity)
        self._turn = 0
        self._end = 0

    def begin(self) -> None:
        """Start a step: wait until the next pinned buffer is free, which it is unless the device lags far behind."""
        self._turn = (self._turn + 1) % len(self._ring)
        buffer = self._ring[self._turn]
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        buffer.asides.clear()
        self._end = 0

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A device tensor of the array's shape and type, which holds it after `flush`.

        The first arrays of a step lie at the same addresses each time, as long as their sizes are the same.
        """
        start, self._end = self._end, self._end + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if self._end > self._capacity:
            self._end = start
            return self._put_aside(array)
        end = start + array.nbytes
        _write(array, self._ring[self._turn].memory[start:end])
        return _view(self._on_device[start:end], array)

    def flush(self) -> None:
        """Begin the copy of all that was put."""
        buffer = self._ring[self._turn]
        if self._end:
            self._transport.copy(self._on_device[: self._end], buffer.memory[: self._end])
        buffer.copied = self._transport.record()

    def _put_aside(self, array: npt.NDArray[Any]) -> torch.Tensor:
        host, on_device = self._transport.host_memory(array.nbytes), self._transport.device_memory(array.nbytes)
        _write(array, host)
        self._transport.copy(on_device, host)
        self._ring[self._turn].asides.append(host)
        return _view(on_device, array)


class HostCopy:
    """A tensor's values on their way to the host, begun when this is made; of a CPU tensor they are there already."""

    def __init__(self, tensor: torch.Tensor, transport: Transport | None) -> None:
        """`transport` is None where the tensor lies on the CPU."""
        if transport is None:
            self._values, self._arrived = tensor, None
            return
        source = tensor.contiguous()
        memory = transport.host_memory(source.nbytes)
        self._values = memory.view(source.dtype).view(source.shape)
        transport.copy(self._values, source)
        self._arrived = transport.record()

    def numpy(self) -> npt.NDArray[Any]:
        """The values; waits for their arrival, and for nothing that was launched after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        values: npt.NDArray[Any] = self._values.numpy()
        return values


def transport_for(device: torch.device) -> Transport | None:
    """None on the CPU, where nothing has to be moved."""
    return CudaTransport(device) if device.type == "cuda" else None


def _write(array: npt.NDArray[Any], memory: torch.Tensor) -> None:
    target: npt.NDArray[Any] = memory.numpy()
    target.view(array.dtype).reshape(array.shape)[...] = array


def _view(memory: torch.Tensor, array: npt.NDArray[Any]) -> torch.Tensor:
    return memory.view(_DTYPES[array.dtype]).view(array.shape)


_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
