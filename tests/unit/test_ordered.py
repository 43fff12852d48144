"""Code that is called in order: answered in place, or awaited; named, bounded, and no fault passes raw."""

import asyncio
import sys
import threading
import time

import pytest

from tests.fakes.waiting import iterations
from torchtitan.experiments.rl.ask.ordered import IN_PLACE_S, OrderedCalls
from torchtitan.experiments.rl.ask.threads import ThreadCall
from torchtitan.experiments.rl.errors import ConfigError, RunError


async def test_quick_call_is_answered_without_the_event_loop_going_round():
    ordered, ticks = OrderedCalls(), []
    asyncio.get_running_loop().call_soon(ticks.append, "tick")
    assert await ordered.call(lambda: 7, owner="sampler") == 7
    assert ordered.start(lambda: 8, owner="sampler").value_now() == 8
    assert ticks == []


async def test_slow_call_leaves_the_event_loop_free_and_those_behind_it_keep_their_order(
    monkeypatch,
):
    ordered, order, threads, free, waited = OrderedCalls(), [], set(), threading.Event(), []
    result = ThreadCall.result

    def work(name):
        assert name or free.wait(60)
        order.append(name)
        threads.add(threading.get_ident())

    def counted(call, seconds=None):
        waited.extend([seconds] if seconds is not None else [])
        return result(call, seconds)

    monkeypatch.setattr(ThreadCall, "result", counted)
    calls = [asyncio.create_task(ordered.call(work, n, owner="x")) for n in range(4)]
    await iterations()
    assert waited == [IN_PLACE_S], "in place the loop waits once, and not for those behind"
    assert order == [] and not any(call.done() for call in calls)
    free.set()
    await asyncio.gather(*calls)
    assert order == [0, 1, 2, 3] and len(threads) == 1


async def test_no_call_overtakes_one_that_was_made_before_it():
    ordered, order = OrderedCalls(), []

    def work(name, seconds=0.0):
        time.sleep(seconds)
        order.append(name)
        return threading.get_ident()

    slow = ordered.start(work, "slow", 0.2, owner="sampler")
    behind = ordered.start(work, "behind", owner="mix")
    assert not slow.answered and not behind.answered
    assert await behind.value() == await slow.value() != threading.get_ident()
    assert order == ["slow", "behind"]


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
        await OrderedCalls(timeout_s=0.1).call(function, owner="sampler S of task 'sum'")
    assert str(caught.value).startswith(f"sampler S of task 'sum': {cause}")


async def test_error_of_the_library_is_not_explained_twice():
    def build():
        raise ConfigError("dataset", 3, "too few")

    with pytest.raises(RunError, match=r"^task 'sum': dataset = 3: too few$"):
        await OrderedCalls().call(build, owner="task 'sum'")


async def test_async_function_is_awaited():
    async def later():
        await asyncio.sleep(0)
        return 5

    ordered = OrderedCalls()
    begun = ordered.start(later, owner="x")
    assert not begun.answered and await begun.value() == 5
    assert await ordered.call(later, owner="x") == 5


class AsyncSampler:
    """Counts the calls that are inside it at once, as a sampler that awaits a database might be."""

    def __init__(self):
        self.inside = 0
        self.order = []

    async def next(self, name, rounds=3):
        self.inside += 1
        for _ in range(rounds):
            assert self.inside == 1, "two calls of one sampler run at once"
            await asyncio.sleep(0)
        self.inside -= 1
        self.order.append(name)

    def observe(self, name):
        assert self.inside == 0, "a sync call runs within an async one"
        self.order.append(name)


async def test_async_calls_run_one_after_another_and_sync_ones_behind_them_in_order():
    ordered, sampler = OrderedCalls(), AsyncSampler()
    calls = [ordered.start(sampler.next, n, owner="next") for n in range(3)]
    calls.append(ordered.start(sampler.observe, 3, owner="observe"))
    calls.append(ordered.start(sampler.next, 4, owner="next"))
    await asyncio.gather(*(call.value() for call in reversed(calls)))
    assert sampler.order == [0, 1, 2, 3, 4]
    assert ordered.start(sampler.observe, 5, owner="observe").answered


async def test_call_behind_one_that_is_cancelled_in_the_queue_waits_for_the_one_that_runs():
    ordered, sampler = OrderedCalls(), AsyncSampler()
    running = ordered.start(sampler.next, "running", 50, owner="next")
    queued = asyncio.create_task(ordered.call(sampler.next, "queued", owner="next"))
    behind = asyncio.create_task(ordered.call(sampler.next, "behind", owner="next"))
    await iterations(5)
    queued.cancel()
    await behind
    await running.value()
    assert sampler.order == ["running", "behind"]


async def test_call_that_is_cancelled_before_its_first_step_keeps_the_thread_from_nobody():
    ordered, release = OrderedCalls(), threading.Event()
    hung = asyncio.create_task(ordered.call(release.wait, owner="x"))
    asyncio.get_running_loop().call_soon(hung.cancel)
    with pytest.raises(asyncio.CancelledError):
        await hung
    assert await ordered.call(lambda: 1, owner="x") == 1
    release.set()


async def test_hung_call_does_not_stop_those_behind_it():
    ordered, release = OrderedCalls(timeout_s=0.1), threading.Event()
    hung = asyncio.create_task(ordered.call(release.wait, owner="hung"))
    behind = asyncio.create_task(ordered.call(lambda: "ran", owner="behind"))
    with pytest.raises(RunError, match="hung: no answer within 0.1 s"):
        await hung
    assert await behind == "ran"
    release.set()


async def test_late_call_says_where_it_waits():
    def sleeps():
        time.sleep(1)

    with pytest.raises(RunError, match=r"^mix: no answer within 0.1 s; it waits in sleeps \(test_"):
        await OrderedCalls(timeout_s=0.1).call(sleeps, owner="mix")


async def test_cancelled_caller_is_cancelled():
    ordered, release = OrderedCalls(), threading.Event()
    waiting = asyncio.create_task(ordered.call(release.wait, owner="x"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await ordered.call(lambda: 1, owner="x") == 1
