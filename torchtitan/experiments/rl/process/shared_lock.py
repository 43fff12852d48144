"""A lock that many coroutines share, or that one has alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SharedLock:
    """Lets many coroutines be in shared sections at once, or one in an exclusive section.

        lock = SharedLock()
        async with lock.shared():       # a group settles; others may settle too
            ...
        async with lock.exclusive():    # a checkpoint reads the state; nothing settles meanwhile
            ...

    A waiting exclusive section holds off new shared ones, so it is not starved.
    """

    def __init__(self) -> None:
        self.is_excluding = False
        """True while an exclusive section waits for shared ones to end, and until it ends."""
        self._sharing = 0
        self._released = asyncio.Event()

    def begin_shared(self) -> None:
        """Begin a shared section without waiting. The caller has seen ``is_excluding`` False."""
        self._sharing += 1

    def end_shared(self) -> None:
        self._sharing -= 1
        self._released.set()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold off exclusive sections. Enters without yielding to the event loop if none waits."""
        while self.is_excluding:
            await self._wait_for_release()
        self.begin_shared()
        try:
            yield
        finally:
            self.end_shared()

    async def begin_exclusive(self) -> None:
        """Hold off new shared sections, and wait until none is left."""
        while self.is_excluding:
            await self._wait_for_release()
        self.is_excluding = True
        try:
            while self._sharing:
                await self._wait_for_release()
        except BaseException:  # cancelled
            self.end_exclusive()
            raise

    def end_exclusive(self) -> None:
        self.is_excluding = False
        self._released.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until all shared sections have ended, and hold off new ones."""
        await self.begin_exclusive()
        try:
            yield
        finally:
            self.end_exclusive()

    async def _wait_for_release(self) -> None:
        self._released.clear()
        await self._released.wait()
