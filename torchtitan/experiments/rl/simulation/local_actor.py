"""Stands in for Monarch where an actor and its callers live in one process."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class LocalEndpoint:
    """Endpoint of an actor in this process, with the methods that Monarch's endpoints have."""

    def __init__(self, call: Callable[..., Any]):
        self.broadcast = call
        """Calls the actor's method and waits for no answer."""
        self._call = call

    async def choose(self, *args: Any) -> Any:  # noqa: ANN401 - the arguments of any method
        """Call the method, and return its answer."""
        return await self._call(*args)

    call_one = choose

    async def call(self, *args: Any) -> dict[int, Any]:  # noqa: ANN401 - as above
        """Call the method, and return its answer by rank, as if this were a mesh of one."""
        return {0: await self._call(*args)}


@dataclass(slots=True, frozen=True)
class LocalSender:
    """Sending end of a channel in this process."""

    send: Callable[[Any], None]


@dataclass(slots=True, frozen=True)
class LocalReceiver:
    """Receiving end of a channel in this process."""

    recv: Callable[[], Any]


def open_channel() -> tuple[LocalSender, LocalReceiver]:
    """Return both ends of a new channel in this process."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    return LocalSender(messages.put_nowait), LocalReceiver(messages.get)
