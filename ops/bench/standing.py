"""Starts the sides of a comparison: our engine, the peers that are installed, and what is measured once before them."""

import contextlib
from pathlib import Path
from typing import Any

from ops.bench.errors import BenchError
from ops.bench.measure import PeerSide, say
from ops.bench.options import BenchOptions
from ops.bench.peers.catalog import FoundPeer, find_peers
from ops.bench.side import SideProcess


def find_wanted_peers(options: BenchOptions) -> tuple[list[FoundPeer], list[str]]:
    """The peers that are wanted and installed, and a line about each that is not, which is said as well."""
    found, missing = find_peers(options.peers, options.peer_pythons)
    for line in missing:
        say(line)
    return found, missing


def start_ours(stack: contextlib.ExitStack, options: BenchOptions, path: Path) -> SideProcess:
    """Our engine's side, which `stack` closes."""
    say("starting the engine")
    config = options.engine_config | {"model_path": str(path)}
    return stack.enter_context(
        SideProcess("pagemill's side", "ops.bench.ours", {"config": config, "mode": options.engine_mode})
    )


def start_peer(
    stack: contextlib.ExitStack,
    found: FoundPeer,
    options: BenchOptions,
    path: Path,
    common: dict[str, Any],
    max_batch: int,
) -> PeerSide:
    """A peer's side, which `stack` closes.

    common: dtype, device and num_threads of all sides. max_batch: the most sequences that it is to have in flight.
    """
    kind = found.kind
    say(f"starting {kind.name}")
    side = SideProcess(
        f"{kind.name}'s side", kind.module, _words(found, options, path, common, max_batch), python=found.python
    )
    return PeerSide(kind, stack.enter_context(side))


def _words(
    found: FoundPeer, options: BenchOptions, path: Path, common: dict[str, Any], max_batch: int
) -> dict[str, Any]:
    """What the peer's module is told."""
    where = {"model_path": str(path), "cache_dir": options.cache_dir}
    if options.load_format == "dummy" and "transformers" not in found.kind.name:
        raise BenchError(f"{found.kind.name} reads a checkpoint: with --load-format dummy compare with transformers")
    if found.kind.name == "llamacpp":
        return where | {
            "weights": options.llamacpp_weights,
            "num_threads": common["num_threads"],
            "shares_prefix": options.num_shared > 0,
        }
    if found.kind.name == "vllm":
        with SideProcess("the writer of a folder for vLLM", "ops.bench.peers.hf_folder", where) as writer:
            folder = writer.ask("path")
        return common | {"model_path": folder, "max_batch": max_batch, "shares_prefix": options.num_shared > 0}
    return where | common | {"load_format": options.load_format}


def measure_limits(common: dict[str, Any]) -> dict[str, Any]:
    """In a process that ends before anything is measured against it."""
    say("measuring the machine's limits")
    with SideProcess("the measurement of limits", "ops.bench.limits", common) as side:
        limits: dict[str, Any] = side.ask("measure")
    return limits


def measure_steps(options: BenchOptions, path: Path) -> dict[str, Any]:
    """Single steps of our engine, in a process that ends before anything else is measured."""
    say("measuring single steps")
    words = {"config": options.engine_config | {"model_path": str(path)}}
    with SideProcess("the measurement of steps", "ops.bench.steps", words) as side:
        steps: dict[str, Any] = side.ask("measure")
    return steps
