"""Keeps a burst of rendering from holding up the event loop."""

import asyncio
from collections import deque
from weakref import WeakKeyDictionary


class Turnstile:
    """Lets one caller through in each iteration of the event loop, first come, first served.

    Rendering a turn computes for 0.1 to 1 ms without awaiting. When an engine answers 512 requests at once, all 512 rollouts
    are ready in one iteration of the loop, and whatever else waits (timers, messages of generators, the trainer) comes half a
    second later. Going one by one costs an iteration a turn, some 20 us.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def busy(self) -> bool:
        """Whether somebody waits for a turn, or has it in this iteration."""
        return bool(self._waiting)

    async def wait_turn(self) -> None:
        """Return in an iteration that no other caller has."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        # The head stays until the iteration it was let through in is over, so that nobody else starts a second row.
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting:
            self._waiting[0].set_result(None)
            asyncio.get_running_loop().call_soon(self._next)


_TURNSTILES: WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = WeakKeyDictionary()


def turnstile() -> Turnstile:
    """The running loop's."""
    return _TURNSTILES.setdefault(asyncio.get_running_loop(), Turnstile())
