"""Fifty calls of each kind of bad code beside as many honest ones, on one event loop."""

import asyncio
import sys
import time

import pytest

from torchtitan.experiments.rl.ask import scopes
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.ask.lag import WATCH_S
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout

CALLS = 50


async def honest(number: int) -> int:
    for _ in range(3):
        await asyncio.sleep(0.01)
    return number


async def swallows_its_cancellation(number: int) -> int:
    while not asyncio.get_running_loop().is_closed():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if ENDED.is_set():
                raise
    return number


async def blocks(number: int) -> int:
    time.sleep(5 * WATCH_S)
    return number


async def exits(number: int) -> int:
    await asyncio.sleep(0.01)
    sys.exit(number)


ENDED = asyncio.Event()
"""Set when the test is over: the abandoned code may end then."""


@pytest.mark.slow
async def test_honest_calls_end_in_their_values_beside_as_many_bad_ones_of_each_kind(monkeypatch):
    monkeypatch.setattr(scopes, "CANCEL_GRACE_S", 0.1)
    ENDED.clear()
    kinds = (honest, swallows_its_cancellation, blocks, exits)
    calls = [
        ask(kind, number, timeout_s=2 * WATCH_S, owner=f"{kind.__name__} {number}")
        for number in range(CALLS)
        for kind in kinds
    ]
    try:
        ends = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        ENDED.set()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
    _, running = await asyncio.wait(left, timeout=10)
    assert len(left) == CALLS and not running, "only the abandoned code still ran"

    of_kind = {kind: ends[first :: len(kinds)] for first, kind in enumerate(kinds)}

    assert of_kind[honest] == list(range(CALLS))
    for number, end in enumerate(of_kind[exits]):
        assert isinstance(end, UserCodeError)
        assert str(end).startswith(f"exits {number}: SystemExit: {number} (test_ask_crowd.py:")
    for number, end in enumerate(of_kind[swallows_its_cancellation]):
        assert isinstance(end, UserCodeTimeout) and end.was_abandoned
        assert str(end) == f"swallows_its_cancellation {number}: no answer within 0.2 s"
        assert end.where.startswith("swallows_its_cancellation (test_ask_crowd.py:")
    for number, end in enumerate(of_kind[blocks]):
        assert isinstance(end, UserCodeTimeout)
        assert str(end).startswith(
            f"blocks {number}: no answer within 0.2 s: blocks (test_ask_crowd.py:"
        )
