"""The gate of code that is called in order: answered in place, or awaited; named, bounded, and nothing passes it raw."""

import asyncio
import sys
import threading
import time

import pytest

from tests.unit.waiting import iterations
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.user_code.calls import IN_PLACE_S, Gate, Job


async def test_quick_call_is_answered_without_the_event_loop_going_round():
    gate, ticks = Gate(), []
    asyncio.get_running_loop().call_soon(ticks.append, "tick")
    assert await gate.call(lambda: 7, owner="sampler") == 7
    assert gate.start(lambda: 8, owner="sampler").value_now() == 8
    assert ticks == []


async def test_slow_call_leaves_the_event_loop_free_and_those_behind_it_keep_their_order(
    monkeypatch,
):
    gate, order, threads, free, waited = Gate(), [], set(), threading.Event(), []
    result = Job.result

    def work(name):
        assert name or free.wait(60)
        order.append(name)
        threads.add(threading.get_ident())

    def counted(job, seconds=None):
        waited.extend([seconds] if seconds is not None else [])
        return result(job, seconds)

    monkeypatch.setattr(Job, "result", counted)
    calls = [asyncio.create_task(gate.call(work, n, owner="x")) for n in range(4)]
    await iterations()
    assert waited == [IN_PLACE_S], "in place the loop waits once, and not for those behind"
    assert order == [] and not any(call.done() for call in calls)
    free.set()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3] and len(threads) == 1


async def test_a_function_of_the_librarys_own_runs_in_place_but_not_before_the_calls_that_wait():
    gate, order, here = Gate(), [], threading.get_ident()

    def work(name, seconds=0.0):
        time.sleep(seconds)
        order.append(name)
        return threading.get_ident()

    assert gate.start_own(work, "own", owner="mix").value_now() == here
    with pytest.raises(RunError, match="^mix: KeyError: 2"):
        gate.start_own(lambda: {}[2], owner="mix").value_now()
    slow = gate.start(work, "slow", 0.2, owner="sampler")
    behind = gate.start_own(work, "behind", owner="mix")
    assert not slow.answered and not behind.answered
    assert await behind.value() == await slow.value() != here
    assert order == ["own", "slow", "behind"]


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda: {}[2], "KeyError: 2"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), "KeyboardInterrupt"),
        (lambda: (_ for _ in ()).throw(asyncio.CancelledError), "CancelledError"),
        (lambda: time.sleep(1), "no answer within 0.1 s"),
        (lambda: asyncio.sleep(5), "no answer within 0.1 s"),
        (lambda: [time.sleep(0.05), sys.exit(4)], "SystemExit: 4"),
    ],
    ids=["raises", "exits", "interrupts", "cancels", "hangs", "hangs in an await", "exits late"],
)
async def test_whatever_goes_wrong_is_one_error_with_the_owner(function, cause):
    with pytest.raises(RunError) as caught:
        await Gate(timeout_s=0.1).call(function, owner="sampler S of task 'sum'")
    assert str(caught.value).startswith(f"sampler S of task 'sum': {cause}")


async def test_error_of_the_library_is_not_explained_twice():
    def build():
        raise ConfigError("dataset", 3, "too few")

    with pytest.raises(RunError, match=r"^task 'sum': dataset = 3: too few$"):
        await Gate().call(build, owner="task 'sum'")


async def test_async_function_is_awaited():
    async def later():
        await asyncio.sleep(0)
        return 5

    gate = Gate()
    begun = gate.start(later, owner="x")
    assert not begun.answered and await begun.value() == 5
    assert await gate.call(later, owner="x") == 5


async def test_hung_call_does_not_stop_those_behind_it():
    gate, release = Gate(timeout_s=0.1), threading.Event()
    hung = asyncio.create_task(gate.call(release.wait, owner="hung"))
    behind = asyncio.create_task(gate.call(lambda: "ran", owner="behind"))
    with pytest.raises(RunError, match="hung: no answer within 0.1 s"):
        await hung
    assert await behind == "ran"
    release.set()


async def test_cancelled_caller_is_cancelled():
    gate, release = Gate(), threading.Event()
    waiting = asyncio.create_task(gate.call(release.wait, owner="x"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await gate.call(lambda: 1, owner="x") == 1
