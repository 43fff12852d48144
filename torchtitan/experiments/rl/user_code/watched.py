"""What every actor of a run that has a process of its own answers about that process, whatever else it does."""

import asyncio
import faulthandler
import os
import signal
import time
from dataclasses import dataclass

from monarch.actor import Actor

from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.heartbeat import Heartbeat, Pulse
from torchtitan.experiments.rl.process.host import host_identity
from torchtitan.experiments.rl.process.memory import GIVE_BACK_EVERY_S, give_back_free_memory
from torchtitan.experiments.rl.process.setup import end_without_finalizing, ignore_signals_of_the_command
from torchtitan.experiments.rl.process.terminal import printed_file
from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint

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
        self._gave_back = time.monotonic()
        # In memory: a file in the run's folder would stay behind, empty, in every run.
        self._stacks = os.memfd_create("stacks")
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)

    @reported_endpoint
    async def identity(self) -> ProcessIdentity:
        pid = os.getpid()
        stacks = f"/proc/{pid}/fd/{self._stacks}"
        return ProcessIdentity(host=host_identity(), pid=pid, stacks=stacks, output=printed_file())

    @reported_endpoint
    async def pulse(self) -> Pulse:
        """What its working thread is doing."""
        return self.heartbeat.pulse()

    @reported_endpoint
    async def usage(self) -> dict[str, float]:
        """How this process was used since the last call: ``busy`` is the share of the time that its working thread, if it has
        one, worked. It is asked at every step, which is also when free memory may go."""
        if time.monotonic() - self._gave_back >= GIVE_BACK_EVERY_S:
            self._gave_back = time.monotonic()
            await asyncio.to_thread(give_back_free_memory)
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
