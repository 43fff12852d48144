"""Calls in the caller's own asyncio task: the same limits and failures as in a task of their own."""

import asyncio
import time

import pytest

from tests.unit.blocked import blocked_s
from torchtitan.experiments.rl.user_code import in_place
from torchtitan.experiments.rl.user_code.calls import BLOCKING, UserCodeError, UserCodeTimeout, call_bounded
from torchtitan.experiments.rl.user_code.in_place import call_in_place


async def call(function, *args, timeout_s=30.0):
    """Whatever the call does to the running task has been taken back."""
    running = asyncio.current_task()
    try:
        return await call_in_place(function, *args, timeout_s=timeout_s, owner="Env.step")
    finally:
        assert running.cancelling() == 0
        await asyncio.sleep(0)  # a cancellation that was left over would arrive here


async def test_code_that_does_not_wait_is_answered_in_the_same_iteration_of_the_event_loop():
    async def add(a, b):
        return a + b

    others = []
    asyncio.get_running_loop().call_soon(others.append, 1)
    assert await call_in_place(add, 1, 2, timeout_s=30.0, owner="Env.step") == 3
    assert others == []


async def test_code_that_waits_is_answered_when_it_ends():
    async def waits():
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return 7

    assert await call(waits) == 7


def raising(error):
    async def at_once():
        raise error

    async def later():
        await asyncio.sleep(0)
        raise error

    return at_once, later


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), r"Env.step: ValueError: no \(test_in_place.py:"),
        (SystemExit(3), "Env.step: SystemExit: 3"),
        (KeyboardInterrupt(), "Env.step: KeyboardInterrupt"),
        (GeneratorExit(), "Env.step: GeneratorExit"),
        (StopIteration(1), "Env.step: RuntimeError: coroutine raised StopIteration"),
        (asyncio.CancelledError(), "Env.step: CancelledError: raised by the code itself$"),
    ],
)
async def test_whatever_the_code_raises_is_a_failure_by_its_name(error, message):
    for function in raising(error):
        with pytest.raises(UserCodeError, match=f"^{message}"):
            await call(function)


async def test_late_code_may_clean_up_and_is_named_with_its_place():
    cleaned = []

    async def slow():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(UserCodeTimeout, match=r"^Env.step: no answer within 0.05 s$") as late:
        await call(slow, timeout_s=0.05)
    assert cleaned == [True] and "slow (test_in_place.py:" in late.value.where


async def test_late_code_that_ignores_its_cancellation_is_closed(monkeypatch):
    monkeypatch.setattr(in_place, "CANCEL_GRACE_S", 0.05)
    closed = []

    async def stubborn():
        try:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    pass
        finally:
            closed.append(True)

    with pytest.raises(UserCodeTimeout, match="no answer within 0.05 s"):
        await call(stubborn, timeout_s=0.05)
    assert closed == [True]


@pytest.mark.parametrize("swallows", [False, True])
async def test_cancellation_of_the_caller_reaches_the_code_and_then_the_caller(swallows):
    begun, seen = asyncio.Event(), []

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append(True)
            if not swallows:
                raise

    task = asyncio.create_task(call_in_place(waits, timeout_s=3600, owner="Env.step"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True] and task.cancelled()


async def test_cancellation_of_the_call_around_ends_code_that_swallows_it():
    begun, after = asyncio.Event(), []

    async def swallows():
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

    async def rollout():
        await call_in_place(swallows, timeout_s=3600, owner="Env.step")
        after.append(True)

    task = asyncio.create_task(call_bounded(rollout, timeout_s=3600))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert after == []


async def test_caller_that_is_cancelled_while_late_code_unwinds_is_cancelled():
    unwinding = asyncio.Event()

    async def slow():
        try:
            await asyncio.sleep(3600)
        finally:
            unwinding.set()
            await asyncio.sleep(3600)

    task = asyncio.create_task(call_in_place(slow, timeout_s=0.01, owner="Env.step"))
    await unwinding.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("waits", [False, True])
async def test_code_that_cancels_the_running_task_fails_alone(waits):
    async def cancels():
        asyncio.current_task().cancel()
        if waits:
            await asyncio.sleep(3600)
        raise ValueError("then")

    with pytest.raises(UserCodeError, match="raised by the code itself" if waits else "ValueError: then"):
        await call(cancels)


async def test_code_may_cancel_what_it_awaits_within_limits_of_its_own():
    async def limited():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(3600)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(3600), 0.01)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(3600))
                group.create_task(raising(ValueError("no"))[1]())
        lost = asyncio.get_running_loop().create_future()
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        return "done"

    assert await call_bounded(lambda: call(limited), timeout_s=3600) == "done"


async def test_code_that_blocks_beyond_its_limit_is_late_and_counted_once_inside_a_call_with_a_limit():
    async def blocks():
        time.sleep(0.15)
        return "done"

    BLOCKING.lap()
    with pytest.raises(UserCodeTimeout, match=r"^Env.step: no answer within 0.1 s: it blocked") as late:
        await call(blocks, timeout_s=0.1)
    assert BLOCKING.lap() == 1 and blocked_s(late.value) >= 0.15
    with pytest.raises(UserCodeTimeout, match=r"^no answer within 0.1 s: Env.step blocked") as late:
        await call_bounded(lambda: call(blocks, timeout_s=3600), timeout_s=0.1)
    assert BLOCKING.lap() == 1 and blocked_s(late.value) >= 0.15


async def test_closing_the_caller_closes_the_code():
    closed = []

    async def waits():
        try:
            await asyncio.sleep(3600)
        finally:
            closed.append(True)

    caller = call_in_place(waits, timeout_s=3600, owner="Env.step")
    caller.send(None)
    caller.close()
    assert closed == [True]
