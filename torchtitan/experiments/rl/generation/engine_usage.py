"""How full an engine was, over the steps since someone asked last."""

from torchtitan.experiments.rl.generation.engine import Occupancy


class EngineUsage:
    """Written by the engine's thread, read by the event loop. What is added while it is read may be left out."""

    def __init__(self) -> None:
        self._steps = self._running = self._waiting = 0
        self._cache_max = 0.0
        self._prompts = self._prompts_before = (0, 0)
        """Tokens of prompts, and how many of them were cached, since the engine was built."""

    def add(self, now: Occupancy) -> None:
        """After each step."""
        self._steps += 1
        self._running += now.running
        self._waiting += now.waiting
        self._cache_max = max(self._cache_max, now.cache)
        self._prompts = now.prompt_tokens, now.prompt_tokens_cached

    def lap(self) -> dict[str, float]:
        """Since the last call: number of ``steps``, the mean of requests ``running`` and ``waiting`` after a step, the largest
        share of the cache in use, and, where requests have finished, the share of their prompts' tokens that were cached."""
        steps = max(1, self._steps)
        prompts = self._prompts
        tokens, cached = (now - before for now, before in zip(prompts, self._prompts_before, strict=True))
        found = {
            "steps": self._steps,
            "running": self._running / steps,
            "waiting": self._waiting / steps,
            "cache_max": self._cache_max,
        }
        if tokens:
            found["prompts_cached"] = cached / tokens
        self._prompts_before = prompts
        self._steps = self._running = self._waiting = 0
        self._cache_max = 0.0
        return found
