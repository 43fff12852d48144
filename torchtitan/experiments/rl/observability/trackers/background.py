"""Gives a tracker what is to be logged in a thread of its own, so that none holds up or ends a run."""

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable

from torchtitan.experiments.rl.observability.trackers.tracker import TrackedRun, Tracker
from torchtitan.experiments.rl.printable import one_sentence

logger = logging.getLogger(__name__)

QUEUED = 1000
"""Calls that may wait: some hundred steps. A network that is gone for minutes costs nothing."""
CLOSE_LIMIT_S = 60.0
"""How long the end of a run waits for what is queued."""
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


class BackgroundTracker:
    def __init__(self, config: Tracker.Config, run: TrackedRun, *, name: str):
        """``name``: what warnings call it."""
        self._config, self._run, self._name = config, run, name
        self._queue: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(QUEUED)
        self._off, self._turning_off = False, threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], object]) -> None:
        """Have ``call`` called with the tracker. Returns at once, whatever the tracker does."""
        if not self._off:
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._turn_off(f"it has taken nothing of the last {QUEUED} entries")

    def close(self) -> None:
        """Wait until what is queued is logged. Blocks for at most CLOSE_LIMIT_S; a second call does nothing."""
        if not self._off:
            deadline = time.monotonic() + CLOSE_LIMIT_S
            try:
                self._queue.put(None, timeout=CLOSE_LIMIT_S)
                self._thread.join(max(0.0, deadline - time.monotonic()))
            except queue.Full:
                pass
            if self._thread.is_alive():
                self._turn_off(f"it took more than {CLOSE_LIMIT_S:g} s to end")
        self._off = True

    def _work(self) -> None:
        try:
            tracker = self._config.build(run=self._run)
            while (call := self._queue.get()) is not None:
                if self._off:
                    return
                call(tracker)
            tracker.close()
        except BaseException as error:  # a user's class may exit, too
            self._turn_off(f"{type(error).__name__}: {error}")

    def _turn_off(self, why: str) -> None:
        with self._turning_off:  # a close in between waits for the warning
            if self._off:
                return
            logger.warning("nothing more is sent to %s: %s", self._name, one_sentence(without_secrets(why)))
            self._off = True


def without_secrets(text: str) -> str:
    """``text`` without the values of environment variables that hold keys: a server may repeat them."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"({name})")
    return text
