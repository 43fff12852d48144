"""Endpoints of the run's actors, whose errors reach the caller as a RunError of one sentence.

Monarch pickles what an endpoint raises. An exception that can't be pickled, or can't be rebuilt
from its arguments, is never delivered, and the caller waits for ever; SystemExit ends the actor.
And the caller has no use for the exception classes of an engine or a user. So the sentence names
the process and the cause, and the traceback is in the log of the process where it happened.

`WatchedActor` answers what the supervisor asks of every actor that has a process of its own.
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
from torchtitan.experiments.rl.process.finalization import end_without_finalizing
from torchtitan.experiments.rl.process.heartbeat import Heartbeat, Pulse
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.output import printed_file, send_notes_to
from torchtitan.experiments.rl.process.setup import heed_signals_again

logger = logging.getLogger(__name__)


def reported_endpoint(method: Callable[..., Awaitable[Any]]) -> Any:  # noqa: ANN401 - Monarch's
    """Make a concurrent endpoint of a method of an actor; see `reported`."""
    return concurrent_endpoint(reported(method))


def reported(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return the method with every error made a RunError.

    The actor's ``process_name`` names its process in errors: "trainer 0". It is empty for the
    controller, whose errors are those of the run, and which logs them itself.

    The returned method raises a RunError, or PeerGone if the method met one. These pass as they
    are: Monarch's SupervisionError, if the method called an actor whose process died, and
    CancelledError, if this process cancelled the call.
    """

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method's
        try:
            return await method(self, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the actor
            if _passes(error):
                raise
            if self.process_name:
                # In the log alone: the caller gets the cause, and says it if it matters to people.
                logger.info("%s: %s failed", self.process_name, method.__name__, exc_info=error)
            reported_error = _reported_error(error, self.process_name)
        # Outside of the handler: raised there, it would hold the one that can't be pickled as its
        # context.
        raise reported_error

    return call


def _passes(error: BaseException) -> bool:
    """Return True if Monarch or asyncio has to see an error as it is.

    A CancelledError that the code has raised by itself is an error like others.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            return True
    return isinstance(error, GeneratorExit) or process_death_behind(error) is not None


def _reported_error(error: BaseException, name: str) -> RunError:
    """Return the error that the caller gets."""
    kind = PeerGone if isinstance(original(error), PeerGone) else RunError
    cause = cause_in(error)
    reported_error = kind(cause if cause.startswith(name) else f"{name}: {cause}")
    reported_error.traceback = users_traceback(original(error))
    return reported_error


def cause_in(error: BaseException) -> str:
    """Return the cause of a failed call in one sentence."""
    return cause_of(original(error))


def for_a_future(error: BaseException) -> BaseException:
    """Return an error that a future of asyncio can hold, which takes no StopIteration."""
    return RunError(cause_in(error)) if isinstance(error, StopIteration) else error


STACK_SIGNAL = signal.SIGUSR2
"""Signal on which a process writes the stack of each thread to its `ProcessIdentity.stacks`. No
thread has to be free for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """Process of an actor, as processes of its host find it."""

    host: str
    """Host, as `host_identity` names it."""
    pid: int
    stacks: str
    """File that STACK_SIGNAL has the process write, for processes of the same host."""
    output: str = ""
    """File with what the process prints; empty if it prints where the command does."""


class WatchedActor(Actor):
    """Actor that says who it is, what it does, and how busy it is.

    Its event loop answers. Its working thread, if it has one, writes the heartbeat.
    """

    def __init__(self) -> None:
        self.process_name = ""
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
        """Return what the working thread is doing."""
        return self.heartbeat.pulse()

    @reported_endpoint
    async def usage(self) -> dict[str, float]:
        """Return how this process was used since the last call.

        "busy" is the share of the time that the working thread worked, if there is one.
        """
        busy = self.heartbeat.lap_busy()
        usage = {} if busy is None else {"busy": busy}
        return usage | self._more_usage()

    def _more_usage(self) -> dict[str, float]:
        """Return what an actor adds to `usage`."""
        return {}

    @reported_endpoint
    async def start_trace(self) -> None:
        """Record what this process does from now on."""
        trace.start()

    @reported_endpoint
    async def stop_trace(self) -> list[trace.Event]:
        """Return what this process did since `start_trace`."""
        return trace.stop()

    @reported_endpoint
    async def may_be_stopped(self) -> None:
        """Have SIGTERM end this process again.

        Monarch is about to send it, unless the process ends by itself first.
        """
        heed_signals_again()
        end_without_finalizing()
