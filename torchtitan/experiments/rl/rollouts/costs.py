"""Costs of a group, such as calls and tokens of judges, added up by whoever causes them.

The run of a group calls `counted_in` with the group's dict. Envs, rewards and judges, on the event
loop or in threads, then call `add_cost` without knowing the group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COSTS: ContextVar[dict[str, float] | None] = ContextVar("costs", default=None)
"""Costs of the group that the running asyncio task or thread works for; None outside a group."""


@contextmanager
def counted_in(costs: dict[str, float]) -> Iterator[None]:
    """Have `add_cost` add to ``costs`` in this context.

    The asyncio tasks that start in it belong to it, and so do calls of sync user code in threads.
    """
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)


def add_cost(name: str, amount: float) -> None:
    """Add a cost to the group that is being run or scored; do nothing outside a group.

    Nothing guards the sum: two threads that add to one cost at the same time may lose an amount.
    """
    costs = _COSTS.get()
    if costs is not None:
        costs[name] = costs.get(name, 0.0) + amount
