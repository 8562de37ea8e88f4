"""Waiting for something that may never come, no longer than it makes sense."""

import asyncio

import pytest

from worker.giving_up import unless_stopped, while_worthwhile


async def never() -> None:
    await asyncio.Event().wait()


async def test_what_is_done_in_time_is_answered_stopped_or_not() -> None:
    async def work() -> int:
        await asyncio.sleep(0.01)
        return 7

    stop = asyncio.Event()
    assert await unless_stopped(work(), stop, 0) == 7
    stop.set()
    assert await unless_stopped(work(), stop, 30) == 7


async def test_what_takes_longer_once_stopped_is_called_off() -> None:
    ends: list[str] = []

    async def work() -> int:
        try:
            await never()
        finally:
            ends.append("called off")
        return 7

    stop = asyncio.Event()
    waiting = asyncio.create_task(unless_stopped(work(), stop, 0.01))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    stop.set()
    assert await waiting is None
    assert ends == ["called off"]


async def test_errors_come_through() -> None:
    async def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        await unless_stopped(fail(), asyncio.Event(), 0)
    with pytest.raises(ValueError, match="x"):
        await while_worthwhile(fail(), lambda: False, patience_s=1, at_most_s=1)


async def test_a_cancellation_reaches_the_work() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await never()
        finally:
            ended.set()

    for waiting in (
        unless_stopped(work(), asyncio.Event(), 9),
        while_worthwhile(work(), lambda: False, patience_s=9, at_most_s=9),
    ):
        task = asyncio.create_task(waiting)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()
        begun.clear()
        ended.clear()


async def test_hopeless_work_is_given_up_and_hopeful_work_is_not() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await while_worthwhile(never(), lambda: True, patience_s=0.05, at_most_s=60)
    assert loop.time() - began < 30
    hopes = iter([True, False] * 3)
    looks = 0

    def is_hopeless() -> bool:
        nonlocal looks
        looks += 1
        return next(hopes, True)

    await while_worthwhile(never(), is_hopeless, patience_s=0.12, at_most_s=60)
    assert looks > 6, "hope that returns begins the time anew"
    await while_worthwhile(never(), lambda: False, patience_s=60, at_most_s=0.02)
