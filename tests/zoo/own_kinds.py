"""Kinds that make sense in one place: wrong types and values of its answer, changes of what it is given, sharing."""

import copy
import dataclasses
from typing import Any

import numpy as np
import torch

from tests.zoo import world
from tests.zoo.misbehaviour import WRONG_TYPES, Kind, LyingLength, LyingNumber, answering, changing
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, RewardFn

Own = dict[str, tuple[str, Kind]]

SURROGATE = "half \ud800 a character"
HUGE = "x " * 500_000


def refused(**kinds: Kind) -> Own:
    return {name.replace("_", " "): ("refused", kind) for name, kind in kinds.items()}


def harmless(**kinds: Kind) -> Own:
    return {name.replace("_", " "): ("harmless", kind) for name, kind in kinds.items()}


def wrong_types(*but: str) -> Own:
    """All but those that are right in the place."""
    return {name: ("refused", kind) for name, kind in WRONG_TYPES.items() if name.removeprefix("answers ") not in but}


def with_(**values: Any) -> Kind:
    """The honest record with other fields. A callable gives the value when it is needed."""
    return changing(lambda answer: dataclasses.replace(answer, **{k: v() if callable(v) else v for k, v in values.items()}))


def meddling(act: Any) -> Kind:
    return Kind(meddle=act)


def said(content: Any, role: Any = "user") -> list:
    return [{"role": role, "content": content}]


# ---- envs

MESSAGES: dict[str, Any] = {
    "no list": "hello",
    "None": None,
    "a dict": {"role": "user", "content": "x"},
    "of None": [None],
    "of texts": ["hello"],
    "without a role": [{"content": "x"}],
    "of an unknown role": said("x", "wizard"),
    "of no role": said("x", None),
    "of a role in a list": said("x", ["user"]),
    "without content": [{"role": "user"}],
    "with None for content": said(None),
    "with a number for content": said(3.5),
    "with bytes for content": said(b"x"),
    "with a dict for content": said({"text": "x"}),
    "with an image": said([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]),
    "with an unknown part": said([{"type": "smell", "smell": "x"}]),
    "with a part without a type": said([{"text": "x"}]),
    "with plain values for parts": said(["x", 7]),
    "with None for a part": said([None]),
    "with a number for a text part": said([{"type": "text", "text": 7}]),
    "with a surrogate": said(SURROGATE),
    "with a surrogate in a part": said([{"type": "text", "text": SURROGATE}]),
    "with a lying length": LyingLength(),
    "with a bad tool call": [{"role": "assistant", "content": "", "tool_calls": [None]}, *said("x")],
    "with a text for tool calls": [{"role": "assistant", "content": "", "tool_calls": "call"}, *said("x")],
}
TOOLS: dict[str, Any] = {
    "a text": "tool",
    "a dict": {"name": "tool"},
    "of None": [None],
    "of texts": ["tool"],
    "without a name": [{"type": "function", "function": {}}],
    "with a number for a name": [{"type": "function", "function": {"name": 7, "parameters": {}}}],
    "a number": 7,
    "None": None,
    "with an object in it": [{"type": "function", "function": {"name": "x", "parameters": {"a": object()}}}],
    "with a surrogate": [{"type": "function", "function": {"name": "x", "description": SURROGATE, "parameters": {}}}],
}
COMPONENTS: dict[str, Any] = {
    "None": None,
    "a list": [1.0],
    "nan": {"x": float("nan")},
    "infinite": {"x": float("inf")},
    "a text": {"x": "1"},
    "an array": {"x": np.ones(2)},
    "named by a number": {1: 1.0},
    "too large for a float": {"x": 10**400},
    "a lying number": {"x": LyingNumber()},
    "None by name": {"x": None},
}
FINISHES: dict[str, Any] = {
    "a text": "no",
    "None": None,
    "a number": 1,
    "an array": np.ones(2, bool),
    "a lying number": LyingNumber(),
}

ENV_RESET: Own = (
    wrong_types()
    | {f"messages {name}": ("refused", with_(messages=value)) for name, value in MESSAGES.items()}
    | {"messages empty": ("refused", with_(messages=[]))}
    | {"messages of a million characters": ("overflows", with_(messages=said(HUGE)))}
    | {f"tools {name}": ("refused", with_(tools=value)) for name, value in TOOLS.items()}
)
ENV_STEP: Own = (
    wrong_types()
    | {f"messages {name}": ("refused", with_(env_messages=value, done=False)) for name, value in MESSAGES.items()}
    | {"messages empty and not done": ("refused", with_(env_messages=[], done=False))}
    | {f"done {name}": ("refused", with_(done=value)) for name, value in FINISHES.items()}
    | {f"reward components {name}": ("refused", with_(reward_components=value)) for name, value in COMPONENTS.items()}
    | harmless(
        edits_the_message_it_is_given=meddling(lambda env, message: message.update(content="changed", role="user")),
        empties_the_message_it_is_given=meddling(lambda env, message: message.clear()),
    )
)


# ---- tasks


def _shared(envs: list, chosen: tuple[int, ...]) -> list:
    kept = [envs[index] for index in chosen[: len(envs)]]
    world.forget(*(env for env in envs if not any(env is other for other in kept)))
    return kept


MAKE_ENVS: Own = (
    wrong_types()
    | refused(
        shares_one_env=changing(lambda envs: _shared(envs, (0, 0, 0, 0))),
        shares_two_envs=changing(lambda envs: _shared(envs, (0, 1, 0, 1))),
        gives_too_few=changing(lambda envs: (world.forget(envs[-1]), envs[:-1])[1]),
        gives_too_many=Kind(change=lambda envs, task, sample, n: [*envs, world.HonestEnv(sample, 0, task.name)]),
        gives_None_among_them=changing(lambda envs: (world.forget(envs[-1]), [*envs[:-1], None])[1]),
        gives_the_class=answering(lambda: [world.HonestEnv] * world.GROUP_SIZE),
        gives_a_tuple_of_texts=answering(lambda: ("env",) * world.GROUP_SIZE),
    )
    | {
        "gives one env for all groups": (
            "refused again",
            Kind(change=lambda envs, task, sample, n: [_pool(task, env, i) for i, env in enumerate(envs)]),
        )
    }
)


def _pool(task: Any, env: Any, index: int) -> Any:
    """The envs of the first group again: each was used and closed."""
    kept = task.__dict__.setdefault("pool", {}).setdefault(index, env)
    if kept is not env:
        world.forget(env)
    return kept


MAKE_ENV: Own = wrong_types() | {
    "gives one env for all": ("refused", Kind(change=lambda env, task, sample: _first(task, env))),
}


def _first(task: Any, env: Any) -> Any:
    first = task.__dict__.setdefault("first", env)
    if first is not env:
        world.forget(env)
    return first


RUN_ROLLOUT: Own = harmless(answers_something=changing(lambda answer: "done")) | refused(
    returns_at_once=answering(lambda: None)
)


# ---- reward functions

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
    wrong_types("a number")
    | {f"answers {name}": ("refused", answering(lambda value=value: value)) for name, value in NOT_NUMBERS.items()}
    | harmless(
        changes_the_token_ids=meddling(lambda rollout, _: rollout.samples[0].token_ids.fill(7)),
        changes_the_token_ids_of_a_turn=meddling(lambda rollout, _: rollout.turns[0].completion.token_ids.fill(7)),
        changes_the_prompt_of_a_turn=meddling(lambda rollout, _: rollout.turns[0].prompt_token_ids.fill(7)),
        changes_the_log_probabilities=meddling(lambda rollout, _: rollout.samples[0].generator_logprobs.fill(-9)),
        changes_the_loss_mask=meddling(lambda rollout, _: rollout.samples[0].loss_mask.fill(True)),
        changes_the_temperature=meddling(lambda rollout, _: setattr(rollout.samples[0], "temperature", 0.1)),
        clears_the_samples=meddling(lambda rollout, _: rollout.samples.clear()),
        doubles_the_samples=meddling(lambda rollout, _: rollout.samples.extend(rollout.samples)),
        replaces_the_samples=meddling(lambda rollout, _: setattr(rollout, "samples", [copy.copy(rollout.samples[0])] * 2)),
        clears_the_turns=meddling(lambda rollout, _: rollout.turns.clear()),
        edits_a_message=meddling(lambda rollout, _: rollout.turns[0].assistant_message.update(content="changed")),
        sets_the_status=meddling(lambda rollout, _: setattr(rollout, "status", RolloutStatus.ERROR)),
        sets_another_status=meddling(lambda rollout, _: setattr(rollout, "status", RolloutStatus.TRUNCATED_LENGTH)),
        sets_a_text_for_the_status=meddling(lambda rollout, _: setattr(rollout, "status", "fine")),
        sets_the_error=meddling(lambda rollout, _: setattr(rollout, "error", "made up")),
        sets_the_reward=meddling(lambda rollout, _: setattr(rollout, "reward", 99.0)),
        sets_the_index=meddling(lambda rollout, _: setattr(rollout, "index_in_group", 0)),
        sets_the_group=meddling(lambda rollout, _: setattr(rollout, "group_id", "good-0")),
        sets_the_task=meddling(lambda rollout, _: setattr(rollout, "task_name", "good")),
        gives_itself_an_advantage=meddling(lambda rollout, _: rollout.assign_advantages(9.0)),
        changes_the_env_input=meddling(lambda _, env_input: env_input.update(question="bad question 99")),
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
        sorts_the_rollouts=meddling(lambda rollouts, _: rollouts.sort(key=lambda rollout: -rollout.index_in_group)),
        clears_the_rollouts=meddling(lambda rollouts, _: rollouts.clear()),
        pops_a_rollout=meddling(lambda rollouts, _: rollouts.pop()),
        doubles_a_rollout=meddling(_set_first),
        ends_all_rollouts=meddling(_end_all),
        changes_all_token_ids=meddling(lambda rollouts, _: [r.samples[0].token_ids.fill(7) for r in rollouts]),
        swaps_the_samples=meddling(lambda rollouts, _: rollouts[0].samples.__setitem__(0, rollouts[1].samples[0])),
        swaps_the_indices=meddling(lambda rollouts, _: setattr(rollouts[0], "index_in_group", 1)),
    )
)


def _rewards(*values: Any, components: Any = None) -> Kind:
    return answering(lambda: [Reward(value, {} if components is None else components) for value in values])


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
        changes_token_ids=meddling(lambda rubric, rollouts, _: rollouts[0].samples[0].token_ids.fill(7)),
        swaps_samples=meddling(lambda rubric, rollouts, _: setattr(rollouts[0], "samples", rollouts[1].samples)),
        ends_a_rollout=meddling(lambda rubric, rollouts, _: setattr(rollouts[0], "error", "made up")),
        sets_rewards=meddling(lambda rubric, rollouts, _: [setattr(r, "reward", 9.0) for r in rollouts]),
        gives_advantages=meddling(lambda rubric, rollouts, _: [r.assign_advantages(9.0) for r in rollouts]),
    )
)
REGISTER_FUNCS: Own = wrong_types("an empty list") | refused(
    gives_numbers=answering(lambda: [0.5]),
    gives_a_RewardFn_of_a_number=answering(lambda: [RewardFn(0.5)]),
    gives_functions=answering(lambda: [world.honest_reward]),
    gives_a_weight_of_nan=answering(lambda: [RewardFn(world.honest_reward, weight=float("nan"))]),
    gives_a_text_for_a_name=answering(lambda: [RewardFn(world.honest_reward, name=7)]),
)


# ---- algorithms


def _each(act: Any) -> Kind:
    """After the honest credit, to every sample of rollouts 0 to 3."""

    def change(answer: Any, algorithm: Any, subject: Any) -> Any:
        for rollout in getattr(subject, "rollouts", None) or [subject]:
            for sample in rollout.samples:
                act(sample)
        return answer

    return Kind(change=change)


def _sets(stream: str, value: Any) -> Kind:
    return _each(lambda sample: setattr(sample, stream, value(len(sample)) if callable(value) else value))


def _streams(stream: str) -> Own:
    bad: dict[str, Any] = {
        "nan": lambda n: np.full(n, np.nan, np.float32),
        "infinite": lambda n: np.full(n, np.inf, np.float32),
        "too large for a float32": lambda n: np.full(n, 1e300),
        "too short": lambda n: np.ones(n - 1, np.float32),
        "too long": lambda n: np.ones(n + 1, np.float32),
        "a scalar": 1.0,
        "a scalar array": np.array(1.0),
        "of two dimensions": lambda n: np.ones((n, 2), np.float32),
        "a text": "weights",
        "texts": lambda n: np.array(["x"] * n),
        "objects": lambda n: np.array([None] * n),
        "complex": lambda n: np.ones(n, complex),
        "a list of texts": lambda n: ["x"] * n,
    }
    return {f"{stream} {name}": ("refused", _sets(stream, value)) for name, value in bad.items()}


def _assign(value: Any) -> Kind:
    def change(answer: Any, algorithm: Any, subject: Any) -> Any:
        for rollout in getattr(subject, "rollouts", None) or [subject]:
            rollout.assign_advantages(value() if callable(value) else value)
        return answer

    return Kind(change=change)


FIXED: Own = harmless(
    changes_token_ids=_each(lambda sample: sample.token_ids.fill(7)),
    replaces_token_ids=_each(lambda sample: setattr(sample, "token_ids", np.full(len(sample), 7, np.int32))),
    changes_log_probabilities=_each(lambda sample: sample.generator_logprobs.fill(-9)),
    changes_versions=_each(lambda sample: sample.policy_versions.fill(0)),
    changes_roles=_each(lambda sample: sample.role_ids.fill(0)),
    sets_the_rollout=_each(lambda sample: setattr(sample, "rollout_id", "good-0/0")),
    sets_the_task=_each(lambda sample: setattr(sample, "task_name", "good")),
)
SCORE_ROLLOUT: Own = (
    _streams("ce_weights")
    | _streams("ref_kl_weights")
    | _streams("rl_weights")
    | FIXED
    | refused(
        sets_a_reference_of_nan=_each(
            lambda sample: [
                setattr(sample, "ref_logprobs", np.full(len(sample), np.nan, np.float32)),
                setattr(sample, "ref_kl_weights", sample.loss_mask.astype(np.float32)),
            ]
        ),
        sets_a_reference_of_minus_infinity=_each(
            lambda sample: [
                setattr(sample, "ref_logprobs", np.full(len(sample), -np.inf, np.float32)),
                setattr(sample, "ref_kl_weights", sample.loss_mask.astype(np.float32)),
            ]
        ),
        sets_ref_kl_weights_without_a_reference=_each(
            lambda sample: setattr(sample, "ref_kl_weights", sample.loss_mask.astype(np.float32))
        ),
        sets_a_temperature_of_0=_each(lambda sample: setattr(sample, "temperature", 0.0)),
        sets_a_temperature_of_nan=_each(lambda sample: setattr(sample, "temperature", float("nan"))),
        sets_a_text_for_temperature=_each(lambda sample: setattr(sample, "temperature", "1")),
        trains_the_first_token=_each(lambda sample: setattr(sample, "ce_weights", np.ones(len(sample), np.float32))),
        puts_None_among_samples=Kind(change=lambda answer, algorithm, rollout: rollout.samples.append(None)),
        sets_samples_to_None=Kind(change=lambda answer, algorithm, rollout: setattr(rollout, "samples", None)),
    )
    | harmless(
        sets_the_status=Kind(change=lambda answer, algorithm, rollout: setattr(rollout, "status", RolloutStatus.ERROR)),
        clears_the_turns=Kind(change=lambda answer, algorithm, rollout: rollout.turns.clear()),
        shares_samples=Kind(change=lambda answer, algorithm, rollout: rollout.samples.append(rollout.samples[0])),
    )
)
SCORE_GROUP_CREDIT: Own = (
    _streams("advantages")
    | FIXED
    | refused(
        assigns_None=_assign(None),
        assigns_nan=_assign(float("nan")),
        assigns_infinity=_assign(float("inf")),
        assigns_what_overflows=_assign(1e300),
        assigns_a_text=_assign("1"),
        assigns_too_few=_assign(lambda: [1.0]),
        assigns_none_at_all=_assign(list),
        assigns_two_dimensions=_assign(lambda: np.ones((3, 2))),
        assigns_a_dict=_assign(dict),
        assigns_a_lying_number=_assign(LyingNumber),
        assigns_nothing=_sets("advantages", None),
    )
    | harmless(
        pops_a_rollout=Kind(change=lambda answer, algorithm, group: group.rollouts.pop()),
        clears_the_rollouts=Kind(change=lambda answer, algorithm, group: group.rollouts.clear()),
        reverses_the_rollouts=Kind(change=lambda answer, algorithm, group: group.rollouts.reverse()),
        doubles_a_rollout=Kind(change=lambda answer, algorithm, group: group.rollouts.append(group.rollouts[0])),
        replaces_the_rollouts=Kind(change=lambda answer, algorithm, group: setattr(group, "rollouts", [])),
        sets_rewards_to_None=Kind(change=lambda answer, algorithm, group: [setattr(r, "reward", None) for r in group.rollouts]),
        sets_rewards=Kind(change=lambda answer, algorithm, group: [setattr(r, "reward", 9.0) for r in group.rollouts]),
        sets_the_status=Kind(change=lambda answer, algorithm, group: [setattr(r, "status", "error") for r in group.rollouts]),
        sets_the_group_id=Kind(change=lambda answer, algorithm, group: setattr(group, "group_id", "good-0")),
        sets_a_failure=Kind(change=lambda answer, algorithm, group: setattr(group, "failure", 7)),
        shares_one_array=Kind(change=lambda answer, algorithm, group: _share_advantages(group)),
        clears_the_turns=Kind(change=lambda answer, algorithm, group: group.rollouts[0].turns.clear()),
    )
)


def _share_advantages(group: Any) -> None:
    """Between the two rollouts whose advantages are equal: what an algorithm gives is its own affair, and was given twice."""
    third, fourth = group.rollouts[2:]
    fourth.samples[0].advantages = third.samples[0].advantages


ECHO_KEEP: Own = refused(
    answers_a_mask_too_short=answering(lambda: np.ones(1, bool)[:0]),
    answers_a_mask_of_two_dimensions=answering(lambda: np.ones((2, 2), bool)),
    answers_a_mask_of_the_wrong_length=answering(lambda: np.ones(3, bool)),
)


# ---- filters, samplers, mixes, datasets


def _rotate(group: Any) -> None:
    group.rollouts.append(group.rollouts.pop(0))


MATCHES: Own = wrong_types() | refused(
    answers_too_few=changing(lambda matches: matches[:-1]),
    answers_too_many=changing(lambda matches: [*matches, False]),
    answers_a_bool=answering(lambda: False),
    answers_nan_each=answering(lambda: [float("nan")] * 4),
    answers_arrays=answering(lambda: [np.ones(2, bool)] * 4),
    answers_texts=answering(lambda: ["no"] * 4),
    answers_None_each=answering(lambda: [None] * 4),
    answers_lying_numbers=answering(lambda: [LyingNumber()] * 4),
    answers_a_lying_length=answering(LyingLength),
) | harmless(
    pops_a_rollout=Kind(meddle=lambda entry, group: group.rollouts.pop()),
    clears_the_rollouts=Kind(meddle=lambda entry, group: group.rollouts.clear()),
    rotates_the_rollouts=Kind(meddle=lambda entry, group: _rotate(group)),
    sets_rewards_to_None=Kind(meddle=lambda entry, group: [setattr(r, "reward", None) for r in group.rollouts]),
    sets_rewards=Kind(meddle=lambda entry, group: [setattr(r, "reward", 9.0) for r in group.rollouts]),
    changes_token_ids=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].token_ids.fill(7)),
    changes_advantages=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].advantages.fill(9)),
    clears_samples=Kind(meddle=lambda entry, group: group.rollouts[0].samples.clear()),
    sets_the_status=Kind(meddle=lambda entry, group: setattr(group.rollouts[0], "status", RolloutStatus.ERROR)),
    sets_the_group_id=Kind(meddle=lambda entry, group: setattr(group, "group_id", "good-0")),
)  # fmt: skip
OBSERVE: Own = harmless(
    answers_something=changing(lambda answer: "seen"),
    clears_the_rollouts=Kind(meddle=lambda entry, group: group.rollouts.clear()),
    rotates_the_rollouts=Kind(meddle=lambda entry, group: _rotate(group)),
    sets_rewards=Kind(meddle=lambda entry, group: [setattr(r, "reward", 9.0) for r in group.rollouts]),
    changes_token_ids=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].token_ids.fill(7)),
    changes_advantages=Kind(meddle=lambda entry, group: group.rollouts[0].samples[0].advantages.fill(9)),
    sets_the_group_id=Kind(meddle=lambda entry, group: setattr(group, "group_id", "good-0")),
)
SAMPLE: Own = wrong_types() | refused(
    answers_an_id_of_a_number=with_(sample_id=7),
    answers_an_id_of_None=with_(sample_id=None),
    answers_info_of_a_text=with_(info="x"),
    answers_info_of_None=with_(info=None),
    answers_the_class=answering(lambda: DataSample),
)
MIX_NEXT: Own = wrong_types() | refused(
    answers_no_task=answering(lambda: "no such task"),
    answers_an_empty_text=answering(lambda: ""),
    answers_a_list=answering(lambda: ["good"]),
)
LENGTH: Own = wrong_types("a number") | refused(
    answers_minus_1=answering(lambda: -1),
    answers_0=answering(lambda: 0),
    answers_a_float=answering(lambda: 8.0),
    answers_10_to_the_30=answering(lambda: 10**30),
)
GETITEM: Own = SAMPLE


# ---- the loss

LOSS: Own = wrong_types() | refused(
    answers_the_sum=changing(torch.sum),
    answers_another_shape=changing(lambda losses: losses[:, :-1]),
    answers_one_more_dimension=changing(lambda losses: losses[None]),
    answers_an_array=changing(lambda losses: losses.detach().numpy()),
    answers_a_list=changing(lambda losses: losses.tolist()),
    answers_nan_everywhere=changing(lambda losses: losses * float("nan")),
    answers_infinity=changing(lambda losses: losses + float("inf")),
    answers_integers=changing(lambda losses: losses.detach().long()),
    answers_complex=changing(lambda losses: losses * 1j),
    answers_without_a_gradient=changing(lambda losses: losses.detach()),
    answers_an_infinite_gradient=Kind(change=lambda losses, tokens: _steep(tokens.logprobs)),
    answers_a_pair=changing(lambda losses: (losses, losses)),
) | harmless(
    changes_the_advantages=Kind(change=lambda losses, tokens: _then(losses, tokens.advantages.fill_(9))),
    changes_the_members=Kind(change=lambda losses, tokens: _then(losses, tokens.member.fill_(True))),
    empties_the_members=Kind(change=lambda losses, tokens: _then(losses, tokens.member.fill_(False))),
    changes_the_generator_log_probabilities=Kind(
        change=lambda losses, tokens: _then(losses, tokens.generator_logprobs.fill_(-9))
    ),
    changes_the_sequence_ids=Kind(change=lambda losses, tokens: _then(losses, tokens.sequence_ids.fill_(0))),
)  # fmt: skip


def _steep(logprobs: Any) -> Any:
    """0 everywhere, and the gradient is infinite."""
    return torch.sqrt((logprobs - logprobs.detach()).abs())


def _then(losses: Any, _: Any) -> Any:
    return losses


# ---- renderer, engine, teacher


def rendered(**values: Any) -> Kind:
    return with_(**values)


RENDER: Own = wrong_types() | refused(
    ids_None=rendered(token_ids=None),
    ids_empty=rendered(token_ids=[]),
    ids_texts=changing(lambda r: dataclasses.replace(r, token_ids=["x"] * len(r.token_ids))),
    ids_floats=changing(lambda r: dataclasses.replace(r, token_ids=[0.5] * len(r.token_ids))),
    ids_negative=changing(lambda r: dataclasses.replace(r, token_ids=[-1] * len(r.token_ids))),
    ids_too_large=changing(lambda r: dataclasses.replace(r, token_ids=[10**6] * len(r.token_ids))),
    ids_beyond_int32=changing(lambda r: dataclasses.replace(r, token_ids=[2**40] * len(r.token_ids))),
    ids_nested=changing(lambda r: dataclasses.replace(r, token_ids=[[1]] * len(r.token_ids))),
    roles_too_few=changing(lambda r: dataclasses.replace(r, message_indices=r.message_indices[:-1])),
    indices_out_of_range=changing(lambda r: dataclasses.replace(r, message_indices=[99] * len(r.message_indices))),
    content_too_short=changing(lambda r: dataclasses.replace(r, is_content=r.is_content[:-1])),
)
PARSE: Own = wrong_types() | refused(
    content_None=with_(content=7),
    content_a_list=with_(content=["x"]),
    calls_None=with_(tool_calls=None),
    calls_of_None=with_(tool_calls=[None]),
    reasoning_a_number=with_(reasoning_content=7),
)
BRIDGE: Own = wrong_types("None") | refused(
    ids_None=rendered(token_ids=None),
    ids_empty=rendered(token_ids=[]),
    ids_negative=changing(lambda r: dataclasses.replace(r, token_ids=[-1] * len(r.token_ids))),
    ids_texts=changing(lambda r: dataclasses.replace(r, token_ids=["x"] * len(r.token_ids))),
)


def _logprobs(value: float) -> Kind:
    return changing(lambda c: dataclasses.replace(c, logprobs=np.full(len(c.token_ids), value, np.float32)))


def _ids(value: Any, dtype: Any = np.int32) -> Kind:
    return changing(lambda c: dataclasses.replace(c, token_ids=np.full(len(c.token_ids), value, dtype)))


ENGINE: Own = wrong_types() | refused(
    log_probabilities_of_minus_infinity=_logprobs(-np.inf),
    log_probabilities_of_nan=_logprobs(np.nan),
    log_probabilities_of_infinity=_logprobs(np.inf),
    log_probabilities_above_0=_logprobs(3.0),
    one_log_probability_of_nan=changing(
        lambda c: dataclasses.replace(c, logprobs=np.append(c.logprobs[:-1], np.float32("nan")))
    ),
    log_probabilities_too_few=changing(lambda c: dataclasses.replace(c, logprobs=c.logprobs[:-1])),
    log_probabilities_None=with_(logprobs=None),
    log_probabilities_a_list_of_texts=changing(lambda c: dataclasses.replace(c, logprobs=["x"] * len(c.logprobs))),
    log_probabilities_of_two_dimensions=changing(lambda c: dataclasses.replace(c, logprobs=c.logprobs[:, None])),
    ids_too_few=changing(lambda c: dataclasses.replace(c, token_ids=c.token_ids[:-1])),
    ids_None=with_(token_ids=None),
    ids_negative=_ids(-1),
    ids_beyond_the_vocabulary=_ids(10**6),
    ids_of_floats=_ids(0.5, np.float64),
    ids_of_two_dimensions=changing(lambda c: dataclasses.replace(c, token_ids=c.token_ids[:, None])),
    versions_None=with_(policy_versions=None),
    versions_too_many=changing(lambda c: dataclasses.replace(c, policy_versions=np.append(c.policy_versions, 0))),
    versions_of_the_future=changing(lambda c: dataclasses.replace(c, policy_versions=c.policy_versions + 99)),
    an_unknown_finish_reason=with_(finish_reason="bored"),
    a_finish_reason_of_None=with_(finish_reason=None),
    a_finish_reason_of_a_list=with_(finish_reason=["stop"]),
    an_abort=with_(finish_reason="abort"),
) | harmless(
    # Nothing was sampled, so nothing of it is trained: the rollout needs no error.
    no_tokens=changing(
        lambda c: dataclasses.replace(
            c, token_ids=c.token_ids[:0], logprobs=c.logprobs[:0], policy_versions=c.policy_versions[:0]
        )
    ),
    changes_the_prompt=Kind(meddle=lambda session, prompt, **limits: prompt.fill(7)),
    answers_the_same_arrays=changing(lambda c: _shared_arrays(c)),
)  # fmt: skip

_KEPT: dict[str, Any] = {}


def _shared_arrays(completion: Any) -> Any:
    """One buffer of log-probabilities for all answers, as an engine that reuses its memory has."""
    buffer = _KEPT.setdefault("buffer", np.zeros(64, np.float32))
    buffer[: len(completion.logprobs)] = completion.logprobs
    return dataclasses.replace(completion, logprobs=buffer[: len(completion.logprobs)])


TEACHER: Own = wrong_types("a text", "bytes") | refused(
    answers_minus_infinity=changing(lambda scores: np.full_like(scores, -np.inf)),
    answers_nan_each=changing(lambda scores: np.full_like(scores, np.nan)),
    answers_too_few=changing(lambda scores: scores[:-1]),
    answers_too_many=changing(lambda scores: np.append(scores, 0)),
    answers_two_dimensions=changing(lambda scores: scores[:, None]),
    answers_texts=changing(lambda scores: np.array(["x"] * len(scores))),
) | harmless(
    changes_the_tokens=Kind(meddle=lambda policy, token_ids: token_ids.fill(7)),
)  # fmt: skip


OWN: dict[str, Own] = {
    "env.reset": ENV_RESET,
    "env.reset, plain": wrong_types(),
    "env.step_message": ENV_STEP,
    "env.step_message, plain": wrong_types(),
    "task.make_env": MAKE_ENV,
    "task.make_envs": MAKE_ENVS,
    "task.run_rollout": RUN_ROLLOUT,
    "reward function": REWARD,
    "reward function, plain": wrong_types("a number"),
    "reward function, group": REWARDS,
    "rubric.score_group": SCORE_GROUP,
    "rubric.register_funcs": REGISTER_FUNCS,
    "algorithm.score_rollout": SCORE_ROLLOUT,
    "algorithm.score_group": SCORE_GROUP_CREDIT,
    "echo.keep": ECHO_KEEP,
    "filter.matches, pre": MATCHES,
    "filter.matches, post": MATCHES,
    "sampler.next": SAMPLE,
    "sampler.observe": OBSERVE,
    "mix.next": MIX_NEXT,
    "mix.observe": OBSERVE,
    "dataset.__len__": LENGTH,
    "dataset.__getitem__": GETITEM,
    "loss": LOSS,
    "renderer.render": RENDER,
    "renderer.parse_response": PARSE,
    "renderer.bridge_to_next_turn": BRIDGE,
    "engine.generate": ENGINE,
    "teacher.score": TEACHER,
}
