"""How full an engine was, over the steps since someone asked last."""

from torchtitan.experiments.rl.generation.engine import Occupancy


class EngineUsage:
    """Written by the engine's thread, read by the event loop. What is added while it is read may be left out."""

    def __init__(self) -> None:
        self._steps = self._running = self._waiting = 0
        self._cache_max = 0.0

    def add(self, now: Occupancy) -> None:
        """After each step."""
        self._steps += 1
        self._running += now.running
        self._waiting += now.waiting
        self._cache_max = max(self._cache_max, now.cache)

    def lap(self) -> dict[str, float]:
        """Since the last call: number of ``steps``, the mean of requests ``running`` and ``waiting`` after a step, and the
        largest share of the cache in use."""
        steps = max(1, self._steps)
        found = {
            "steps": self._steps,
            "running": self._running / steps,
            "waiting": self._waiting / steps,
            "cache_max": self._cache_max,
        }
        self._steps = self._running = self._waiting = 0
        self._cache_max = 0.0
        return found
