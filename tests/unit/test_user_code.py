"""Calls of user code: bounded in time, and every failure one line."""

import asyncio
import threading

import pytest

from torchtitan.experiments.rl.user_code.calls import Threads, UserCodeError, UserCodeTimeout, call_bounded, cause_of


def test_cause_is_one_line_with_the_place():
    try:
        raise ValueError("two\nlines " + "x" * 1000)
    except ValueError as error:
        cause = cause_of(error)
    assert cause.startswith("ValueError: two lines xxx") and "\n" not in cause and len(cause) < 500
    assert "test_user_code.py:" in cause


async def test_cancellation_of_the_caller_is_not_a_failure_of_the_code():
    begun = asyncio.Event()

    async def wait():
        begun.set()
        await asyncio.sleep(3600)

    task = asyncio.ensure_future(call_bounded(wait, timeout_s=None))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_late_code_may_clean_up():
    cleaned = []

    async def slow():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    with pytest.raises(UserCodeTimeout):
        await call_bounded(slow, timeout_s=0.05)
    assert cleaned == [True]


async def test_exit_does_not_stop_the_event_loop():
    async def leave():
        raise SystemExit(2)

    with pytest.raises(UserCodeError, match="SystemExit: 2"):
        await call_bounded(leave, timeout_s=1)


async def test_hung_function_gives_up_its_place_and_waiting_for_a_place_does_not_count():
    threads, release = Threads(1), threading.Event()
    hung = asyncio.ensure_future(threads.call(release.wait, timeout_s=0.3))
    queued = asyncio.ensure_future(threads.call(lambda: "ran", timeout_s=0.1))
    with pytest.raises(UserCodeTimeout):
        await hung
    assert await queued == "ran"
    release.set()


async def test_threads_never_run_more_than_their_size_at_once():
    threads, running, most = Threads(2), [], []
    pair = threading.Barrier(2)

    def work():
        running.append(None)
        most.append(len(running))
        pair.wait(30)  # two run at once, or none gets on
        running.pop()

    await asyncio.gather(*(threads.call(work, timeout_s=30) for _ in range(8)))
    assert max(most) == 2


async def test_function_raises_through_and_an_awaitable_answer_is_awaited():
    async def later():
        return 7

    assert await Threads(1).call(later, timeout_s=1) == 7
    with pytest.raises(UserCodeTimeout):
        await Threads(1).call(lambda: asyncio.sleep(3600), timeout_s=0.1)
    with pytest.raises(ZeroDivisionError):
        await Threads(1).call(lambda: 1 / 0, timeout_s=1)
