"""Finds which reward function changed a rollout."""

import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from torchtitan.experiments.rl.rollouts.finished import ExampleContent, FinishedRollout
from torchtitan.experiments.rl.rollouts.types import Rollout


class RolloutWatch:
    """Compares rollouts with their state before, each time that a reward function has ended; undoes and names a change.

    Functions run side by side, some in threads. Where several ran on a rollout when it changed, all of them are named.
    """

    def __init__(self, rollouts: Sequence[Rollout], env_input: Any = None):
        self._finished: dict[int, FinishedRollout] = {}
        self._running: dict[int, list[str]] = {id(rollout): [] for rollout in rollouts}
        self._changes: dict[int, list[str]] = {id(rollout): [] for rollout in rollouts}
        self._lock = threading.Lock()
        info = next((rollout.data_sample.info for rollout in rollouts if rollout.data_sample is not None), None)
        self._example = ExampleContent(env_input, info)

    def changes(self, rollout: Rollout) -> list[str]:
        """What was changed of it, and by which function, one line each."""
        return self._changes[id(rollout)]

    def watched(self, name: str, function: Callable[..., Any], rollouts: Sequence[Rollout]) -> Callable[..., Any]:
        """The function, async where it is, with a look at ``rollouts`` as soon as it has ended."""
        keys = [id(rollout) for rollout in rollouts]
        for rollout in rollouts:
            if id(rollout) not in self._finished:
                self._finished[id(rollout)] = FinishedRollout(rollout)

        async def ended(value: Awaitable[Any]) -> Any:
            try:
                return await value
            finally:
                self._end(name, keys)

        async def call_async(*args: Any) -> Any:
            self._begin(name, keys)
            return await ended(function(*args))

        def call(*args: Any) -> Any:
            self._begin(name, keys)
            value: Any = None
            try:
                value = function(*args)
            finally:
                if not inspect.isawaitable(value):
                    self._end(name, keys)
            return ended(value) if inspect.isawaitable(value) else value

        return call_async if inspect.iscoroutinefunction(function) else call

    def _begin(self, name: str, keys: list[int]) -> None:
        with self._lock:
            for key in keys:
                self._running[key].append(name)

    def _end(self, name: str, keys: list[int]) -> None:
        with self._lock:
            changes = {}
            for key in keys:
                if change := self._finished[key].change():
                    self._finished[key].restore()
                    changes[key] = f"{change} of a rollout that has ended"
            if change := self._example.change():
                changes = dict.fromkeys(keys, f"the {change} of the example")
            # A function that saw all rollouts of a group gave none of them a value that can be relied on.
            first = next(iter(changes.values()), None)
            for key in keys:
                if first is not None:
                    self._changes[key].append(f"{_names(self._running[key])} changed {changes.get(key, first)}")
                self._running[key].remove(name)


def _names(names: list[str]) -> str:
    shown = " or ".join(repr(name) for name in sorted(set(names)))
    return f"reward function {shown}" if len(set(names)) == 1 else f"one of the reward functions {shown}"
