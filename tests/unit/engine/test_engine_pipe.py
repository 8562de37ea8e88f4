"""The pipe to an engine process: whatever the engine said before it died is heard."""

import asyncio
import logging
import socket

import pytest

from worker.engine_pipe import EnginePipe

LAST_WORDS = b"whom I compute now" * 1000


async def read_all(pipe: EnginePipe) -> bytes:
    parts = []
    async with asyncio.timeout(20):
        while part := await pipe.read():
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("num_lost", [0, 1, 3])
async def test_last_words_are_heard_though_commands_were_left_unread_and_more_could_not_be_sent(
    num_lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Unread commands reset the pipe; those that come later break it. That is no error to be told of."""
    ours, theirs = socket.socketpair()
    pipe = await EnginePipe.connect(ours)
    pipe.write(b"a command")
    theirs.sendall(LAST_WORDS)
    theirs.close()
    for _ in range(num_lost):
        pipe.write(b"another")
        await asyncio.sleep(0)
    assert await read_all(pipe) == LAST_WORDS
    await pipe.close(1.0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_commands_go_out_and_answers_come_in() -> None:
    ours, theirs = socket.socketpair()
    pipe = await EnginePipe.connect(ours)
    pipe.write(b"ping")
    assert await asyncio.to_thread(theirs.recv, 10) == b"ping"
    theirs.sendall(b"pong")
    assert await pipe.read() == b"pong"
    await pipe.close(1.0)
    assert await asyncio.to_thread(theirs.recv, 10) == b"", "the engine is not told that its service is gone"
    theirs.close()


async def test_who_reads_comes_to_the_end_when_it_is_aborted() -> None:
    ours, theirs = socket.socketpair()
    pipe = await EnginePipe.connect(ours)
    reading = asyncio.create_task(pipe.read())
    await asyncio.sleep(0)
    pipe.abort()
    assert await asyncio.wait_for(reading, 20) == b""
    assert await asyncio.to_thread(theirs.recv, 10) == b""
    theirs.close()
