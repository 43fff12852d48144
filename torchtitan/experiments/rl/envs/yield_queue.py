"""Keeps the event loop responsive while many rollouts render prompts and parse completions.

Rendering a prompt computes for 0.1 to 1 ms without awaiting. When an engine answers 512 requests at
once, all 512 rollouts are ready in one iteration of the loop, and everything else (timers, messages
of generators, the trainer) would wait for half a second. `YieldQueue` lets one of them continue in
each iteration, at a cost of some 20 us a call. What is large is computed in a thread instead
(`compute`).
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from torchtitan.experiments.rl.ask.call import ask_in_thread
from torchtitan.experiments.rl.ask.threads import WorkerThreads

T = TypeVar("T")

LARGE_WORK_S = 60.0
"""Limit in seconds of a call in the thread. A text of a million characters takes one or two."""
_LARGE_WORK = WorkerThreads(1, name="render")
"""One thread for large texts: several would keep the interpreter from the event loop."""


class Priority(IntEnum):
    """Order in which waiting callers continue.

    New requests come before answers: without requests the engine waits, and answers can wait.
    """

    FIRST_PROMPT = 0
    """A rollout that renders its first prompt."""
    NEW_GROUP = 1
    """A group that begins. So the requests of one group leave before the envs of 31 others are
    made."""
    COMPLETION = 2
    """A rollout that parses a completion, or renders what its env said to it."""


class YieldQueue:
    """Lets one waiting caller continue in each iteration of the event loop.

    Callers of a lower `Priority` go first; those of one go in the order in which they came.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []
        """Heap of waiting callers: priority, arrival number and the future that wakes each."""
        self._arrivals = itertools.count()
        self._scheduled = False
        self._holder: asyncio.Task | None = None
        """Task that continues in this iteration."""

    @property
    def busy(self) -> bool:
        """True if a caller waits, or continues in this iteration."""
        return self._scheduled

    @property
    def held(self) -> bool:
        """True if the running asyncio task continues in this iteration, so it need not wait."""
        return self._holder is not None and self._holder is asyncio.current_task()

    async def wait(self, priority: Priority) -> None:
        """Return in an iteration of the event loop in which no other caller returns."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), turn))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._wake_next)
        await turn
        self._holder = asyncio.current_task()

    def _wake_next(self) -> None:
        self._holder = None
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # a cancelled caller's future is done
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._wake_next)
                return
        self._scheduled = False


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, YieldQueue] = WeakKeyDictionary()


def yield_queue() -> YieldQueue:
    """Return the queue of the running event loop."""
    loop = asyncio.get_running_loop()
    queue = _QUEUES.get(loop)
    if queue is None:
        queue = _QUEUES[loop] = YieldQueue()
    return queue


async def compute(
    call: Callable[[], T], *, large: bool, priority: Priority = Priority.COMPLETION
) -> T:
    """Return the result of ``call``, without holding up the event loop for long.

    Args:
        large: if True, the call runs in a thread. Otherwise it runs on the event loop, in an
            iteration in which no other rollout computes.
        priority: order in which the caller's turn comes.

    Raises:
        UserCodeTimeout: a large call took longer than `LARGE_WORK_S`.
        UserCodeError: a large call raised anything.
        Exception: whatever a call on the event loop raised.
    """
    if large:
        return cast(T, await ask_in_thread(_LARGE_WORK, _LARGE_WORK.submit(call), LARGE_WORK_S))
    queue = yield_queue()
    if not queue.held:
        await queue.wait(priority)
    return call()
