"""Questions of your own: rows of data, reward functions, and nothing else to write.

def exact(completion, example):
    return completion.strip() == example["answer"]

task = question_task("mine.jsonl", exact)  # rows such as {"question": "6 * 7?", "answer": "42"}
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from renderers import Renderer

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.rows import MemoryRows, RowDataset
from torchtitan.experiments.rl.envs.question_env import QuestionEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task

_COLUMN = re.compile(r"\{(\w+)\}")
"""A column's name in a template. Other braces, such as those of \\boxed{}, are text."""


class QuestionTask(Task):
    """One question, one answer: each row of the dataset fills the template, and whatever the model answers is scored."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        template: str = "{question}"
        """The user's message; {name} stands for the row's column of that name."""
        system_prompt: str | None = None
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(QuestionTask.Config, self).validate(field=field, policy_path=policy_path)
            if not _COLUMN.search(self.template):
                raise ConfigError(f"{field}.template", self.template, "names no column of the data, such as {question}")

        def check_present(self, *, field: str) -> None:
            super(QuestionTask.Config, self).check_present(field=field)
            if type(self.rubric) is Rubric.Config and not self.rubric.reward_fns:
                option = f"--{field.replace('_', '-')}.rubric my_rewards.py:exact"
                raise MissingError(f"{field}.rubric", None, f"names no reward function: give one, such as {option}")

    config: Config

    def __init__(self, config: Config, *, name: str, renderer: Renderer, seed: int = 0):
        super().__init__(config, name=name, renderer=renderer, seed=seed)
        for rows in (self.dataset, self.validation):
            if isinstance(rows, RowDataset):
                _check_template(config.template, rows.rows[0], field=f"{name}.template")

    def make_env(self, sample: DataSample) -> QuestionEnv:
        return QuestionEnv(fill(self.config.template, sample.env_input), system_prompt=self.config.system_prompt)


def question_task(
    data: Any, *reward_fns: Callable[..., Any] | RewardFn, validation: Any = None, **fields: Any
) -> QuestionTask.Config:
    """The config of a QuestionTask.

    Args:
        data: a .jsonl, .json, .csv or .parquet file, a dataset of the hub, a list of dicts, a pandas frame, or a dataset's
            config.
        reward_fns: functions ``fn(completion, example)`` where the example is the row's dict, or RewardFn.
        validation: as ``data``: rows the policy is measured on and never trained on.
        fields: of QuestionTask.Config, such as ``template`` and ``group_size``.

    Raises:
        ConfigError: the data is none of these.
    """
    if reward_fns:
        fields["rubric"] = Rubric.Config(reward_fns=list(reward_fns))
    held_out = None if validation is None else _dataset(validation, "validation")
    return QuestionTask.Config(dataset=_dataset(data, "dataset"), validation=held_out, **fields)


def fill(template: str, row: dict[str, Any]) -> str:
    """``template`` with each {column} replaced by the row's value. Other braces stay."""
    return _COLUMN.sub(lambda found: str(row[found[1]]), template)


def _dataset(data: Any, field: str) -> Dataset.Config:
    if isinstance(data, Dataset.Config):
        return data
    if isinstance(data, str | Path):
        return RowDataset.Config(path=str(data))
    if isinstance(data, type) or not (isinstance(data, list | tuple) or hasattr(data, "columns")):
        cure = "want a file, a dataset of the hub, a list of dicts, a pandas frame, or a dataset's config"
        raise ConfigError(field, data, cure)
    return RowDataset.Config(rows=MemoryRows(data))


def _check_template(template: str, row: dict[str, Any], *, field: str) -> None:
    for name in _COLUMN.findall(template):
        if name not in row:
            raise ConfigError(field, template, f"the data has no column {name!r}; it has {', '.join(row)}")
        if row[name] is None:
            raise ConfigError(field, template, f"the first row has no {name!r}")
