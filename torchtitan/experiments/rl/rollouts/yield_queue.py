"""Keeps a burst of rendering from blocking the event loop."""

import asyncio
from collections import deque
from weakref import WeakKeyDictionary


class YieldQueue:
    """A cooperative yield queue: lets one caller continue in each iteration of the event loop, first come, first served.

    Rendering a prompt computes for 0.1 to 1 ms without awaiting. When an engine answers 512 requests at once, all 512 rollouts
    are ready in one iteration of the loop, and everything else (timers, messages of generators, the trainer) would wait for
    half a second. One caller an iteration costs some 20 us a call.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._holder: asyncio.Task | None = None
        """Who has continued in this iteration."""

    @property
    def busy(self) -> bool:
        """Whether a caller waits, or continues in this iteration."""
        return bool(self._waiting)

    @property
    def held(self) -> bool:
        """Whether the running asyncio task has been let continue in this iteration, so that it need not wait again."""
        return self._holder is not None and self._holder is asyncio.current_task()

    async def wait(self) -> None:
        """Return in an iteration of the event loop in which no other caller returns."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._waiting.append(place)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await place
        self._holder = asyncio.current_task()

    def _next(self) -> None:
        # The head stays in the queue until its iteration is over: an empty queue would let the next caller schedule _next
        # again.
        self._holder = None
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].set_result(None)
            asyncio.get_running_loop().call_soon(self._next)


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, YieldQueue] = WeakKeyDictionary()


def yield_queue() -> YieldQueue:
    """The queue of the running event loop."""
    loop = asyncio.get_running_loop()
    queue = _QUEUES.get(loop)
    if queue is None:
        queue = _QUEUES[loop] = YieldQueue()
    return queue
