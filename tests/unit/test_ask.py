"""Calls of user code: bounded in time, and every failure one line."""

import asyncio
import contextlib
import functools
import gc
import threading
import time

import pytest

from tests.unit.blocked import blocked_s
from torchtitan.experiments.rl.ask import scopes
from torchtitan.experiments.rl.ask.call import ask, ask_each, ask_in_thread, contained
from torchtitan.experiments.rl.ask.lag import TICK_S, clock_of_running_loop
from torchtitan.experiments.rl.ask.threads import WorkerThreads
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout, cause_of
from torchtitan.experiments.rl.simulation.clock import run_virtually
from torchtitan.experiments.rl.types import is_finite_number


def test_cause_is_one_line_with_the_place():
    try:
        raise ValueError("two\nlines " + "x" * 1000)
    except ValueError as error:
        cause = cause_of(error)
    assert cause.startswith("ValueError: two lines xxx") and "\n" not in cause and len(cause) < 500
    assert "test_ask.py:" in cause


async def test_cancellation_of_the_caller_is_not_a_failure_of_the_code():
    begun = asyncio.Event()

    async def wait():
        begun.set()
        await asyncio.sleep(3600)

    task = asyncio.ensure_future(ask(wait, timeout_s=None))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_exit_does_not_stop_the_event_loop():
    async def leave():
        raise SystemExit(2)

    with pytest.raises(UserCodeError, match="SystemExit: 2"):
        await ask(leave, timeout_s=1)


def in_thread(threads, function, timeout_s):
    return ask_in_thread(threads, threads.submit(function), timeout_s)


async def test_hung_function_gives_up_its_place_and_waiting_for_a_place_does_not_count():
    threads, release = WorkerThreads(1), threading.Event()
    hung = asyncio.ensure_future(in_thread(threads, release.wait, timeout_s=0.3))
    queued = asyncio.ensure_future(in_thread(threads, lambda: "ran", timeout_s=0.1))
    with pytest.raises(UserCodeTimeout):
        await hung
    assert await queued == "ran"
    release.set()


async def test_threads_never_run_more_than_their_size_at_once():
    threads, running, most = WorkerThreads(2), [], []
    pair = threading.Barrier(2)

    def work():
        running.append(None)
        most.append(len(running))
        pair.wait(30)  # two run at once, or none gets on
        running.pop()

    await asyncio.gather(*(in_thread(threads, work, timeout_s=30) for _ in range(8)))
    assert max(most) == 2


def no_thread(thread):
    raise RuntimeError("can't start new thread")


async def test_call_that_no_thread_can_be_started_for_fails_and_the_next_one_runs():
    threads = WorkerThreads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(UserCodeError, match="^RuntimeError: can't start new thread"):
            await in_thread(threads, lambda: "ran", timeout_s=30)
    assert await in_thread(threads, lambda: "ran", timeout_s=30) == "ran"


async def test_calls_run_in_the_threads_there_are_where_no_other_can_be_started(monkeypatch):
    threads = WorkerThreads(2)
    assert await in_thread(threads, lambda: "ran", timeout_s=30) == "ran"
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    answers = await asyncio.gather(*(in_thread(threads, lambda: "ran", 30) for _ in range(3)))
    assert answers == ["ran"] * 3


async def test_thread_of_a_late_call_that_none_could_replace_takes_the_next_one(monkeypatch):
    threads, release = WorkerThreads(1), threading.Event()
    late = threads.submit(release.wait)
    with monkeypatch.context() as patch, pytest.raises(UserCodeTimeout):
        patch.setattr(threading.Thread, "start", no_thread)
        await ask_in_thread(threads, late, 0.1)
    queued = asyncio.create_task(in_thread(threads, lambda: "ran", timeout_s=30))
    await asyncio.sleep(0)
    release.set()
    assert await queued == "ran"


async def test_limit_holds_where_the_thread_that_watches_the_loop_can_not_be_started(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(UserCodeTimeout, match="no answer within 0.05 s"):
        await ask(asyncio.sleep, 30, timeout_s=0.05)


async def test_an_awaitable_answer_of_a_sync_function_is_awaited():
    async def later():
        return 7

    assert await ask(lambda: later(), timeout_s=1) == 7
    with pytest.raises(UserCodeTimeout):
        await ask(lambda: asyncio.sleep(3600), timeout_s=0.1)


async def test_late_sync_function_is_named_with_its_place():
    def hangs():
        time.sleep(0.5)

    with pytest.raises(UserCodeTimeout, match=r"^Env.step: no answer within 0.05 s$") as late:
        await ask(hangs, timeout_s=0.05, owner="Env.step")
    assert late.value.where.startswith("hangs (test_ask.py:")


async def test_sync_function_that_returned_late_while_the_event_loop_was_held_up_says_so():
    call = asyncio.ensure_future(ask(time.sleep, 0.2, timeout_s=0.1))
    await asyncio.sleep(0)
    time.sleep(0.4)
    with pytest.raises(UserCodeTimeout, match="^no answer within 0.1 s, but after 0.2") as late:
        await call
    assert late.value.returned


# ---- exceptions and values that are hostile themselves


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no words")


def test_exception_whose_message_can_not_be_read_keeps_its_type_and_place():
    try:
        raise Unprintable
    except Unprintable as error:
        cause = cause_of(error)
    assert cause.startswith(
        "Unprintable: its message can't be read (ValueError in __str__) (test_ask.py:"
    )


def test_number_whose_float_raises_is_no_number():
    class Broken:
        def __float__(self):
            raise RuntimeError("no")

    assert not is_finite_number(Broken())


async def test_owner_begins_the_message_and_the_kind_of_error_stays():
    async def fails():
        raise KeyError(2)

    with pytest.raises(UserCodeError, match=r"^task 'sum': setup: KeyError: 2 \(test_ask.py:"):
        await ask(fails, timeout_s=1, owner="task 'sum': setup")
    with pytest.raises(UserCodeTimeout, match=r"^env: no answer within 0.05 s$"):
        await ask(lambda: time.sleep(0.5), timeout_s=0.05, owner="env")
    with pytest.raises(UserCodeTimeout, match=r"^env: no answer within 0.05 s$"):
        await ask(asyncio.sleep, 10, timeout_s=0.05, owner="env")


async def test_exit_of_library_work_is_an_exception_and_other_errors_pass():
    async def leaves(error):
        raise error

    with pytest.raises(UserCodeError, match="SystemExit: 3"):
        await contained(leaves(SystemExit(3)))
    with pytest.raises(KeyError):
        await contained(leaves(KeyError(1)))
    with pytest.raises(asyncio.CancelledError):
        await contained(leaves(asyncio.CancelledError()))


# ---- code that blocks the event loop


def blocking_steps() -> int:
    """Return the number of steps since the last call that made a call late."""
    return clock_of_running_loop().lap()[1]


async def test_code_that_blocks_beyond_its_limit_is_late_and_counted():
    async def blocks():
        time.sleep(0.5)
        return "done"

    with pytest.raises(
        UserCodeTimeout, match=r"no answer within 0.1 s: blocks \(test_ask.py:"
    ) as late:
        await ask(blocks, timeout_s=0.1)
    assert (
        blocked_s(late.value) >= 0.5 - 2 * TICK_S
        and blocking_steps() == 1
        and blocking_steps() == 0
    )


async def test_code_that_blocks_and_then_awaits_what_is_ready_is_late_too():
    async def blocks():
        time.sleep(0.5)
        await asyncio.sleep(0)
        return "done"

    with pytest.raises(UserCodeTimeout, match="blocked the event loop"):
        await ask(blocks, timeout_s=0.1)


async def test_code_is_not_late_because_other_code_blocked():
    async def waits():
        await asyncio.sleep(0.2)
        return "done"

    async def blocks():
        await asyncio.sleep(0.1)
        time.sleep(1.5)

    other = asyncio.create_task(blocks())
    assert await ask(waits, timeout_s=1.0) == "done"
    await other


async def test_steps_of_watched_code_pass_values_errors_and_cancellation_through():
    async def code():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 3)
        value = await future
        try:
            await asyncio.wait_for(asyncio.sleep(10), 0.01)
        except TimeoutError:
            value += 1
        return value

    assert await ask(code, timeout_s=5) == 4


async def test_each_call_that_blocks_beyond_its_limit_is_late_also_one_that_begins_behind_another():
    async def blocks():
        await asyncio.sleep(0)
        time.sleep(0.3)

    ends = await asyncio.gather(
        *(ask(blocks, timeout_s=0.2) for _ in range(3)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [UserCodeTimeout] * 3 and blocking_steps() == 3
    assert all(": blocks (test_ask.py:" in str(end) for end in ends)


async def test_time_that_other_calls_hold_up_the_event_loop_does_not_count():
    async def waits():
        for _ in range(5):
            await asyncio.sleep(0.001)
        return "done"

    async def blocks():
        await asyncio.sleep(0.001)
        for _ in range(2):
            time.sleep(1.2)
            await asyncio.sleep(0)

    other = asyncio.create_task(ask(blocks, timeout_s=60))
    assert await ask(waits, timeout_s=1.0) == "done"
    await other


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_call_that_is_late_says_where_the_call_inside_it_waits_whatever_limit_that_has(levels):
    """Call in virtual time: on a busy machine, calls with equal limits are late in any order."""

    async def hangs():
        await asyncio.sleep(3600)

    def nested(level):
        inner = hangs if level == 0 else nested(level - 1)
        return functools.partial(ask, inner, timeout_s=0.1 if level % 2 else None)

    with pytest.raises(UserCodeTimeout) as caught:
        run_virtually(lambda: ask(nested(levels), timeout_s=0.1))
    assert "hangs (test_ask.py:" in caught.value.where and "ask (" not in caught.value.where


async def test_call_that_is_late_while_a_late_call_inside_it_is_stopped_says_where_that_waits():
    async def keeps_on():
        for _ in range(8):  # longer than the outer limit, and than a cancellation interrupts
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)

    with pytest.raises(UserCodeTimeout) as caught:
        await ask(functools.partial(ask, keeps_on, timeout_s=0.1), timeout_s=0.3)
    assert "keeps_on (test_ask.py:" in caught.value.where


async def test_late_call_names_the_function_inside_it_that_blocks_or_hangs():
    async def quick():
        pass

    def part(code):
        async def parts():
            await ask(quick, timeout_s=None, owner="First.setup")
            owner = f"{code.__name__}.setup"
            calls = [ask(code, timeout_s=None, owner=owner), ask(quick, timeout_s=None)]
            await asyncio.gather(*calls)

        return parts

    async def blocks():
        time.sleep(0.5)

    async def hangs():
        await asyncio.sleep(3600)

    def hangs_in_a_thread():
        time.sleep(0.5)

    message = (
        r"^Task.setup: no answer within 0.1 s: blocks.setup, at blocks \(test_ask.py:\d+\) blocked"
    )
    with pytest.raises(UserCodeTimeout, match=message):
        await ask(part(blocks), timeout_s=0.1, owner="Task.setup")
    for code in (hangs, hangs_in_a_thread):
        with pytest.raises(UserCodeTimeout) as caught:
            await ask(part(code), timeout_s=0.1, owner="Task.setup")
        name = code.__name__
        assert caught.value.where.startswith(f"{name}.setup, at {name} (test_ask.py:")


async def test_late_call_without_a_function_of_the_users_names_the_owner_inside_it():
    async def waits():
        await ask(asyncio.sleep, 3600, timeout_s=None, owner="Env.reset")

    waits.__code__ = waits.__code__.replace(co_filename=asyncio.__file__)
    with pytest.raises(UserCodeTimeout) as caught:
        await ask(waits, timeout_s=0.1)
    assert caught.value.where == "Env.reset"


async def test_error_of_code_that_also_blocked_is_what_is_reported():
    async def fails_late():
        time.sleep(0.5)
        raise KeyError(2)

    with pytest.raises(UserCodeError, match="KeyError: 2") as caught:
        await ask(fails_late, timeout_s=0.1)
    assert not isinstance(caught.value, UserCodeTimeout) and blocking_steps() == 1


async def call_step(function, *args, timeout_s=30.0):
    """Whatever the call does to the running task has been taken back."""
    running = asyncio.current_task()
    try:
        return await ask(function, *args, timeout_s=timeout_s, owner="Env.step")
    finally:
        assert running.cancelling() == 0
        await asyncio.sleep(0)  # a cancellation that was left over would arrive here


async def test_code_that_waits_is_answered_when_it_ends():
    async def waits():
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return 7

    assert await call_step(waits) == 7


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
        (ValueError("no"), r"Env.step: ValueError: no \(test_ask.py:"),
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
            await call_step(function)


async def test_late_code_may_clean_up_and_is_named_with_its_place():
    cleaned = []

    async def slow():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(UserCodeTimeout, match=r"^Env.step: no answer within 0.05 s$") as late:
        await call_step(slow, timeout_s=0.05)
    assert cleaned == [True] and "slow (test_ask.py:" in late.value.where


def test_calls_of_one_limit_are_late_each_in_its_own_time():
    """Virtual time: three calls of 10 s begin at 0, 3 and 7 s, and the first ends at 5 s."""

    async def late_at(begins_s: float, needs_s: float) -> float | None:
        await asyncio.sleep(begins_s)
        try:
            await ask(asyncio.sleep, needs_s, timeout_s=10.0)
        except UserCodeTimeout:
            return asyncio.get_running_loop().time()
        return None

    async def main() -> list[float | None]:
        return await asyncio.gather(late_at(0, 5), late_at(3, 60), late_at(7, 60))

    assert run_virtually(main) == [None, pytest.approx(13, abs=0.01), pytest.approx(17, abs=0.01)]


async def test_late_code_that_ignores_its_cancellation_is_abandoned(monkeypatch):
    monkeypatch.setattr(scopes, "CANCEL_GRACE_S", 0.05)
    end, ended = asyncio.Event(), asyncio.Event()

    async def stubborn():
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                pass
        ended.set()

    with pytest.raises(UserCodeTimeout, match="^Env.step: no answer within 0.05 s"):
        await call_step(stubborn, timeout_s=0.05)
    assert not ended.is_set()
    end.set()
    await ended.wait()


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

    task = asyncio.create_task(ask(waits, timeout_s=3600, owner="Env.step"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True] and task.cancelled()


async def test_second_cancellation_of_the_caller_leaves_no_code_running():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits():
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    task = asyncio.create_task(ask(waits, timeout_s=3600))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 60)


async def test_cancellation_of_the_call_around_ends_code_that_swallows_it():
    begun, after = asyncio.Event(), []

    async def swallows():
        begun.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

    async def rollout():
        await ask(swallows, timeout_s=3600, owner="Env.step")
        after.append(True)

    task = asyncio.create_task(ask(rollout, timeout_s=3600))
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

    task = asyncio.create_task(ask(slow, timeout_s=0.01, owner="Env.step"))
    await unwinding.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("waits", "cause"), [(False, "ValueError: then"), (True, "raised by the code itself")]
)
async def test_code_that_cancels_the_running_task_fails_alone(waits, cause):
    async def cancels():
        asyncio.current_task().cancel()
        if waits:
            await asyncio.sleep(3600)
        raise ValueError("then")

    with pytest.raises(UserCodeError, match=cause):
        await call_step(cancels)


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

    assert await ask(call_step, limited, timeout_s=3600) == "done"


async def test_code_that_blocks_beyond_its_limit_is_late_and_counted_once_inside_a_call_with_a_limit():
    async def blocks():
        time.sleep(0.5)
        return "done"

    place = r"blocks \(test_ask.py:\d+\) blocked"
    with pytest.raises(UserCodeTimeout, match=rf"^Env.step: no answer within 0.1 s: {place}"):
        await call_step(blocks, timeout_s=0.1)
    assert blocking_steps() == 1
    outer = functools.partial(call_step, blocks, timeout_s=3600)
    with pytest.raises(UserCodeTimeout, match=rf"^no answer within 0.1 s: Env.step, at {place}"):
        await ask(outer, timeout_s=0.1)
    assert blocking_steps() == 1


async def test_code_that_blocks_in_short_steps_is_late_though_each_is_within_the_limit():
    steps = 0

    async def hogs():
        nonlocal steps
        for _ in range(20):
            steps += 1
            time.sleep(0.1)
            await asyncio.sleep(0)

    with pytest.raises(UserCodeTimeout, match=r"no answer within 0.3 s"):
        await ask(hogs, timeout_s=0.3)
    assert steps < 15, "it was not stopped at its limit"


async def test_earlier_block_within_the_limit_is_not_what_a_late_call_is_said_to_wait_for():
    async def waits():
        time.sleep(0.1)
        await asyncio.sleep(3600)

    with pytest.raises(UserCodeTimeout, match=r"^no answer within 0.3 s$") as late:
        await ask(waits, timeout_s=0.3)
    assert late.value.where.startswith("waits (test_ask.py:")


async def test_calls_that_have_ended_leave_nothing_to_the_garbage_collector():
    async def inner():
        await asyncio.sleep(0)

    async def outer():
        await ask(inner, timeout_s=30, owner="Env.step")
        await ask(lambda: 1, timeout_s=30)

    await ask(outer, timeout_s=30)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            await ask(outer, timeout_s=30)
        await asyncio.sleep(0)
        assert gc.collect() < 20
    finally:
        gc.enable()


@pytest.mark.parametrize("is_async", [True, False])
async def test_calls_side_by_side_end_each_in_its_own_way(is_async):
    async def inverse(number, seconds):
        if number < 0:
            await asyncio.sleep(seconds)
        return 1 / number

    def sync_inverse(number, seconds):
        if number < 0:
            time.sleep(seconds)
        return 1 / number

    arguments = [(number, 1.0) for number in (2, 0, -1, 4)]
    function = inverse if is_async else sync_inverse
    half, division, late, quarter = await ask_each(function, arguments, timeout_s=0.3)

    assert (half.value, quarter.value) == (0.5, 0.25)
    assert str(division.error).startswith("ZeroDivisionError: division by zero")
    assert isinstance(late.error, UserCodeTimeout)
    assert half.error is quarter.error is None


async def test_calls_side_by_side_all_end_with_their_caller():
    ended = []

    async def wait(number):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    caller = asyncio.create_task(ask_each(wait, [(1,), (2,), (3,)], timeout_s=30))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert sorted(ended) == [1, 2, 3]


async def test_calls_end_with_a_caller_that_is_cancelled_again_at_any_moment():
    for iterations in range(8):
        ended = []

        async def wait():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)  # noqa: B023 - the loop waits for it

        caller = asyncio.create_task(ask(wait, timeout_s=30))
        await asyncio.sleep(0.001)
        caller.cancel()
        for _ in range(iterations):
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.sleep(0.01)
        assert ended == [True], iterations


class Unstoppable(asyncio.Future):
    """A future of a user, whose ``cancel`` takes no message."""

    def cancel(self):
        return super().cancel()


async def test_late_call_that_can_not_be_cancelled_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(scopes, "CANCEL_GRACE_S", 0.05)
    future = Unstoppable()

    async def wait():
        await future

    async def sleep():
        await asyncio.sleep(60)

    late = await asyncio.gather(
        ask(wait, timeout_s=0.1), ask(sleep, timeout_s=0.1), return_exceptions=True
    )
    assert [type(error) for error in late] == [UserCodeTimeout, UserCodeTimeout]
    future.set_result(None)


async def test_timeout_around_a_call_that_fires_as_the_call_ends_is_not_lost():
    loop = asyncio.get_running_loop()

    async def inner(task):
        task.cancel()  # of its own, which it swallows
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        # The library yields once when this call has ended. The timeout fires meanwhile.
        loop.call_soon(timeout.reschedule, loop.time())
        loop.call_soon(lambda: loop.call_soon(lambda: None))

    async def outer():
        nonlocal timeout
        async with asyncio.timeout(60) as timeout:
            await ask(inner, asyncio.current_task(), timeout_s=30)
            await asyncio.sleep(5)

    timeout = None
    with pytest.raises(UserCodeError, match="TimeoutError"):
        await ask(outer, timeout_s=30)
