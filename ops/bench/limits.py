"""What this machine can do at most, measured: reading memory, and multiplying matrices.

    python -m ops.bench.limits '{"dtype": ..., "device": ..., "num_threads": ...}'

The best of a few tries each, since whatever disturbs a try only makes it slower.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from model.threads import set_num_threads
from ops.bench.serving import serve

# More than any cache holds.
READ_BYTES: Final = {"cpu": 256 << 20, "cuda": 4 << 30}
# A square product of this size is bound by arithmetic.
MATRIX_SIZE: Final = {"cpu": 2048, "cuda": 8192}
TRIES: Final = 8


class Limits:
    """Measures on the threads that the engine would take."""

    def __init__(self, dtype: str, device: str, num_threads: int | None) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        self._num_threads = num_threads

    def measure(self) -> dict[str, Any]:
        """Bytes read a second, floating-point operations a second, and on what."""
        threads = set_num_threads(self._num_threads)
        is_cuda = self._device.type == "cuda"
        return {
            "read_bytes_per_s": self._read_rate(),
            "operations_per_s": self._product_rate(),
            "threads": threads,
            "device": torch.cuda.get_device_name(self._device) if is_cuda else "cpu",
        }

    def _read_rate(self) -> float:
        """A sum reads every element once and writes nothing."""
        num_bytes = READ_BYTES[self._device.type]
        values = torch.ones(num_bytes // 4, dtype=torch.float32, device=self._device)
        return num_bytes / self._least_seconds(values.sum)

    def _product_rate(self) -> float:
        size = MATRIX_SIZE[self._device.type]
        left = torch.ones(size, size, dtype=self._dtype, device=self._device)
        return 2 * size**3 / self._least_seconds(lambda: left @ left)

    def _least_seconds(self, work: Callable[[], object]) -> float:
        least = float("inf")
        for _ in range(TRIES):
            self._wait()
            started = time.perf_counter()
            work()
            self._wait()
            least = min(least, time.perf_counter() - started)
        return least

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def main() -> None:
    """Entry point of the process."""
    serve({"measure": Limits(**json.loads(sys.argv[1])).measure})


if __name__ == "__main__":
    main()
