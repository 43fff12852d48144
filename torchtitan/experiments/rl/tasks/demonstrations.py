"""Trains on conversations of a dataset by supervised learning, without an env or a rollout.

    row ──conversation_of──▶ messages, tools ──sample_of──▶ training sample
                                 │       ▲
                                 └teacher┘  (if there is one, it answers first)

Each row is a group of one rollout that has ended when it begins.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

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
from torchtitan.experiments.rl.envs.prompt import Prompt, first_prompt
from torchtitan.experiments.rl.envs.special_texts import render_as_text
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
"""Role of a message by ShareGPT's name for it, where the two differ."""
RENDERED_ROWS = 2_000
"""Number of rows that are rendered before the run, which takes a second or two. Of the rows after
them only the messages are checked."""

Conversation = tuple[list[Message], list[ToolSpec] | None]
"""Messages of a conversation, and the tools that the model was told of."""


def conversation_of(row: object, *, messages: str, tools: str) -> Conversation:
    """Return the conversation in a row.

    Tables give every message the fields of every other, empty: those are left out, and content that
    is None is "". Messages of ShareGPT, ``{"from": "human", "value": "Hi"}``, are read as
    ``{"role": "user", "content": "Hi"}``.

    Args:
        row: a dict of columns.
        messages: name of the column of the messages.
        tools: name of the column of the tools; a row may have none.

    Raises:
        TypeError: the row or one of its messages has a wrong type; names the column and the entry.
        ValueError: the row has no messages, or one that is not well-formed; names them likewise.
    """
    if not isinstance(row, Mapping):
        raise TypeError(f"it is {shown(row)}, want a dict with {messages!r}")
    if row.get(messages) is None:
        # A table fills the columns that one of its rows lacks with None.
        columns = ", ".join(str(column) for column, value in row.items() if value is not None)
        raise ValueError(
            f"it has no column {messages!r}; it has {columns}: name that of the messages as "
            "messages_column"
        )
    raw_messages = _without_none(row[messages])
    if isinstance(raw_messages, list):
        raw_messages = [
            {"content": ""} | _from_sharegpt(message) if isinstance(message, dict) else message
            for message in raw_messages
        ]
    checked = checked_messages(raw_messages, messages)
    if not checked:
        raise ValueError(f"{messages} is empty")
    return checked, tools_in(row, tools)


def tools_in(row: Mapping[str, Any], column: str) -> list[ToolSpec] | None:
    """Return the tools in a row's column; None if it has none.

    Raises:
        TypeError: an entry has a wrong type; names it.
        ValueError: an entry is no tool in OpenAI's format; names it.
    """
    tools = _without_none(row.get(column))
    return None if tools is None else checked_tools(tools, column)


def sample_of(
    conversation: Conversation,
    renderer: Renderer,
    *,
    roles: Collection[str],
    task_name: str,
    rollout_id: str,
    control_tokens: bool = False,
) -> TrainingSample:
    """Return the training sample of a conversation, with a ce weight of 1 on tokens of ``roles``.

    The sample ends with the last token that is trained on. What the template puts before an
    assistant's answer is part of a rollout's prompt, so it has no weight here either::

        token_ids    <system> <user> <assistant> <no thoughts>   answer  <end>
        ce_weights       0       0        0            0          1  1     1

    Args:
        control_tokens: True if special tokens in the messages are meant as control tokens, and not
            as text.

    Raises:
        ValueError: the template has no place for a message, or nothing is trained on.
    """
    messages, tools = conversation
    render = renderer.render if control_tokens else functools.partial(render_as_text, renderer)
    rendered = render(messages, tools=tools)
    check_all_rendered(rendered, messages)
    whole = first_prompt(rendered)
    trained = _trained_tokens(whole, conversation, render, roles)
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


def _trained_tokens(
    whole: Prompt,
    conversation: Conversation,
    render: Callable[..., RenderedTokens],
    roles: Collection[str],
) -> np.ndarray:
    """Return a mask of the tokens of ``whole`` that are trained on."""
    messages, tools = conversation
    trained = whole.is_content & np.isin(whole.role_ids, [ROLE_IDS[role] for role in roles])
    trained[:1] = False  # no token comes before the first, so none predicts it
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        prompt = render(messages[:index], tools=tools, add_generation_prompt=True).token_ids
        if whole.ids[: len(prompt)] == prompt:
            trained[: len(prompt)] &= whole.message_indices[: len(prompt)] != index
    return trained


def _from_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of ShareGPT as a message with a role and content, and any other as it is."""
    if "role" in message or "content" in message or "from" not in message:
        return message
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    author = message["from"]
    return others | {
        "role": SHAREGPT_ROLES.get(str(author), author),
        "content": message.get("value", ""),
    }


def _without_none(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return nested data with lists for arrays, and without entries of dicts that are None."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_without_none(entry) for entry in value]
    return value


class DemonstrationTask(Task):
    """Task whose rows are trained on as they are.

    A row's tokens have no policy version, and its rollout has reward 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=StaticSFT.Config)
        dataset: Dataset.Config = field(default_factory=RowDataset.Config)
        messages_column: NonEmptyStr = "messages"
        tools_column: NonEmptyStr = "tools"
        control_tokens: bool = False
        """True if special tokens in the text of a conversation, such as "<|im_end|>", are meant as
        control tokens. Otherwise they are text, and no message's end is trained on there."""
        teacher: FrozenModel | None = None
        """Server of a model that answers each row's messages (``sampling``). Its answer is trained
        on, rendered for the policy, so its tokenizer may be another. None trains on the rows."""

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
        """False: nothing compares one conversation with another."""
        return False

    @property
    def trains_on_policy_samples(self) -> bool:
        """False: conversations are of no policy version."""
        return False

    def make_env(self, sample: DataSample) -> MessageEnv:
        raise TypeError("a DemonstrationTask has no env")

    def check_examples(self, *, field: str) -> None:
        """See Task. Refuse rows that can't be trained on, each by its id."""
        count = len(self.dataset)
        rendered = RENDERED_ROWS if self.config.teacher is None else 0
        faults = []
        for index in range(count):
            example = read_example(self.dataset, index)
            try:
                if index < rendered:
                    self._sample(example, rollout_id="")
                else:
                    self._conversation(example)
            except (TypeError, ValueError) as error:
                faults.append(f"row {example.sample_id}: {error}")
        if faults:
            cure = f"{len(faults)} of its {count} rows can't be trained on: change or remove them"
            raise ConfigError(f"{field}.dataset", type(self.dataset).__name__, cure, lines=faults)

    async def run_group(
        self,
        sample: DataSample,
        policy: PolicyClient,
        *,
        group_id: str,
        seed: int,
        **_: Any,  # noqa: ANN401 - the other arguments of Task.run_group
    ) -> RolloutGroup:
        """Return a group of one rollout with the row's training sample.

        The rollout is an ERROR if the row can't be rendered, or if the teacher does not answer it.
        """
        rollout = Rollout(
            group_id=group_id,
            index_in_group=0,
            task_name=self.name,
            data_sample=sample,
            static=True,
        )
        try:
            if self.config.teacher is not None:
                request_seed = derive_seed(seed, group_id, 0, 0)
                sample = await self._answered(sample, policy, seed=request_seed)
            render = functools.partial(self._sample, sample, rollout_id=rollout.rollout_id)
            is_large = len(str(sample.env_input)) > LARGE_TEXT
            rollout.samples = [await compute(render, large=is_large)]
            rollout.status = RolloutStatus.COMPLETED
            rollout.reward = 0.0
        except Exception as error:  # noqa: BLE001 - the renderer may raise anything about a row
            rollout.status = RolloutStatus.ERROR
            rollout.error = f"task {self.name}: {cause_of(error)}"
            rollout.traceback = users_traceback(error)
        return RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=[rollout],
            admitted_version=policy.version,
        )

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Set and return ``group.failure`` as Task does. The samples have their weights already."""
        group.amend(failure=None if group.scored else str(group.rollouts[0].error))
        return group.failure

    def _conversation(self, example: DataSample) -> Conversation:
        """Return the conversation of a row.

        Raises:
            TypeError, ValueError: the row has none, or has tools and a teacher is to answer it.
        """
        config = self.config
        messages, tools = conversation_of(
            example.env_input, messages=config.messages_column, tools=config.tools_column
        )
        if config.teacher is not None and tools:
            raise ValueError(
                f"its {config.tools_column!r} would not reach the teacher, which is asked with "
                "messages alone: remove them, or train on the rows' own answers (teacher=None)"
            )
        return messages, tools

    async def _answered(
        self, example: DataSample, policy: PolicyClient, *, seed: int
    ) -> DataSample:
        """Return the example with the teacher's answer as its last message.

        Raises:
            ValueError: the answer was cut off.
        """
        config = self.config
        assert config.teacher is not None
        messages, _ = self._conversation(example)
        teacher = cast(ChatClient, policy.frozen(config.teacher))
        reply = await teacher.chat(messages, seed=seed, sampling=config.sampling)
        if not reply.whole:
            raise ValueError(
                "the teacher's answer was cut off: sampling.max_tokens is "
                f"{config.sampling.max_tokens}"
            )
        columns = {config.messages_column: [*messages, reply.message]}
        return replace(example, env_input={**example.env_input, **columns})

    def _sample(self, example: DataSample, *, rollout_id: str) -> TrainingSample:
        """Return the training sample of a row.

        Raises:
            TypeError: as ``conversation_of`` does.
            ValueError: as ``conversation_of`` and ``sample_of`` do, or the sample is too long.
        """
        algorithm = self.config.algorithm
        assert isinstance(algorithm, StaticSFT.Config)
        sample = sample_of(
            self._conversation(example),
            self.renderer,
            roles=algorithm.roles,
            task_name=self.name,
            rollout_id=rollout_id,
            control_tokens=self.config.control_tokens,
        )
        sample.adapter = self.config.adapter
        limit = self.config.env.max_rollout_tokens
        if len(sample) > limit:
            raise ValueError(
                f"it has {len(sample):,} tokens, and env.max_rollout_tokens is {limit:,}"
            )
        return sample
