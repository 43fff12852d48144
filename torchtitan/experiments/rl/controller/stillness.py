"""Changes of some state that take more than one iteration of the event loop, and a reader that needs it between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Stillness:
    """Any number of changes at a time, or one reader. It waits for changes that have begun; later ones wait for it."""

    def __init__(self) -> None:
        self.wanted = False
        """A reader waits or reads."""
        self._changes = 0
        self._moved = asyncio.Event()

    def begin(self) -> None:
        """A change begins now; ``end`` it."""
        self._changes += 1

    def end(self) -> None:
        self._changes -= 1
        self._moved.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """A change. It begins without giving way to other coroutines where nobody reads."""
        while self.wanted:
            await self._next()
        self.begin()
        try:
            yield
        finally:
            self.end()

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """No change is under way."""
        while self.wanted:
            await self._next()
        self.wanted = True
        try:
            while self._changes:
                await self._next()
            yield
        finally:
            self.wanted = False
            self._moved.set()

    async def _next(self) -> None:
        self._moved.clear()
        await self._moved.wait()
