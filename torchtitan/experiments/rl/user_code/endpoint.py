"""Endpoints of the run's actors. Whatever an endpoint raises leaves its process as a RunError of one sentence.

Monarch pickles what an endpoint raised. An exception that can't be pickled, or can't be made again from its arguments, is never
delivered: the caller waits for ever. SystemExit ends the actor. And the caller has no use for an engine's or a user's exception
class. So the sentence names the part and the cause, and the traceback is in the log of the process where it happened.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from monarch.actor import concurrent_endpoint

from torchtitan.experiments.rl.compat.monarch import original, process_death_behind
from torchtitan.experiments.rl.errors import PeerGone, RunError
from torchtitan.experiments.rl.user_code.calls import cause_of

logger = logging.getLogger(__name__)


def reported_endpoint(method: Callable[..., Awaitable[Any]]) -> Any:
    """A concurrent endpoint, for methods of actors that have a ``part``: what errors call this process, such as "trainer 0".

    ``part`` is "" for the controller: its errors are those of the run, and it logs them itself.
    """
    return concurrent_endpoint(reported(method))


def reported(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """``method``, which raises a RunError (PeerGone where it met one), or Monarch's SupervisionError where it called an actor
    whose process died, or CancelledError where this process cancelled the call."""

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except BaseException as error:
            # A CancelledError that code in the call has raised by itself is an error.
            task = asyncio.current_task()
            cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
            if cancelled or isinstance(error, GeneratorExit) or process_death_behind(error) is not None:
                raise
            if self.part:
                # For the file: the caller has the cause, and says it where it matters to people.
                logger.info("%s: %s failed", self.part, method.__name__, exc_info=error)
            cause, kind = cause_in(error), PeerGone if isinstance(original(error), PeerGone) else RunError
        # Outside of the handler: raised there, the error would hold the one that can't be pickled as its context.
        raise kind(cause if cause.startswith(self.part) else f"{self.part}: {cause}")

    return call


def cause_in(error: BaseException) -> str:
    """The cause of a failed call in one sentence."""
    return cause_of(original(error))


def for_a_future(error: BaseException) -> BaseException:
    """``error``, as a thread may set it on a future that a coroutine awaits: asyncio takes no StopIteration."""
    return RunError(cause_in(error)) if isinstance(error, StopIteration) else error
