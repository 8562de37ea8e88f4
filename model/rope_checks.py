"""The numbers of a rotary embedding, checked before one is made: a table of NaN would only show as nonsense."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from model.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from model.config import ModelConfig

# What a kind can't be computed without; everything else has a default.
_REQUIRED: Final = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ABOVE_0: Final = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_FROM_0: Final = ("mscale", "mscale_all_dim")
_LISTS: Final = ("short_factor", "long_factor")
_TRAINED: Final = "original_max_position_embeddings"


def check_rope(config: "ModelConfig", origin: str) -> None:
    """Raise CorruptCheckpointError, which names the file (`origin`), the field and what is allowed."""
    rope = config.rope
    num_rotated = int(config.head_dim * rope.partial_rotary_factor)
    smallest = 4 if rope.kind == "dynamic" else 2
    if num_rotated % 2 or not smallest <= num_rotated <= config.head_dim:
        raise CorruptCheckpointError(
            f"{origin}: partial_rotary_factor is {rope.partial_rotary_factor}, so that {num_rotated} of the "
            f"{config.head_dim} elements of a head are rotated: it must make an even number from {smallest} to "
            f"{config.head_dim}"
        )
    if rope.kind == "yarn" and rope.theta <= 1:
        raise CorruptCheckpointError(f"{origin}: rope_theta is {rope.theta}: with yarn it must be a number above 1")
    for name in _REQUIRED.get(rope.kind, ()):
        if name not in rope.params:
            raise CorruptCheckpointError(f"{origin}: RoPE scaling of kind {rope.kind!r} lacks {name}: add it")
    _check_numbers(rope.params, num_rotated // 2, origin)
    low, high = rope.params.get("low_freq_factor"), rope.params.get("high_freq_factor")
    if rope.kind == "llama3" and not high > low:  # type: ignore[operator]  # both are required, and numbers
        _fail(origin, "high_freq_factor", high, f"a number above low_freq_factor, which is {low}")


def _check_numbers(params: Mapping[str, Any], num_pairs: int, origin: str) -> None:
    for name, value in params.items():
        if name in _ABOVE_0 and not (_is_number(value) and value > 0):
            _fail(origin, name, value, "a number above 0")
        if name in _FROM_0 and not (_is_number(value) and value >= 0):
            _fail(origin, name, value, "a number from 0")
        if name == _TRAINED and not (_is_number(value) and value >= 2 and value == int(value)):
            _fail(origin, name, value, "a whole number from 2")
        if name in _LISTS and not _is_list_of_factors(value, num_pairs):
            _fail(origin, name, value, f"a list of {num_pairs} numbers above 0")


def _is_list_of_factors(value: Any, num_pairs: int) -> bool:
    return isinstance(value, list) and len(value) == num_pairs and all(_is_number(item) and item > 0 for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fail(origin: str, name: str, value: Any, allowed: str) -> None:
    found = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
    raise CorruptCheckpointError(f"{origin}: RoPE scaling's {name} is {found}: it must be {allowed}")
