"""Waiting until what a test expects has happened, and not for a time."""

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0
"""Maximum seconds to wait for what takes milliseconds; a busy machine takes seconds."""


async def until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds; the event loop runs meanwhile.

    Raises:
        TimeoutError: it does not hold within LIMIT_S.
    """
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def iterations(count: int = 200) -> None:
    """Let everything that is ready on the event loop run, ``count`` times over.

    What has not happened after that needs more than the event loop.
    """
    for _ in range(count):
        await asyncio.sleep(0)


async def settle() -> None:
    """Let the rollout loop or a client do all that needs no answer from outside."""
    await iterations(20)


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds, where no event loop runs.

    Raises:
        AssertionError: it does not hold within ten times LIMIT_S.
    """
    deadline = time.monotonic() + 10 * LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
