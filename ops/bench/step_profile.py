"""Where a step's time goes: the clock is read around each kernel call, while the real step runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import model.decoder
import model.layers
import model.sampler
from model.decoder import Decoder

# The kernels of a step by the name under which the model calls them.
KERNELS: Final = (
    (model.layers, "paged_attention", "attention"),
    (model.layers, "rope_and_write", "rope and KV write"),
    (model.layers, "silu_and_mul", "silu"),
    (model.decoder, "rms_norm", "norms"),
    (model.decoder, "add_rms_norm", "norms"),
    (model.sampler, "sample", "sampling"),
)
HEAD: Final = "output layer"
LINEARS: Final = "linear layers"
REST: Final = "rest"


class StepProfile:
    """Seconds by what they were spent on, since the last `take`. What is not a kernel is the rest."""

    def __init__(self, decoder: Decoder) -> None:
        self._head = decoder.lm_head
        layer = decoder.layers[0]
        linears = (self._head, layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.down_proj)
        self._linear_kinds = {type(each) for each in linears}
        self._spent: dict[str, float] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it calls are timed. It costs a microsecond a call."""
        wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
            (module, name, self._timed(getattr(module, name), label)) for module, name, label in KERNELS
        ]
        wrapped += [(kind, "__call__", self._timed_linear(kind.__call__)) for kind in self._linear_kinds]
        with ExitStack() as stack:
            for owner, name, timed in wrapped:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, timed)
            yield

    def take(self, step_s: float) -> dict[str, float]:
        """What a step of `step_s` seconds was spent on, and begin again."""
        spent, self._spent = self._spent, {}
        return spent | {REST: step_s - sum(spent.values())}

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **values: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **values)
            self._spent[label] = self._spent.get(label, 0.0) + time.perf_counter() - started
            return result

        return timed

    def _timed_linear(self, call: Callable[..., Any]) -> Callable[..., Any]:
        head, layers = self._timed(call, HEAD), self._timed(call, LINEARS)

        @wraps(call)
        def timed(linear: Any, *args: Any, **values: Any) -> Any:
            return (head if linear is self._head else layers)(linear, *args, **values)

        return timed
