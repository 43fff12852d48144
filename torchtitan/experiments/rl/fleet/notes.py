"""Prints what the processes of a run have to say, in the one process that prints."""

import asyncio
import logging
import sys

from monarch.actor import Channel

from torchtitan.experiments.rl.observability.console import Console, write_line

logger = logging.getLogger(__name__)


def print_notes(console: Console) -> asyncio.Task[None]:
    """Print the notes of the processes that are watched from now on, until the task is cancelled.

    Call it in an actor, because processes send their notes to the actor that calls it.
    """
    port, receiver = Channel[str].open()
    console.notes = port

    async def print_all() -> None:
        try:
            while True:
                write_line(sys.stderr, await receiver.recv())
        except Exception:
            logger.exception("the notes of other processes can't be printed any more")

    return asyncio.create_task(print_all())
