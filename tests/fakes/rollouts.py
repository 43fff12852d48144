"""Turns, rollouts and groups as a run makes them, of the tokens and rewards that a test gives."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RolloutTurn,
)
from torchtitan.experiments.rl.types import ROLES, TrainingSample

EXAMPLE = DataSample(sample_id="0", env_input=None)
"""Example of groups for which no other matters."""


def turn_of(
    prompt: Sequence[int],
    sampled: Iterable[int],
    *,
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
) -> RolloutTurn:
    """Return a turn of these prompt and sampled tokens.

    Sampled tokens have log-probability -0.5 and version 0 where none are given. Prompt tokens have
    no role.
    """
    sampled = list(sampled)
    return RolloutTurn(
        prompt_messages=[],
        prompt_token_ids=np.asarray(prompt, np.int32),
        prompt_role_ids=np.full(len(prompt), -1, np.int8),
        prompt_is_content=np.zeros(len(prompt), bool),
        completion=Completion(
            token_ids=np.asarray(sampled, np.int32),
            logprobs=np.asarray(
                [-0.5] * len(sampled) if logprobs is None else logprobs, np.float32
            ),
            policy_versions=np.asarray(
                [0] * len(sampled) if versions is None else versions, np.int32
            ),
            finish_reason="stop",
        ),
        assistant_message={"role": "assistant", "content": ""},
    )


def blank_turn(
    completion_tokens: int,
    prompt_roles: Sequence[str | None] = ("user",),
    prompt_is_content: Sequence[bool] = (True,),
) -> RolloutTurn:
    """Return a turn of which only the number of sampled tokens and the prompt's roles matter."""
    turn = turn_of([0] * len(prompt_roles), [0] * completion_tokens)
    turn.prompt_role_ids = np.array(
        [ROLES.index(role) if role else -1 for role in prompt_roles], np.int8
    )
    turn.prompt_is_content = np.array(prompt_is_content)
    return turn


def samples_of(turns: Sequence[RolloutTurn]) -> list[TrainingSample]:
    """Return the training samples of a rollout's turns."""
    return samples_from_turns(turns, task_name="t", rollout_id="g/0", temperature=0.7)


def rollout_of(
    *turns: RolloutTurn, group_id: str = "g", index: int = 0, task: str = "t", **fields: Any
) -> Rollout:
    """Return a rollout of these turns, with the training samples that they make."""
    rollout = Rollout(
        group_id=group_id, index_in_group=index, task_name=task, turns=list(turns), **fields
    )
    if "samples" not in fields:
        rollout.samples = samples_from_turns(
            rollout.turns, task_name=task, rollout_id=rollout.rollout_id, temperature=0.7
        )
    return rollout


def completed_rollout(
    index: int = 0,
    *,
    turns: Sequence[RolloutTurn] | None = None,
    env_input: Any = None,
    group_id: str = "t-0",
    **changes: Any,
) -> Rollout:
    """Return a scored rollout of two turns that make one sample. ``changes`` are other fields."""
    if turns is None:
        turns = [turn_of([1, 2], [3, 4]), turn_of([1, 2, 3, 4, 9], [6])]
    fields: dict[str, Any] = {
        "data_sample": DataSample(sample_id="s", env_input=env_input, info={"level": 3}),
        "status": RolloutStatus.COMPLETED,
        "reward": 0.1,
        "reward_components": {"right": 1 / 3},
    }
    return rollout_of(*turns, group_id=group_id, index=index, **fields | changes)


def rewarded_rollout(reward: float | None, turns: Sequence[RolloutTurn] | None = None) -> Rollout:
    """Return a rollout with one sample of five tokens, of which the last three are sampled.

    Its turns are those that the test gives, and the sample is not made of them.
    """
    sample = TrainingSample(
        token_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([False, False, True, True, True]),
        generator_logprobs=np.zeros(5, np.float32),
        policy_versions=np.full(5, -1, np.int32),
        task_name="task",
        rollout_id="group/0",
    )
    return rollout_of(
        *(turns or [blank_turn(3)]), group_id="group", task="task", reward=reward, samples=[sample]
    )


def group_of(*rollouts: Rollout, version: int = 0, **fields: Any) -> RolloutGroup:
    """Return the group of these rollouts. It has the id, the task and the example of the first."""
    first = rollouts[0] if rollouts else rollout_of()
    own: dict[str, Any] = {
        "group_id": first.group_id,
        "task_name": first.task_name,
        "data_sample": first.data_sample or EXAMPLE,
    }
    return RolloutGroup(rollouts=list(rollouts), admitted_version=version, **own | fields)


def rewarded_group(
    sample: DataSample, *rewards: float | None, group_id: str = "g", task: str = "t"
) -> RolloutGroup:
    """Return a group of completed rollouts that have rewards, and neither turns nor samples."""
    rollouts = [
        rollout_of(
            group_id=group_id,
            index=index,
            task=task,
            reward=reward,
            status=RolloutStatus.COMPLETED,
        )
        for index, reward in enumerate(rewards)
    ]
    return RolloutGroup(group_id=group_id, task_name=task, data_sample=sample, rollouts=rollouts)
