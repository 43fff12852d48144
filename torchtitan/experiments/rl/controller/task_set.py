"""The tasks of one process, from their configs to their close."""

import asyncio
import functools

from renderers import Renderer

from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, call_user
from torchtitan.experiments.rl.user_code.gate import Gate, sentence


class TaskSet:
    """``build``, then ``setup`` in the process that runs the rollouts; ``close`` closes the tasks that were set up."""

    def __init__(self, configs: dict[str, Task.Config], *, gate: Gate, limits: UserCodeLimits, seed: int):
        self.tasks: dict[str, Task] = {}
        self._configs, self._gate, self._limits, self._seed = configs, gate, limits, seed
        self._to_close: list[Task] = []

    async def build(self, renderer: Renderer, *, vocab_size: int | None = None) -> None:
        """Build every task: in the thread that calls samplers and datasets, since some work only where they were made.

        Args:
            vocab_size: token ids that the policy's model has.

        Raises:
            RunError: a task, its dataset or another part of it failed, or took longer than its limit; names the task.
        """
        for name, config in self._configs.items():
            build = functools.partial(config.build, name=name, renderer=renderer, seed=self._seed)
            owner = f"task {name!r} can't be built"
            task = self.tasks[name] = await self._gate.call(build, owner=owner, timeout_s=self._limits.setup_timeout_s)
            task.vocab_size = vocab_size

    async def setup(self, policy: PolicyClient) -> None:
        """Set up every task.

        Raises:
            RunError: a setup failed, or took longer than its limit; names the task. That task counts as not set up, unless its
                setup returned too late.
        """
        for name, task in self.tasks.items():
            try:
                await call_user(task.setup, policy, timeout_s=self._limits.setup_timeout_s)
            except UserCodeError as error:
                if isinstance(error, UserCodeTimeout) and error.returned:
                    self._to_close.append(task)
                raise RunError(f"task {name!r}: {type(task).__name__}.setup: {sentence(error)}") from error
            self._to_close.append(task)

    async def close(self) -> list[str]:
        """Close each task that was set up, once, side by side. Returns what went wrong, a line a task."""
        tasks, self._to_close = self._to_close, []
        faults = await asyncio.gather(*(self._close(task) for task in tasks))
        return [fault for fault in faults if fault is not None]

    async def _close(self, task: Task) -> str | None:
        try:
            await call_user(task.close, timeout_s=self._limits.close_timeout_s)
        except UserCodeError as error:
            return f"task {task.name!r}: {type(task).__name__}.close: {sentence(error)}"
        return None
