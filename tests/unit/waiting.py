"""Waiting for what a test expects, not for a time."""

import asyncio
from collections.abc import Callable

LIMIT_S = 30.0


async def until(condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds; the event loop runs meanwhile.

    Raises:
        TimeoutError: it does not hold within LIMIT_S.
    """
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def iterations(count: int = 200) -> None:
    """Let everything that is ready on the event loop run, ``count`` times over: what has not happened then won't."""
    for _ in range(count):
        await asyncio.sleep(0)
