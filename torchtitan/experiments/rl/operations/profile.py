"""What every process of the run does: how busy each is, and all of it in one file for some steps (``--profile-steps A:B``).

The file is written in the run's folder as ``trace-steps-A-B.json``; docs/operations.md says how to read it.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.compat.monarch import ask
from torchtitan.experiments.rl.config.checks import profiled_steps
from torchtitan.experiments.rl.controller.events import RunEvents
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.trace import Event

logger = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 30.0
ANSWER_S = 1.0
"""A process that takes longer has no metrics in that step: the next step must not wait for it."""


class StepProfile(RunEvents):
    """``close`` writes what was recorded of a run that ends before the last of the steps."""

    def __init__(self, steps: str, *, run_dir: Path, processes: Callable[[], Iterable[tuple[Lifetime, Any]]]):
        """
        Args:
            steps: as in RunConfig.profile_steps.
            processes: the processes that live now, beside this one: their lives and their actors.
        """
        self._steps, self._run_dir, self._processes = profiled_steps(steps), run_dir, processes
        self._recording = False
        self.file: Path | None = None
        """Where the profile was written."""

    async def step_begins(self, step: int) -> None:
        if self._steps is None or self._recording or self.file is not None or step not in self._steps:
            return
        self._recording = True
        trace.start()
        await asyncio.gather(*(_answer(life, actor.start_trace, COLLECT_TIMEOUT_S) for life, actor in self._processes()))

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """How busy each process was since the step before."""
        metrics |= await lap_usage(self._processes())

    async def step_over(self, step: int) -> None:
        if self._steps is not None and step >= self._steps[-1]:
            await self.close()

    async def close(self) -> None:
        """Write what was recorded, if anything is."""
        if not self._recording or self._steps is None:
            return
        self._recording = False
        processes = list(self._processes())
        # Those of other processes first: what this one waits for is in its own.
        answers = await asyncio.gather(*(_answer(life, actor.stop_trace, COLLECT_TIMEOUT_S) for life, actor in processes))
        events = {life.name: answer for (life, _), answer in zip(processes, answers, strict=True) if answer}
        self.file = self._run_dir / f"trace-steps-{self._steps[0]}-{self._steps[-1]}.json"
        await asyncio.to_thread(write_trace, self.file, {"controller": trace.stop(), **events})


async def lap_usage(processes: Iterable[tuple[Lifetime, Any]]) -> dict[str, float]:
    """Metrics of each process since the last call: ``perf/generator_0/busy`` and so on.

    Args:
        processes: the life and the actor (WatchedActor) of each.
    """
    processes = list(processes)
    usages = await asyncio.gather(*(_answer(life, actor.usage, ANSWER_S, logging.INFO) for life, actor in processes))
    return {
        f"perf/{'_'.join(life.name.split())}/{what}": value
        for (life, _), usage in zip(processes, usages, strict=True)
        for what, value in (usage or {}).items()
    }


async def _answer(life: Lifetime, endpoint: Any, limit_s: float, level: int = logging.WARNING) -> Any:
    """What a process answers; None, with a line in the log, where it has died or is busy: others see to that."""
    try:
        return await asyncio.wait_for(life.call(ask(endpoint)), limit_s)
    except Exception as error:
        logger.log(level, "%s does not say what it did: %s", life.name, error)
        return None


def write_trace(path: Path, processes: Mapping[str, Sequence[Event]]) -> None:
    """
    Args:
        processes: events by the name of the process. Their process ids are their places here.
    """
    zero = min((event["ts"] for events in processes.values() for event in events), default=0)
    written: list[Event] = []
    for pid, (process, events) in enumerate(processes.items(), start=1):
        name = {"ph": "M", "name": "process_name", "tid": 0, "ts": zero, "args": {"name": process}}
        written += [event | {"pid": pid, "ts": (event["ts"] - zero) / 1e3} for event in (name, *events)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": written}, default=str)
    path.write_text(text + "\n", encoding="utf-8")
