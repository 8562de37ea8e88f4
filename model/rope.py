"""Tables of rotary position embedding (Su et al., arXiv 2104.09864) for each scaling that checkpoints name.

A table row is a function of its position and of the table's length alone, never of the batch: cached keys stay right
whatever is computed beside them.
"""

import math
from collections.abc import Callable

import torch

from model.config import ModelConfig
from model.errors import UnsupportedModelError

InverseFrequencies = tuple[torch.Tensor, float]


def rotary_dim(config: ModelConfig) -> int:
    """How many leading elements of a head are rotated; the rest pass through."""
    return int(config.head_dim * config.rope.partial_rotary_factor)


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines in the first half of a row, sines in the second.

    The scaling's attention factor is multiplied into both, as yarn and longrope ask. Raises UnsupportedModelError for
    a kind that is not known, or one whose numbers are missing from the checkpoint.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if config.rope.kind == "dynamic":
        angles, factor = _dynamic_angles(config, positions), 1.0
    else:
        frequencies, factor = inverse_frequencies(config, num_positions)
        angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(device)


def inverse_frequencies(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    """(float32 [rotary_dim / 2], attention factor) for a context of `num_positions` tokens."""
    compute = _KINDS.get(config.rope.kind)
    if compute is None:
        raise UnsupportedModelError(
            f"the checkpoint scales its rotary embedding by '{config.rope.kind}': known are {', '.join(sorted(_KINDS))}"
        )
    try:
        return compute(config, num_positions)
    except KeyError as error:
        raise UnsupportedModelError(
            f"the checkpoint's rope_scaling of kind '{config.rope.kind}' lacks {error.args[0]!r}: add it to config.json"
        ) from error


def _exponents(config: ModelConfig) -> torch.Tensor:
    dim = rotary_dim(config)
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _default(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    return 1.0 / (config.rope.theta ** _exponents(config)), 1.0


def _linear(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    frequencies, factor = _default(config, num_positions)
    return frequencies / config.rope.params["factor"], factor


def _ntk_theta(config: ModelConfig, lengths: torch.Tensor) -> torch.Tensor:
    """The base for each context length: unchanged up to the trained length, growing beyond it."""
    factor, dim = config.rope.params["factor"], rotary_dim(config)
    trained = config.max_position_embeddings
    stretch = factor * lengths.clamp(min=trained) / trained - (factor - 1)
    return torch.pow(stretch, dim / (dim - 2)) * config.rope.theta


def _dynamic(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    theta = _ntk_theta(config, torch.tensor(float(num_positions)))
    return 1.0 / (theta ** _exponents(config)), 1.0


def _dynamic_angles(config: ModelConfig, positions: torch.Tensor) -> torch.Tensor:
    """Each position is rotated with the base of a context that ends at it: what decoding one token at a time gives.

    Not the base of the whole prompt, which would make a key depend on how its prompt was cut into chunks.
    """
    inverse_frequencies(config, len(positions))  # the checks
    theta = _ntk_theta(config, positions + 1)
    return positions[:, None] / theta[:, None] ** _exponents(config)[None, :]


def _yarn(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    """YaRN (Peng et al., arXiv 2309.00071): slow dimensions are interpolated, fast ones kept, a ramp between."""
    params, dim, theta = config.rope.params, rotary_dim(config), config.rope.theta
    trained = params.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = params.get("factor") or config.max_position_embeddings / trained

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(params.get("beta_fast") or 32)
    high = dimension_of(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1.0 / theta ** _exponents(config)
    return kept / factor * ramp + kept * (1 - ramp), _yarn_attention_factor(config, factor)


def _yarn_attention_factor(config: ModelConfig, factor: float) -> float:
    params = config.rope.params

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


def _longrope(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    """LongRoPE (Ding et al., arXiv 2402.13753): one factor a dimension, a set for short and one for long contexts.

    The set is chosen once, by the longest context that this engine serves: a change in the middle of a sequence would
    leave its cached keys rotated by the other set.
    """
    params = config.rope.params
    trained = params.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = params.get("factor") or config.max_position_embeddings / trained
    attention_factor = params.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    per_dimension = torch.tensor(params["long_factor" if num_positions > trained else "short_factor"])
    if per_dimension.shape != (rotary_dim(config) // 2,):
        raise UnsupportedModelError(
            f"longrope has {len(per_dimension)} factors where the head has {rotary_dim(config) // 2} pairs"
        )
    return 1.0 / (per_dimension * config.rope.theta ** _exponents(config)), float(attention_factor)


def _llama3(config: ModelConfig, num_positions: int) -> InverseFrequencies:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    params = config.rope.params
    frequencies, attention_factor = _default(config, num_positions)
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    rotations = params["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / params["factor"]), attention_factor


_KINDS: dict[str, Callable[[ModelConfig, int], InverseFrequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
