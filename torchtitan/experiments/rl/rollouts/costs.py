"""What a group costs beside the policy's sampling, such as calls of a judge: counted by name where it arises."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COSTS: ContextVar[dict[str, float] | None] = ContextVar("costs", default=None)


@contextmanager
def counted_in(costs: dict[str, float]) -> Iterator[None]:
    """Inside, also in asyncio tasks and threads that are started inside, ``add_cost`` adds to ``costs``."""
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)


def add_cost(name: str, amount: float) -> None:
    """Count for the group that is run or scored; nothing outside one."""
    costs = _COSTS.get()
    if costs is not None:
        costs[name] = costs.get(name, 0.0) + amount
