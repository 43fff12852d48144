"""An env of your own and rows: no Task and no Config to write.

class AddEnv(MessageEnv):
    async def reset(self): return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])
    async def step_message(self, message): return StepOutput(env_messages=[], done=True)

task = env_task("mine.jsonl", AddEnv, exact)  # def exact(completion, row)
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.rows import RowDataset, row_datasets
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import Task

_WANTED = "want a class derived from MessageEnv, or a function that makes an env from a row"


class EnvTask(Task):
    """A conversation with an env that is made from the example."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        message_env: Annotated[Callable[[Any], MessageEnv], Cure(_WANTED)]
        """A class of envs, or a function: called with the example's ``env_input``, once for each rollout. Processes other than
        the command's import it by its name."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(EnvTask.Config, self).validate(field=field, policy_path=policy_path)
            field, made = f"{field}.message_env", self.message_env
            if isinstance(made, type) and not issubclass(made, MessageEnv):
                raise ConfigError(field, made, _WANTED)
            if missing := sorted(getattr(made, "__abstractmethods__", ())):
                raise ConfigError(
                    field, made.__name__, f"lacks {' and '.join(missing)}: define async def {missing[0]}(self, ...)"
                )
            try:
                inspect.signature(made).bind(None)
            except TypeError as error:
                raise ConfigError(field, made.__name__, f"{error}; it is called with the row alone") from None

    config: Config

    def make_env(self, sample: DataSample) -> MessageEnv:
        return self.config.message_env(sample.env_input)


def env_task(
    data: Any,
    message_env: Callable[[Any], MessageEnv],
    *reward_fns: Callable[..., Any] | RewardFn,
    validation: Any = None,
    split: float | None = None,
    **fields: Any,
) -> EnvTask.Config:
    """The config of an EnvTask.

    Args:
        data: as for ``question_task``, also ``validation`` and ``split``.
        message_env: a class derived from MessageEnv; its ``self.row`` is the row's dict.
        reward_fns: functions ``fn(completion, row)`` of the last thing that the model says, or RewardFn.
        fields: of EnvTask.Config, such as ``group_size`` and ``env=RendererEnvConfig(max_turns=3)``.

    Raises:
        ConfigError: the data is none of these.
    """
    if reward_fns:
        fields["rubric"] = Rubric.Config(reward_fns=list(reward_fns))
    dataset, held_out = row_datasets(data, validation, split)
    return EnvTask.Config(dataset=dataset, validation=held_out, message_env=message_env, **fields)
