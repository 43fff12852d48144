"""Rewards by comparison: each answer of a group against each other one."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import permutations


async def win_shares(count: int, prefers: Callable[[int, int], Awaitable[float]]) -> list[float]:
    """For each of ``count`` answers, the mean of its comparisons with the others: 1 where it won all, 0.5 where all tie.

    Each pair is compared in both orders, so that a judge's liking for a place cancels. One answer alone has 0.5.

    Args:
        prefers: of the answers at two indices, 1.0 where the first is better, 0.0 where the second is, 0.5 where neither is.
    """
    if count == 1:
        return [0.5]
    pairs = list(permutations(range(count), 2))
    wins = [0.0] * count
    for (first, second), verdict in zip(pairs, await asyncio.gather(*(prefers(*pair) for pair in pairs)), strict=True):
        wins[first] += verdict
        wins[second] += 1.0 - verdict
    return [share / (2 * (count - 1)) for share in wins]
