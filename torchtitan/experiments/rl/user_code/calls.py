"""Calls that are still written in the old words. New code uses `ask/`."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from torchtitan.experiments.rl.ask.call import ask, ask_in_thread
from torchtitan.experiments.rl.ask.threads import WorkerThreads
from torchtitan.experiments.rl.errors import UserCodeError, UserCodeTimeout, cause_of

__all__ = [
    "HOLD_S",
    "Threads",
    "UserCodeError",
    "UserCodeTimeout",
    "call_bounded",
    "call_user",
    "cause_of",
    "doing",
]

T = TypeVar("T")
HOLD_S = 0.005
call_user = ask


class Threads(WorkerThreads):
    async def call(self, function: Callable[..., Any], *, timeout_s: float | None) -> Any:
        return await ask_in_thread(self, self.submit(function), timeout_s)


async def call_bounded(
    call: Callable[[], Awaitable[T]], *, timeout_s: float | None, owner: str = ""
) -> T:
    async def called() -> T:
        return await call()

    if not owner:
        return await ask(called, timeout_s=timeout_s)
    try:
        return await ask(called, timeout_s=timeout_s, owner=owner)
    except UserCodeError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def doing(what: str) -> AbstractContextManager[None]:
    return nullcontext()
