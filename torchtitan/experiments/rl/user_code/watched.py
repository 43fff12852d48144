"""What every actor of a run that has a process of its own answers about that process, whatever else it does."""

import os
import socket

from monarch.actor import Actor

from torchtitan.experiments.rl.user_code.endpoint import reported_endpoint


class WatchedActor(Actor):
    def __init__(self) -> None:
        self.part = ""

    @reported_endpoint
    async def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()
