"""The commands that docs/wire.md shows are run as they stand."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.resp import RespClient
from tests.wire.workers import TestWorker
from worker.protocol import parse_request
from worker.streams.keys import QueueKeys

PAGE = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
COMMANDS = [line for block in re.findall(r"```redis\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture
def worker(redis_url: str, raw: RespClient) -> Iterator[TestWorker]:
    yield TestWorker(redis_url, QueueKeys("smollm2"), "w")
    raw.call("DEL", *raw.call("KEYS", "pagemill:{smollm2}:*"))


async def test_every_command_is_answered_and_every_job_is_understood(worker: TestWorker, raw: RespClient) -> None:
    assert len(COMMANDS) > 8
    for line in COMMANDS:
        raw.call(*shlex.split(line))
    entries = await worker.take(4)
    assert len(entries) == 4
    for entry in entries:
        request = parse_request(worker.envelope(entry), entry.fields, prompt_ref_value=b"x")
        assert request.prompt or request.messages
    await worker.close()
