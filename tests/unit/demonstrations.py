"""Conversations of a dataset as a task's rows, and examples with demonstrations."""

from typing import Any

from tests.fakes.contexts import context_of
from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks import DemonstrationTask, MemoryRows, RowDataset

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def task_of(renderer: Any, *rows: dict[str, Any], **changes: Any) -> DemonstrationTask:
    """Return the task of these rows. ``changes`` are fields of its config."""
    config = DemonstrationTask.Config(
        dataset=RowDataset.Config(rows=MemoryRows(list(rows))), **changes
    )
    return config.build(name="chats", context=context_of(renderer))


def check_example(
    algorithm: Algorithm.Config, example: DataSample, renderer: Any, **limits: int
) -> None:
    """Have an algorithm check the example of a task with these limits."""
    built = build_with(algorithm, context_of(renderer))
    built.check_example(
        example, field="tasks.t", **({"max_rollout_tokens": 100, "max_model_len": 256} | limits)
    )
