"""Kinds of reward functions and rubrics."""

import copy
from typing import Any

import numpy as np
import torch

from tests.zoo import world
from tests.zoo.misbehaviour import Kind, LyingLength, LyingNumber, answering, changing
from tests.zoo.own.makers import Own, harmless, meddling, refused, wrong_types
from torchtitan.experiments.rl.rollouts.types import RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn

NOT_NUMBERS: dict[str, Any] = {
    "infinite": float("inf"),
    "minus infinite": float("-inf"),
    "too large for a float": 10**400,
    "too large for a float32": 1e300,
    "a complex number": 1j,
    "an array of two": np.ones(2),
    "an array of one": np.ones(1),
    "a tensor of two": torch.ones(2),
    "nan in a tensor": torch.tensor(float("nan")),
    "a lying number": LyingNumber(),
    "a text that is a number": "0.5",
}

REWARD: Own = (
    wrong_types("a number", "None")
    | {
        f"answers {name}": ("refused", answering(lambda value=value: value))
        for name, value in NOT_NUMBERS.items()
    }
    | harmless(
        changes_the_token_ids=meddling(lambda rollout, _: rollout.samples[0].token_ids.fill(7)),
        changes_the_token_ids_of_a_turn=meddling(
            lambda rollout, _: rollout.turns[0].completion.token_ids.fill(7)
        ),
        changes_the_prompt_of_a_turn=meddling(
            lambda rollout, _: rollout.turns[0].prompt_token_ids.fill(7)
        ),
        changes_the_log_probabilities=meddling(
            lambda rollout, _: rollout.samples[0].generator_logprobs.fill(-9)
        ),
        changes_the_loss_mask=meddling(lambda rollout, _: rollout.samples[0].loss_mask.fill(True)),
        changes_the_temperature=meddling(
            lambda rollout, _: setattr(rollout.samples[0], "temperature", 0.1)
        ),
        clears_the_samples=meddling(lambda rollout, _: rollout.samples.clear()),
        doubles_the_samples=meddling(lambda rollout, _: rollout.samples.extend(rollout.samples)),
        replaces_the_samples=meddling(
            lambda rollout, _: setattr(rollout, "samples", [copy.copy(rollout.samples[0])] * 2)
        ),
        clears_the_turns=meddling(lambda rollout, _: rollout.turns.clear()),
        edits_a_message=meddling(
            lambda rollout, _: rollout.turns[0].assistant_message.update(content="changed")
        ),
        sets_the_status=meddling(
            lambda rollout, _: setattr(rollout, "status", RolloutStatus.ERROR)
        ),
        sets_another_status=meddling(
            lambda rollout, _: setattr(rollout, "status", RolloutStatus.TRUNCATED_LENGTH)
        ),
        sets_a_text_for_the_status=meddling(lambda rollout, _: setattr(rollout, "status", "fine")),
        sets_the_error=meddling(lambda rollout, _: setattr(rollout, "error", "made up")),
        sets_the_reward=meddling(lambda rollout, _: setattr(rollout, "reward", 99.0)),
        sets_the_index=meddling(lambda rollout, _: setattr(rollout, "index_in_group", 0)),
        sets_the_group=meddling(lambda rollout, _: setattr(rollout, "group_id", "good-0")),
        sets_the_task=meddling(lambda rollout, _: setattr(rollout, "task_name", "good")),
        gives_itself_an_advantage=meddling(lambda rollout, _: rollout.assign_advantages(9.0)),
        changes_the_env_input=meddling(
            lambda _, env_input: env_input.update(question="bad question 99")
        ),
        clears_the_env_input=meddling(lambda _, env_input: env_input.clear()),
    )
)


def _set_first(rollouts: list, env_input: Any) -> None:
    rollouts[0] = rollouts[1]


def _end_all(rollouts: list, env_input: Any) -> None:
    for rollout in rollouts:
        rollout.status, rollout.error = RolloutStatus.ERROR, "made up"


REWARDS: Own = (
    wrong_types()
    | refused(
        answers_too_few=answering(lambda: [0.0, 1.0, 0.5]),
        answers_too_many=answering(lambda: [0.0, 1.0, 0.5, 0.5, 0.5]),
        answers_a_number_for_all=answering(lambda: 0.5),
        answers_by_name=answering(lambda: {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.5}),
        answers_keys=answering(lambda: {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.5}.keys()),
        answers_a_frozen_set=answering(lambda: frozenset({0.0, 1.0, 0.5, 0.25})),
        answers_a_column=answering(lambda: np.ones((4, 1))),
        answers_a_scalar_array=answering(lambda: np.array(0.5)),
        answers_texts=answering(lambda: ["0", "1", "0.5", "0.5"]),
        answers_one_nan_each=answering(lambda: [float("nan")] * 4),
        answers_a_lying_length=answering(LyingLength),
        answers_lying_numbers=answering(lambda: [LyingNumber()] * 4),
        answers_a_text_of_four=answering(lambda: "0101"),
        answers_bytes_of_four=answering(lambda: b"0101"),
    )
    | harmless(
        reverses_the_rollouts=meddling(lambda rollouts, _: rollouts.reverse()),
        sorts_the_rollouts=meddling(
            lambda rollouts, _: rollouts.sort(key=lambda rollout: -rollout.index_in_group)
        ),
        clears_the_rollouts=meddling(lambda rollouts, _: rollouts.clear()),
        pops_a_rollout=meddling(lambda rollouts, _: rollouts.pop()),
        doubles_a_rollout=meddling(_set_first),
        ends_all_rollouts=meddling(_end_all),
        changes_all_token_ids=meddling(
            lambda rollouts, _: [r.samples[0].token_ids.fill(7) for r in rollouts]
        ),
        swaps_the_samples=meddling(
            lambda rollouts, _: rollouts[0].samples.__setitem__(0, rollouts[1].samples[0])
        ),
        swaps_the_indices=meddling(lambda rollouts, _: setattr(rollouts[0], "index_in_group", 1)),
    )
)


def _rewards(*values: Any, components: Any = None) -> Kind:
    return answering(
        lambda: [Reward(value, {} if components is None else components) for value in values]
    )


SCORE_GROUP: Own = (
    wrong_types()
    | refused(
        answers_too_few=changing(lambda rewards: rewards[:-1]),
        answers_too_many=changing(lambda rewards: [*rewards, rewards[0]]),
        answers_numbers=answering(lambda: [0.0, 1.0, 0.5, 0.5]),
        answers_None_each=answering(lambda: [None] * 4),
        answers_nan=_rewards(*[float("nan")] * 4),
        answers_infinite=_rewards(*[float("inf")] * 4),
        answers_texts=_rewards("0", "1", "0.5", "0.5"),
        answers_arrays=_rewards(*[np.ones(2)] * 4),
        answers_lying_numbers=_rewards(*[LyingNumber()] * 4),
        answers_too_large_for_float32=_rewards(*[1e300] * 4),
        answers_a_set_of_rewards=answering(lambda: {1: Reward(0.0)}.values()),
        answers_a_lying_length=answering(LyingLength),
        components_a_list=_rewards(0.0, 1.0, 0.5, 0.5, components=[1.0]),
        components_a_text=_rewards(0.0, 1.0, 0.5, 0.5, components="x"),
        components_nan=_rewards(0.0, 1.0, 0.5, 0.5, components={"x": float("nan")}),
        components_texts=_rewards(0.0, 1.0, 0.5, 0.5, components={"x": "y"}),
        components_named_by_numbers=_rewards(0.0, 1.0, 0.5, 0.5, components={1: 1.0}),
    )
    | harmless(
        reverses_the_rollouts=meddling(lambda rubric, rollouts, _: rollouts.reverse()),
        clears_the_rollouts=meddling(lambda rubric, rollouts, _: rollouts.clear()),
        changes_token_ids=meddling(
            lambda rubric, rollouts, _: rollouts[0].samples[0].token_ids.fill(7)
        ),
        swaps_samples=meddling(
            lambda rubric, rollouts, _: setattr(rollouts[0], "samples", rollouts[1].samples)
        ),
        ends_a_rollout=meddling(
            lambda rubric, rollouts, _: setattr(rollouts[0], "error", "made up")
        ),
        sets_rewards=meddling(
            lambda rubric, rollouts, _: [setattr(r, "reward", 9.0) for r in rollouts]
        ),
        gives_advantages=meddling(
            lambda rubric, rollouts, _: [r.assign_advantages(9.0) for r in rollouts]
        ),
    )
)
REGISTER_FUNCS: Own = wrong_types("an empty list") | refused(
    gives_numbers=answering(lambda: [0.5]),
    gives_a_RewardFn_of_a_number=answering(lambda: [RewardFn(0.5, takes="rollout")]),
    gives_functions=answering(lambda: [world.honest_reward]),
    gives_a_weight_of_nan=answering(
        lambda: [RewardFn(world.honest_reward, weight=float("nan"), takes="rollout")]
    ),
    gives_a_text_for_a_name=answering(
        lambda: [RewardFn(world.honest_reward, name=7, takes="rollout")]
    ),
)
