"""Keeps a burst of rendering from blocking the event loop."""

import asyncio
from collections import deque
from enum import IntEnum
from weakref import WeakKeyDictionary


class Line(IntEnum):
    """Who continues first. New requests come before answers: without requests the engine waits, and answers can."""

    FIRST_PROMPT = 0
    """A rollout that renders its first prompt."""
    NEW_GROUP = 1
    """A group that begins. So the requests of one group leave before the envs of 31 others are made."""
    ANSWER = 2
    """A rollout that parses a completion, or renders what its env said to it."""


class YieldQueue:
    """A cooperative yield queue: lets one caller continue in each iteration of the event loop; first come, first served in
    each line.

    Rendering a prompt computes for 0.1 to 1 ms without awaiting. When an engine answers 512 requests at once, all 512 rollouts
    are ready in one iteration of the loop, and everything else (timers, messages of generators, the trainer) would wait for
    half a second. One caller an iteration costs some 20 us a call.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, deque[asyncio.Future[None]]] = {line: deque() for line in Line}
        self._scheduled = False
        self._holder: asyncio.Task | None = None
        """Who has continued in this iteration."""

    @property
    def busy(self) -> bool:
        """Whether a caller waits, or continues in this iteration."""
        return self._scheduled

    @property
    def held(self) -> bool:
        """Whether the running asyncio task has been let continue in this iteration, so that it need not wait again."""
        return self._holder is not None and self._holder is asyncio.current_task()

    async def wait(self, line: Line) -> None:
        """Return in an iteration of the event loop in which no other caller returns."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._lines[line].append(place)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        await place
        self._holder = asyncio.current_task()

    def _next(self) -> None:
        self._holder = None
        for line in self._lines.values():
            while line:
                place = line.popleft()
                if not place.done():  # done: cancelled
                    place.set_result(None)
                    asyncio.get_running_loop().call_soon(self._next)
                    return
        self._scheduled = False


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, YieldQueue] = WeakKeyDictionary()


def yield_queue() -> YieldQueue:
    """The queue of the running event loop."""
    loop = asyncio.get_running_loop()
    queue = _QUEUES.get(loop)
    if queue is None:
        queue = _QUEUES[loop] = YieldQueue()
    return queue
