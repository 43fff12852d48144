"""Bursts of rendering are spread over iterations of the event loop."""

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.fakes.waiting import LIMIT_S
from torchtitan.experiments.rl.envs import yield_queue as module
from torchtitan.experiments.rl.envs.yield_queue import Priority, YieldQueue, compute, yield_queue
from torchtitan.experiments.rl.errors import UserCodeTimeout


async def iterations(counter: list[int]) -> None:
    while True:
        counter[0] += 1
        await asyncio.sleep(0)


async def test_one_caller_an_iteration_in_the_order_they_came():
    queue, seen, counter = YieldQueue(), [], [0]

    async def caller(number: int) -> None:
        for _ in range(3):
            await queue.wait(Priority.COMPLETION)
            seen.append((number, counter[0]))

    ticker = asyncio.create_task(iterations(counter))
    await asyncio.gather(*(caller(number) for number in range(20)))
    ticker.cancel()
    assert [number for number, _ in seen] == list(range(20)) * 3
    assert len({iteration for _, iteration in seen}) == 60


async def test_first_prompts_come_before_new_groups_and_these_before_answers():
    queue, seen = YieldQueue(), []

    async def caller(priority: Priority, number: int) -> None:
        await queue.wait(priority)
        seen.append((priority, number))

    priorities = [Priority.COMPLETION, Priority.NEW_GROUP, Priority.FIRST_PROMPT] * 2
    await asyncio.gather(*(caller(priority, number) for number, priority in enumerate(priorities)))
    prompts, groups, completions = Priority.FIRST_PROMPT, Priority.NEW_GROUP, Priority.COMPLETION
    assert seen == [
        (prompts, 2),
        (prompts, 5),
        (groups, 1),
        (groups, 4),
        (completions, 0),
        (completions, 3),
    ]


async def test_caller_that_is_cancelled_while_it_waits_holds_up_nobody():
    queue, seen = YieldQueue(), []

    async def caller(number: int) -> None:
        await queue.wait(Priority.COMPLETION)
        seen.append(number)

    waiting = [asyncio.create_task(caller(number)) for number in range(6)]
    await asyncio.sleep(0)
    for number in (0, 1, 3, 5):
        waiting[number].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert seen == [2, 4]
    await asyncio.wait_for(caller(6), LIMIT_S)
    assert seen == [2, 4, 6]


async def test_caller_holds_its_place_until_it_awaits_something():
    queue = YieldQueue()

    async def caller() -> list[bool]:
        held = [queue.held]
        await queue.wait(Priority.COMPLETION)
        held.append(queue.held)
        await asyncio.sleep(0)
        return [*held, queue.held]

    assert await asyncio.gather(caller(), caller()) == [[False, True, False]] * 2


def test_every_event_loop_has_its_own():
    async def mine() -> YieldQueue:
        await asyncio.wait_for(yield_queue().wait(Priority.COMPLETION), LIMIT_S)
        return yield_queue()

    async def abandoned() -> None:
        asyncio.ensure_future(yield_queue().wait(Priority.COMPLETION))
        await asyncio.sleep(0)

    asyncio.run(abandoned())
    assert asyncio.run(mine()) is not asyncio.run(mine())


async def test_large_call_that_hangs_is_late_and_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(module, "LARGE_WORK_S", 0.1)
    release = threading.Event()

    def renders_for_ever():
        release.wait()

    with pytest.raises(UserCodeTimeout, match="^no answer within 0.1 s$") as late:
        await compute(renders_for_ever, large=True)
    assert late.value.where.startswith("renders_for_ever (test_yield_queue.py:")
    assert await compute(lambda: 7, large=True) == 7
    release.set()


def test_large_call_that_hangs_does_not_keep_the_process_from_ending():
    code = (
        "import asyncio, threading\n"
        "from torchtitan.experiments.rl.envs.yield_queue import compute\n"
        "async def main():\n"
        "    hung = asyncio.create_task(compute(threading.Event().wait, large=True))\n"
        "    await asyncio.wait({hung}, timeout=0.1)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
