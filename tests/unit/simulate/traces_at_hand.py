"""Traces for the tests of the simulator: small ones that are made here, and the two public ones where they lie."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ops.simulate.traces import Trace, read_trace

# Beside the repository: the files are others', and are not copied into it.
PUBLIC = Path(__file__).parents[4] / "shared" / "traces"
AZURE = "azure_2023_conv.csv"
MOONCAKE = "mooncake_conversation.jsonl"


def public_trace(name: str) -> Path:
    """The path of a public trace. Skips the test where it isn't there."""
    path = PUBLIC / name
    if not path.exists():
        pytest.skip(f"needs the public trace {name} in {PUBLIC}")
    return path


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def made_trace(
    folder: Path,
    num_requests: int,
    seed: int,
    *,
    mean_gap_ms: float = 50,
    most_tokens: int = 60,
    has_hashes: bool = True,
) -> Trace:
    """Random requests. With hashes, some prompts of more than 512 tokens begin alike, as turns of a chat do."""
    generator = random.Random(seed)
    chats = [[generator.randrange(10**9) for _ in range(4)] for _ in range(3)]
    lines = []
    at_ms = 1000.0
    for _ in range(num_requests):
        at_ms += generator.expovariate(1 / 50)
        line: dict[str, Any] = {"timestamp": at_ms, "output_length": generator.randint(1, 60)}
        if has_hashes:
            ids = [*generator.choice(chats)[: generator.randint(0, 3)], generator.randrange(10**9)]
            line |= {"hash_ids": ids, "input_length": len(ids) * 512 - generator.randrange(512)}
        else:
            line["input_length"] = generator.randint(1, 60)
        lines.append(line)
    return read_trace(write_lines(folder / f"made-{seed}.jsonl", lines))
