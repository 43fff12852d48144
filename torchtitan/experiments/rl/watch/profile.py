"""Records what every process of a run does, and how busy each one is.

    every step       the share of the time that each process worked, as metrics
    steps A to B     all that each process did, in one trace file (``--profile-steps A:B``)

docs/operations.md says how to read both.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.command.checks import profiled_steps
from torchtitan.experiments.rl.compat.monarch import call_actor
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.lifetime import Lifetime
from torchtitan.experiments.rl.process.trace import Event

logger = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 30.0
"""Seconds that a process may take to hand over what it recorded."""
USAGE_TIMEOUT_S = 1.0
"""Seconds that a process may take to say how busy it was: the next step must not wait for it."""

Processes = Iterable[tuple[Lifetime, Any]]
"""Lifetime and actor (WatchedActor) of each process."""


class StepProfile(RunEvents):
    """Observer that asks every process what it does.

    A run that ends before the last profiled step calls `close` to write what was recorded.
    """

    def __init__(self, steps: str, *, run_dir: Path, processes: Callable[[], Processes]):
        """Profile the steps that a config names.

        Args:
            steps: value of RunConfig.profile_steps.
            processes: returns the processes that live now, beside this one.
        """
        self.file: Path | None = None
        """Trace file, once it is written."""
        self._steps = profiled_steps(steps)
        self._run_dir = run_dir
        self._processes = processes
        self._recording = False

    async def step_begins(self, step: int) -> None:
        """Have every process record from the first profiled step on."""
        if self._steps is None or self._recording or self.file is not None:
            return
        if step not in self._steps:
            return
        self._recording = True
        trace.start()
        await asyncio.gather(
            *(
                _reply(life, actor.start_trace, COLLECT_TIMEOUT_S)
                for life, actor in self._processes()
            )
        )

    async def step_published(self, step: int, metrics: dict[str, float]) -> None:
        """Add how busy each process was since the step before."""
        metrics |= await lap_usage(self._processes())

    async def step_over(self, step: int) -> None:
        """Write the trace after the last profiled step."""
        if self._steps is not None and step >= self._steps[-1]:
            await self.close()

    async def close(self) -> None:
        """Write what was recorded, if anything is."""
        if not self._recording or self._steps is None:
            return
        self._recording = False
        processes = list(self._processes())
        # This process records for longer than the others: what it waits for is in its trace.
        replies = await asyncio.gather(
            *(_reply(life, actor.stop_trace, COLLECT_TIMEOUT_S) for life, actor in processes)
        )
        events = {"controller": trace.stop()}
        for (life, _), reply in zip(processes, replies, strict=True):
            if reply:
                events[life.name] = reply
        self.file = self._run_dir / f"trace-steps-{self._steps[0]}-{self._steps[-1]}.json"
        await asyncio.to_thread(write_trace, self.file, events)


async def lap_usage(processes: Processes) -> dict[str, float]:
    """Return metrics of each process since the last call: ``perf/generator_0/busy`` and so on."""
    processes = list(processes)
    usages = await asyncio.gather(
        *(
            _reply(life, actor.usage, USAGE_TIMEOUT_S, level=logging.INFO)
            for life, actor in processes
        )
    )
    metrics = {}
    for (life, _), usage in zip(processes, usages, strict=True):
        name = "_".join(life.name.split())
        for what, value in (usage or {}).items():
            metrics[f"perf/{name}/{what}"] = value
    return metrics


async def _reply(
    life: Lifetime,
    endpoint: Any,  # noqa: ANN401 - Monarch's
    timeout_s: float,
    *,
    level: int = logging.WARNING,
) -> Any:  # noqa: ANN401 - whatever the endpoint replies
    """Return what a process replies.

    Returns:
        The reply; None, with a line in the log, if the process has died or is busy. Its supervisor
        sees to that.
    """
    try:
        return await asyncio.wait_for(life.call(call_actor(endpoint)), timeout_s)
    except Exception as error:  # noqa: BLE001 - a step goes on without this reply
        logger.log(level, "%s does not say what it did: %s", life.name, error)
        return None


def write_trace(path: Path, processes: Mapping[str, Sequence[Event]]) -> None:
    """Write events in Chrome's trace format, with times from the first event on.

    Args:
        processes: events by the name of the process.
    """
    first_ns = min((event["ts"] for events in processes.values() for event in events), default=0)
    written: list[Event] = []
    for pid, (process, events) in enumerate(processes.items(), start=1):
        name: Event = {
            "ph": "M",
            "name": "process_name",
            "tid": 0,
            "ts": first_ns,
            "args": {"name": process},
        }
        for event in (name, *events):
            written.append(event | {"pid": pid, "ts": (event["ts"] - first_ns) / 1e3})
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": written}, default=str)
    path.write_text(text + "\n", encoding="utf-8")
