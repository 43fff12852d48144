"""Supervised learning on conversations of a dataset: each row is rendered into a training sample; there is no env."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
from renderers import Message, Renderer, ToolSpec

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.sft import StaticSFT
from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.data.dataset import Dataset, read_example
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.conversation import LARGE_TEXT
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.messages import (
    check_all_rendered,
    checked_messages,
    checked_tools,
)
from torchtitan.experiments.rl.envs.prompt import first_prompt
from torchtitan.experiments.rl.envs.renderer import control_token_in
from torchtitan.experiments.rl.envs.yield_queue import compute
from torchtitan.experiments.rl.errors import ConfigError, cause_of, users_traceback
from torchtitan.experiments.rl.generation.judge import ChatClient
from torchtitan.experiments.rl.generation.references import FrozenModel
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)
from torchtitan.experiments.rl.tasks.task import Task, derive_seed
from torchtitan.experiments.rl.types import ROLE_IDS, TrainingSample

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles that have another name here."""

Conversation = tuple[list[Message], list[ToolSpec] | None]
"""Its messages, and the tools that the model was told of."""


def conversation_of(row: Any, *, messages: str, tools: str) -> Conversation:
    """The conversation in a row.

    Tables give every message the fields of every other, empty: those are left out, and content that is None is "". Messages of
    ShareGPT, ``{"from": "human", "value": "Hi"}``, are read as ``{"role": "user", "content": "Hi"}``.

    Args:
        messages: the column of the messages.
        tools: the column of the tools; a row may have none.

    Raises:
        TypeError, ValueError: it is none; names the column and the entry.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"it is {shown(row)}, want a dict with {messages!r}")
    if row.get(messages) is None:
        # A table fills the columns that one of its rows lacks with None.
        columns = ", ".join(str(column) for column, value in row.items() if value is not None)
        raise ValueError(
            f"it has no column {messages!r}; it has {columns}: name that of the messages as messages_column"
        )
    given = _without_none(row[messages])
    if isinstance(given, list):
        given = [
            {"content": ""} | _of_sharegpt(entry) if isinstance(entry, dict) else entry
            for entry in given
        ]
    checked = checked_messages(given, messages)
    if not checked:
        raise ValueError(f"{messages} is empty")
    found = _without_none(row.get(tools))
    return checked, None if found is None else checked_tools(found, tools)


def sample_of(
    conversation: Conversation,
    renderer: Renderer,
    *,
    roles: Collection[str],
    task_name: str,
    rollout_id: str,
) -> TrainingSample:
    """The conversation up to the last token that is trained on, with a ce weight of 1 on the tokens of ``roles``.

    What the template puts before an assistant's answer is part of a rollout's prompt, so it has no weight here either::

        token_ids    <system> <user> <assistant> <no thoughts>   answer  <end>
        ce_weights       0       0        0            0          1  1     1

    Raises:
        ValueError: the template has no place for a message, or nothing is trained on.
    """
    messages, tools = conversation
    rendered = renderer.render(messages, tools=tools)
    check_all_rendered(rendered, messages)
    whole = first_prompt(rendered)
    trained = whole.is_content & np.isin(whole.role_ids, [ROLE_IDS[role] for role in roles])
    trained[:1] = False  # nothing comes before it
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            prompt = renderer.render(
                messages[:index], tools=tools, add_generation_prompt=True
            ).token_ids
            if whole.ids[: len(prompt)] == prompt:
                trained[: len(prompt)] &= whole.message_indices[: len(prompt)] != index
    if not trained.any():
        raise ValueError(f"it has no message of {', '.join(roles)} with a token to train on")
    end = int(np.flatnonzero(trained)[-1]) + 1
    return TrainingSample(
        token_ids=whole.token_ids[:end],
        loss_mask=np.zeros(end, bool),
        generator_logprobs=np.zeros(end, np.float32),
        policy_versions=np.full(end, -1, np.int32),
        role_ids=whole.role_ids[:end],
        rl_weights=np.zeros(end, np.float32),
        ce_weights=trained[:end].astype(np.float32),
        task_name=task_name,
        rollout_id=rollout_id,
    )


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT with the names that messages have here; any other as it is."""
    if "role" in message or "content" in message or "from" not in message:
        return message
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    author = message["from"]
    return others | {
        "role": SHAREGPT_ROLES.get(str(author), author),
        "content": message.get("value", ""),
    }


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_without_none(entry) for entry in value]
    return value


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
        control_tokens: bool = False
        """True if special tokens in the text of a conversation, such as "<|im_end|>", are meant as control tokens. Renderers
        can't write them as text, so a row that has one is refused otherwise: it would be trained on as a message's end."""
        teacher: FrozenModel | None = None
        """A server of any model. It answers each row's messages (``sampling``), and its answer is trained on, rendered for the
        policy. Its tokenizer may be another."""

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
        rendered = RENDERED_ROWS if self.config.teacher is None else 0
        for index in range(count):
            example = read_example(self.dataset, index)
            try:
                if index < rendered:
                    self._sample(example, rollout_id="")
                else:
                    self._conversation(example)
            except (TypeError, ValueError) as error:
                lines.append(f"row {example.sample_id}: {error}")
        if lines:
            cure = f"{len(lines)} of its {count} rows can't be trained on: change or remove them"
            raise ConfigError(f"{field}.dataset", type(self.dataset).__name__, cure, lines=lines)

    def check_control_tokens(self, tokens: Collection[str], *, field: str) -> None:
        """See Task. Reads the conversations and their tools."""
        if self.config.control_tokens:
            return
        examples = (read_example(self.dataset, index) for index in range(len(self.dataset)))
        texts = (
            (example, control_token_in(self._conversation(example), self.renderer))
            for example in examples
        )
        found = [(example.sample_id, token) for example, token in texts if token is not None]
        if found:
            row, token = found[0]
            others = f" ({len(found) - 1:,} others have one too)" if len(found) > 1 else ""
            cure = (
                f"row {row} has it in {self.config.messages_column!r}, where it would be a control token and could end the "
                f"message{others}: change the text, or set {field}.control_tokens = True if that is meant"
            )
            raise ConfigError(f"{field}.dataset", token, cure)

    async def run_group(
        self, sample: DataSample, policy: PolicyClient, *, group_id: str, seed: int, **_: Any
    ) -> RolloutGroup:
        """A group of one rollout with the row's training sample. A row that can't be rendered, or that the teacher does not
        answer, ends it as an error."""
        rollout = Rollout(
            group_id=group_id,
            index_in_group=0,
            task_name=self.name,
            data_sample=sample,
            static=True,
        )
        large = len(str(sample.env_input)) > LARGE_TEXT
        try:
            if self.config.teacher is not None:
                sample = await self._answered(
                    sample, policy, seed=derive_seed(seed, group_id, 0, 0)
                )
            rollout.samples = [
                await compute(
                    lambda: self._sample(sample, rollout_id=rollout.rollout_id), large=large
                )
            ]
            rollout.status, rollout.reward = RolloutStatus.COMPLETED, 0.0
        except Exception as error:  # of the renderer, about a row of the user's
            rollout.status, rollout.error = (
                RolloutStatus.ERROR,
                f"task {self.name}: {cause_of(error)}",
            )
            rollout.traceback = users_traceback(error)
        return RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=[rollout],
            admitted_version=policy.version,
        )

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Its weights are set. Sets and returns ``group.failure`` as Task does."""
        group.amend(failure=None if group.scored else str(group.rollouts[0].error))
        return group.failure

    def _conversation(self, example: DataSample) -> Conversation:
        return conversation_of(
            example.env_input, messages=self.config.messages_column, tools=self.config.tools_column
        )

    async def _answered(
        self, example: DataSample, policy: PolicyClient, *, seed: int
    ) -> DataSample:
        """The example with the teacher's answer."""
        messages, _ = self._conversation(example)
        teacher = cast(ChatClient, policy.frozen(cast(FrozenModel, self.config.teacher)))
        reply = await teacher.chat(messages, seed=seed, sampling=self.config.sampling)
        if not reply.whole:
            raise ValueError(
                f"the teacher's answer was cut off: sampling.max_tokens is {self.config.sampling.max_tokens}"
            )
        answered = {self.config.messages_column: [*messages, reply.message]}
        return replace(example, env_input={**example.env_input, **answered})

    def _sample(self, example: DataSample, *, rollout_id: str) -> TrainingSample:
        algorithm = self.config.algorithm
        assert isinstance(algorithm, StaticSFT.Config)
        sample = sample_of(
            self._conversation(example),
            self.renderer,
            roles=algorithm.roles,
            task_name=self.name,
            rollout_id=rollout_id,
        )
        limit = self.config.env.max_rollout_tokens
        if len(sample) > limit:
            raise ValueError(
                f"it has {len(sample):,} tokens, and env.max_rollout_tokens is {limit:,}"
            )
        return sample
