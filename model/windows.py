"""Which layers of a checkpoint attend over a sliding window, and over how many keys.

    keys      0 1 2 3 4 5 6 7        a window of 3: the query at position 6 sees keys 4, 5 and 6
    query 6   . . . . x x x
    query 7   . . . . . x x x

A window that no position outgrows is none: such a layer is computed as any other.
"""

from typing import Final

from model.config_values import ConfigValues
from model.errors import CorruptCheckpointError, UnsupportedModelError

Windows = tuple[int | None, ...]

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
# What transformers takes where config.json leaves `sliding_window` out; null is none.
_DEFAULT_WINDOW: Final = 4096
# And for `max_window_layers`: the layers before it see all keys.
_DEFAULT_FULL_LAYERS: Final = 28


def windows_of(values: ConfigValues, architecture: str, num_layers: int, max_positions: int) -> Windows:
    """The window of each layer (None: all keys), by config.json; empty where no layer has one.

    Raises CorruptCheckpointError for values that can't be, and UnsupportedModelError, by name, for layers that the
    architecture's class doesn't have.
    """
    kinds = _layer_types(values)
    window = _window(values, architecture, kinds)
    if window is None or window >= max_positions:
        return ()
    if architecture == "LlamaForCausalLM":
        raise UnsupportedModelError(
            f"{values.origin}: layer_types asks for a sliding window of {window}, which no layer of {architecture} "
            "has: name the class that it was trained with in architectures (MinistralForCausalLM, Qwen2ForCausalLM), "
            "or take layer_types out"
        )
    if architecture == "MistralForCausalLM":
        if FULL in kinds:
            raise UnsupportedModelError(
                f"{values.origin}: in a MistralForCausalLM all layers have the sliding window of {window}, but "
                "layer_types names some that don't: name MinistralForCausalLM in architectures if it was trained so"
            )
        return (window,) * num_layers
    if not kinds:
        num_full = _num_full_layers(values) if architecture == "Qwen2ForCausalLM" else 0
        kinds = [FULL if layer < num_full else SLIDING for layer in range(num_layers)]
    if len(kinds) != num_layers:
        values.fail("layer_types", f"a list of {num_layers} names, one for each layer")
    return _unless_all_full(tuple(window if kind == SLIDING else None for kind in kinds))


def windows_of_flags(
    window: int, flags: object, num_layers: int, max_positions: int, *, origin: str, default: bool | None
) -> Windows:
    """The same of a GGUF file: a window and, for each layer, whether it has it. `default`: where no flags are given.

    Raises CorruptCheckpointError where there isn't one flag for each layer, and UnsupportedModelError where the file
    doesn't say which layers the window is of.
    """
    if window >= max_positions:
        return ()
    if flags is None and default is not None:
        return (window,) * num_layers if default else ()
    if flags is None or isinstance(flags, int):
        raise UnsupportedModelError(
            f"{origin} has a sliding window of {window}, and doesn't say layer by layer which of them it is of "
            "(attention.sliding_window_pattern): use the checkpoint in safetensors"
        )
    if not isinstance(flags, list) or len(flags) != num_layers or not all(isinstance(flag, bool) for flag in flags):
        raise CorruptCheckpointError(
            f"{origin}: attention.sliding_window_pattern is {flags!r}: it must be {num_layers} flags, one a layer"
        )
    return _unless_all_full(tuple(window if flag else None for flag in flags))


def _layer_types(values: ConfigValues) -> list[str]:
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        values.fail("layer_types", "a list of names")
    others = sorted(set(kinds) - {FULL, SLIDING})
    if others:
        raise UnsupportedModelError(f"{values.origin}: layers of type {others[0]!r} aren't computed: use another model")
    return kinds


def _window(values: ConfigValues, architecture: str, kinds: list[str]) -> int | None:
    """The window that some layer has; None where none has one."""
    default = None if "sliding_window" in values else _DEFAULT_WINDOW
    if architecture == "LlamaForCausalLM":
        # Its class doesn't look at sliding_window; layer_types that speak of one are another matter.
        default = None
        if SLIDING not in kinds:
            return None
    if architecture == "Qwen2ForCausalLM" and not values.flag("use_sliding_window"):
        if SLIDING in kinds:
            values.fail("use_sliding_window", f"true where layer_types has {SLIDING}")
        return None
    if values.get("sliding_window") is None and default is None:
        if SLIDING in kinds and architecture != "MistralForCausalLM":
            values.fail("sliding_window", f"a whole number from 1 where layer_types has {SLIDING}")
        return None
    return values.count("sliding_window", default)


def _num_full_layers(values: ConfigValues) -> int:
    """Qwen2's `max_window_layers`, which counts the layers below the first that has a window."""
    return values.count("max_window_layers", _DEFAULT_FULL_LAYERS, least=0)


def _unless_all_full(windows: Windows) -> Windows:
    return windows if any(window is not None for window in windows) else ()
