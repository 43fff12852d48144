"""Work that runs beside a loop, until it ends or is cancelled."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

CANCEL_S = 60.0
"""How long cancelled groups may take to close their envs before they are abandoned."""


class Running:
    """asyncio tasks that nobody awaits."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run it from now on. It may not raise."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._tasks)

    async def cancel(self) -> None:
        """Cancel what runs. Returns when it has ended, or after CANCEL_S."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CANCEL_S)
            if late:
                logger.warning("%d groups ignored their cancellation and were abandoned", len(late))
