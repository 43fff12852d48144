"""Kinds of algorithms."""

from typing import Any

import numpy as np

from tests.zoo.misbehaviour import Kind, LyingNumber, answering
from tests.zoo.own.makers import Own, harmless, refused
from torchtitan.experiments.rl.rollouts.types import RolloutStatus


def _each(act: Any) -> Kind:
    """After the honest credit, to every sample of rollouts 0 to 3."""

    def change(answer: Any, algorithm: Any, subject: Any) -> Any:
        for rollout in getattr(subject, "rollouts", None) or [subject]:
            for sample in rollout.samples:
                act(sample)
        return answer

    return Kind(change=change)


def _sets(stream: str, value: Any) -> Kind:
    return _each(
        lambda sample: setattr(sample, stream, value(len(sample)) if callable(value) else value)
    )


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
    replaces_token_ids=_each(
        lambda sample: setattr(sample, "token_ids", np.full(len(sample), 7, np.int32))
    ),
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
        sets_a_temperature_of_nan=_each(
            lambda sample: setattr(sample, "temperature", float("nan"))
        ),
        sets_a_text_for_temperature=_each(lambda sample: setattr(sample, "temperature", "1")),
        trains_the_first_token=_each(
            lambda sample: setattr(sample, "ce_weights", np.ones(len(sample), np.float32))
        ),
        puts_None_among_samples=Kind(
            change=lambda answer, algorithm, rollout: rollout.samples.append(None)
        ),
        sets_samples_to_None=Kind(
            change=lambda answer, algorithm, rollout: setattr(rollout, "samples", None)
        ),
    )
    | harmless(
        sets_the_status=Kind(
            change=lambda answer, algorithm, rollout: setattr(
                rollout, "status", RolloutStatus.ERROR
            )
        ),
        clears_the_turns=Kind(change=lambda answer, algorithm, rollout: rollout.turns.clear()),
        shares_samples=Kind(
            change=lambda answer, algorithm, rollout: rollout.samples.append(rollout.samples[0])
        ),
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
        reverses_the_rollouts=Kind(
            change=lambda answer, algorithm, group: group.rollouts.reverse()
        ),
        doubles_a_rollout=Kind(
            change=lambda answer, algorithm, group: group.rollouts.append(group.rollouts[0])
        ),
        replaces_the_rollouts=Kind(
            change=lambda answer, algorithm, group: setattr(group, "rollouts", [])
        ),
        sets_rewards_to_None=Kind(
            change=lambda answer, algorithm, group: [
                setattr(r, "reward", None) for r in group.rollouts
            ]
        ),
        sets_rewards=Kind(
            change=lambda answer, algorithm, group: [
                setattr(r, "reward", 9.0) for r in group.rollouts
            ]
        ),
        sets_the_status=Kind(
            change=lambda answer, algorithm, group: [
                setattr(r, "status", "error") for r in group.rollouts
            ]
        ),
        sets_the_group_id=Kind(
            change=lambda answer, algorithm, group: setattr(group, "group_id", "good-0")
        ),
        sets_a_failure=Kind(change=lambda answer, algorithm, group: setattr(group, "failure", 7)),
        shares_one_array=Kind(change=lambda answer, algorithm, group: _share_advantages(group)),
        clears_the_turns=Kind(
            change=lambda answer, algorithm, group: group.rollouts[0].turns.clear()
        ),
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
