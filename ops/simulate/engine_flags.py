"""The flags of `pagemill simulate` that say how the engine is set, and the sizes that they make."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ops.params import ABOVE_0, COUNT
from ops.simulate.presets import KIB, PRESETS, num_blocks_of
from ops.simulate.runs import EngineSizes
from scheduler import PreemptionMode
from scheduler.errors import InvalidConfigError
from scheduler.policy_names import DEFAULT_POLICY, parse_policy

DEFAULT_BLOCK_SIZE: Final = 16

_FROM_0 = click.IntRange(min=0)
_MIB = click.FloatRange(min=0)


class PolicyParam(click.ParamType[str]):
    """One or more names of rules with commas between them."""

    name = "rules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The same text, if a scheduler takes it."""
        try:
            parse_policy(value)
        except InvalidConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


_FLAGS: Final = (
    click.option("--num-blocks", type=COUNT, help="KV pool in blocks.  [default: what the preset's memory holds]"),
    click.option(
        "--pool-share", type=ABOVE_0, help="KV pool as a share of what the trace needs, found by a run before."
    ),
    click.option("--block-size", type=COUNT, help="Tokens in a block.  [default: 16; 512 with --prefix-only]"),
    click.option("--max-num-seqs", type=COUNT, default=128, help="Most sequences that run at a time."),
    click.option("--max-num-batched-tokens", type=COUNT, help="Token budget of a step.  [default: 6144, cpu: 512]"),
    click.option("--max-model-len", type=COUNT, help="Most tokens of a request.  [default: those of the longest]"),
    click.option("--prefix-caching/--no-prefix-caching", default=True, help="Reuse blocks of equal prompt beginnings."),
    click.option("--scheduling-policy", type=PolicyParam(), default=DEFAULT_POLICY, help="Order of sequences."),
    click.option(
        "--scheduler-delay-factor", type=click.FloatRange(0, 100), default=0.0, help="See `pagemill serve --help`."
    ),
    click.option("--target-itl-ms", type=ABOVE_0, help="See `pagemill serve --help`.  [default: no target]"),
    click.option(
        "--preemption-mode",
        type=click.Choice([mode.value for mode in PreemptionMode]),
        default="auto",
        help="How a victim gives way.",
    ),
    click.option(
        "--num-swap-blocks",
        type=_FROM_0,
        help="Blocks of the CPU tier.  [default: none; what --pool-share found to be needed, or --num-blocks, where "
        "--preemption-mode is swap and with --compare-modes]",
    ),
    click.option("--write-behind-mib", type=_MIB, default=16.0, help="See `pagemill serve --help`."),
    click.option("--swap-step-mib", type=_MIB, help="See `pagemill serve --help`.  [default: 256, cpu: 64]"),
)


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of the engine; the names are the worker's, where it has them."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def engine_sizes(preset: str, figures: dict[str, float], values: Mapping[str, Any]) -> EngineSizes:
    """What the flags in `values` make of a preset, before the need of the trace is known.

    Raises SimulateError where there is no memory to take the pool's size from.
    """
    block_size = values["block_size"] or DEFAULT_BLOCK_SIZE
    num_blocks = values["num_blocks"]
    if num_blocks is None:
        num_blocks = 1 if values["pool_share"] is not None else num_blocks_of(preset, figures, block_size)
    block_bytes = figures["kv_kib"] * KIB * block_size
    step_mib = values["swap_step_mib"]
    return EngineSizes(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=values["max_num_seqs"],
        max_num_batched_tokens=values["max_num_batched_tokens"] or PRESETS[preset].max_num_batched_tokens,
        enable_prefix_caching=values["prefix_caching"],
        max_model_len=values["max_model_len"],
        num_swap_blocks=values["num_swap_blocks"] or 0,
        swap_step_blocks=_num_blocks_in(PRESETS[preset].swap_step_mib if step_mib is None else step_mib, block_bytes),
        write_behind_blocks=_num_blocks_in(values["write_behind_mib"], block_bytes),
        preemption_mode=values["preemption_mode"],
        scheduling_policy=values["scheduling_policy"],
        scheduler_delay_factor=values["scheduler_delay_factor"],
        target_itl_ms=values["target_itl_ms"],
    )


def _num_blocks_in(mib: float, block_bytes: float) -> int:
    """As the engine counts: what fits, but one at least where it isn't 0."""
    return max(1, int(mib * KIB * KIB / block_bytes)) if mib else 0
