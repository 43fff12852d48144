"""Demonstrations: conversations of a dataset, learned from as they are. Nothing is sampled for them.

task = DemonstrationTask.Config(dataset=RowDataset.Config(path="chats.jsonl"))

A row is such as ``{"messages": [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "42"}]}``, and may have
``tools``.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.static_sft import StaticSFT
from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.data.dataset import Dataset, read_example
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.prompt import LARGE_TEXT, off_the_loop_if
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.tasks.demonstrations.conversation import Conversation, conversation_of, sample_of
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.types import TrainingSample
from torchtitan.experiments.rl.user_code.calls import cause_of

RENDERED_ROWS = 2_000
"""Rows that are rendered before the run, a second or two. Of more, the messages alone are checked."""


class DemonstrationTask(Task):
    """Each row is one rollout that has ended when it begins: its tokens have no policy version, and it has no reward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=StaticSFT.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        messages_column: NonEmptyStr = "messages"
        tools_column: NonEmptyStr = "tools"

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(DemonstrationTask.Config, self).validate(field=field, policy_path=policy_path)
            if not isinstance(self.algorithm, StaticSFT.Config):
                cure = "a DemonstrationTask samples nothing: use StaticSFT"
                raise ConfigError(f"{field}.algorithm", type(self.algorithm).__qualname__, cure)
            if self.validation is not None:
                cure = "demonstrations have no reward to measure: set it in a task that has"
                raise ConfigError(f"{field}.validation", self.validation, cure)

    config: Config
    repeats_example: ClassVar[bool] = False

    @property
    def needs_group(self) -> bool:
        """Conversations have nothing to do with each other."""
        return False

    @property
    def goes_stale(self) -> bool:
        """They are of no policy version."""
        return False

    def make_env(self, sample: DataSample) -> MessageEnv:
        raise TypeError("a DemonstrationTask has no env")

    def check_examples(self, *, field: str) -> None:
        """See Task."""
        lines, count = [], len(self.dataset)
        for index in range(count):
            example = read_example(self.dataset, index)
            try:
                if index < RENDERED_ROWS:
                    self._sample(example, rollout_id="")
                else:
                    self._conversation(example)
            except (TypeError, ValueError) as error:
                lines.append(f"row {example.sample_id}: {error}")
        if lines:
            cure = f"{len(lines)} of its {count} rows can't be trained on: change or remove them"
            raise ConfigError(f"{field}.dataset", type(self.dataset).__name__, cure, lines=lines)

    async def run_group(self, sample: DataSample, policy: PolicyClient, *, group_id: str, seed: int, **_: Any) -> RolloutGroup:
        """A group of one rollout with the row's training sample. A row that can't be rendered ends it as an error."""
        rollout = Rollout(group_id=group_id, index_in_group=0, task_name=self.name, data_sample=sample, static=True)
        large = len(str(sample.env_input)) > LARGE_TEXT
        try:
            rollout.samples = [await off_the_loop_if(large, lambda: self._sample(sample, rollout_id=rollout.rollout_id))]
            rollout.status, rollout.reward = RolloutStatus.COMPLETED, 0.0
        except Exception as error:  # of the renderer, about a row of the user's
            rollout.status, rollout.error = RolloutStatus.ERROR, f"task {self.name}: {cause_of(error)}"
        return RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=[rollout],
            admitted_version=policy.version,
        )

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Its weights are set. Sets and returns ``group.failure`` as Task does."""
        group.failure = None if group.scored else str(group.rollouts[0].error)
        return group.failure

    def _conversation(self, example: DataSample) -> Conversation:
        return conversation_of(example.env_input, messages=self.config.messages_column, tools=self.config.tools_column)

    def _sample(self, example: DataSample, *, rollout_id: str) -> TrainingSample:
        algorithm = self.config.algorithm
        assert isinstance(algorithm, StaticSFT.Config)
        sample = sample_of(
            self._conversation(example), self.renderer, roles=algorithm.roles, task_name=self.name, rollout_id=rollout_id
        )
        limit = self.config.env.max_rollout_tokens
        if len(sample) > limit:
            raise ValueError(f"it has {len(sample):,} tokens, and env.max_rollout_tokens is {limit:,}")
        return sample
