"""What every actor of a run answers about its process, whatever else it does."""

import os
import socket

from monarch.actor import Actor, concurrent_endpoint


class WatchedActor(Actor):
    @concurrent_endpoint
    async def identity(self) -> tuple[str, int]:
        """Host name and process id."""
        return socket.gethostname(), os.getpid()
