"""Endpoints of the run's actors. Whatever an endpoint raises leaves its process as a RunError of one sentence.

Monarch pickles what an endpoint raised. An exception that can't be pickled, or can't be rebuilt from its arguments, is never
delivered: the caller waits for ever. SystemExit ends the actor. And the caller has no use for an engine's or a user's exception
class. So the sentence names the part and the cause, and the traceback is in the log of the process where it happened.

``WatchedActor`` is what every actor that has a process of its own answers about that process, whatever else it does.
"""

import asyncio
import faulthandler
import functools
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, Port, concurrent_endpoint

from torchtitan.experiments.rl.compat.monarch import original, process_death_behind
from torchtitan.experiments.rl.errors import PeerGone, RunError, cause_of, users_traceback
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.lifetime import Heartbeat, Pulse
from torchtitan.experiments.rl.process.output import printed_file, send_notes_to
from torchtitan.experiments.rl.process.setup import (
    end_without_finalizing,
    ignore_signals_of_the_command,
)

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
            cancelled = (
                isinstance(error, asyncio.CancelledError)
                and task is not None
                and task.cancelling() > 0
            )
            if (
                cancelled
                or isinstance(error, GeneratorExit)
                or process_death_behind(error) is not None
            ):
                raise
            if self.part:
                # For the file: the caller has the cause, and says it where it matters to people.
                logger.info("%s: %s failed", self.part, method.__name__, exc_info=error)
            cause, kind = (
                cause_in(error),
                PeerGone if isinstance(original(error), PeerGone) else RunError,
            )
            traceback = users_traceback(original(error))
        # Outside of the handler: raised there, the error would hold the one that can't be pickled as its context.
        reported_error = kind(cause if cause.startswith(self.part) else f"{self.part}: {cause}")
        reported_error.traceback = traceback
        raise reported_error

    return call


def cause_in(error: BaseException) -> str:
    """The cause of a failed call in one sentence."""
    return cause_of(original(error))


def for_a_future(error: BaseException) -> BaseException:
    """``error``, as a thread may set it on a future that a coroutine awaits: asyncio takes no StopIteration."""
    return RunError(cause_in(error)) if isinstance(error, StopIteration) else error


STACK_SIGNAL = signal.SIGUSR2
"""A process that gets it writes the stack of each thread to ``ProcessIdentity.stacks``. No thread has to be free for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    host: str
    """From ``host_identity``."""
    pid: int
    stacks: str
    """Where processes of the same host read what STACK_SIGNAL has it write."""
    output: str = ""
    """The file with what it prints; "" where it prints where the command does."""


class WatchedActor(Actor):
    """Its event loop answers; its working thread, if it has one, writes ``heartbeat``."""

    def __init__(self) -> None:
        self.part = ""
        self.heartbeat = Heartbeat()
        # In memory: a file in the run's folder would stay behind, empty, in every run.
        self._stacks = os.memfd_create("stacks")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)

    @reported_endpoint
    async def identity(self) -> ProcessIdentity:
        pid = os.getpid()
        stacks = f"/proc/{pid}/fd/{self._stacks}"
        return ProcessIdentity(host=host_identity(), pid=pid, stacks=stacks, output=printed_file())

    @reported_endpoint
    async def send_notes_to(self, port: Port[str]) -> None:
        """Send what this process has to say to people to ``port`` from now on."""
        # Once the run has ended nobody reads them, and the process need not hear of that.
        port.return_undeliverable = False
        send_notes_to(port)

    @reported_endpoint
    async def pulse(self) -> Pulse:
        """What its working thread is doing."""
        return self.heartbeat.pulse()

    @reported_endpoint
    async def usage(self) -> dict[str, float]:
        """How this process was used since the last call: ``busy`` is the share of the time that its working thread, if it has
        one, worked."""
        busy = self.heartbeat.lap_busy()
        return ({} if busy is None else {"busy": busy}) | self._more_usage()

    def _more_usage(self) -> dict[str, float]:
        """What an actor has to add to ``usage``."""
        return {}

    @reported_endpoint
    async def start_trace(self) -> None:
        """Record what this process does from now on."""
        trace.start()

    @reported_endpoint
    async def stop_trace(self) -> list[trace.Event]:
        """What it did since then."""
        return trace.stop()

    @reported_endpoint
    async def may_be_stopped(self) -> None:
        """Have SIGTERM end this process again: Monarch is about to send it, unless the process ends by itself first."""
        ignore_signals_of_the_command(False)
        end_without_finalizing()
