"""Drafts of rollouts, to which an algorithm writes credit.

    group ──draft_group──▶ draft ──Algorithm.score_group──▶ draft ──take_credit──▶ group
    read-only              its samples can be written       checked                read-only

An algorithm that fails, or that changes what it may not, leaves the group as it was.
"""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np

from torchtitan.experiments.rl.frozen import ReadOnlyList
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.types import CREDIT_STREAMS, TrainingSample

_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainingSample))


def draft_group(group: RolloutGroup) -> RolloutGroup:
    """Return a read-only copy of the group, with the drafts of its rollouts."""
    draft = replace(group, rollouts=[], costs=dict(group.costs)).freeze()
    draft.amend(rollouts=[draft_rollout(rollout) for rollout in group.rollouts])
    return draft


def draft_rollout(rollout: Rollout) -> Rollout:
    """Return a read-only copy of the rollout whose samples are copies that can be written.

    Arrays that algorithms write are copies; the others are shared, and become read-only.
    """
    draft = replace(rollout, samples=[]).freeze()
    samples = ReadOnlyList(map(_draft_sample, rollout.samples))
    object.__setattr__(draft, "samples", samples)  # `amend` would freeze the samples too
    return draft


def _draft_sample(sample: TrainingSample) -> TrainingSample:
    credit: dict[str, Any] = {}
    for name in _SAMPLE_FIELDS:
        values = getattr(sample, name)
        if not isinstance(values, np.ndarray):
            continue
        if name in CREDIT_STREAMS:
            credit[name] = values.copy()
        else:
            values.flags.writeable = False
    return replace(sample, **credit)


def check_draft(
    rollout: Rollout,
    draft: Rollout,
    check: Callable[[TrainingSample], None],
    *,
    replaces: Collection[str] = (),
) -> None:
    """Raise if an algorithm has written to a draft what its rollout can't take.

    Args:
        check: raises ValueError if a sample can't be trained on. May give a stream of the draft its
            declared dtype.
        replaces: fields that the algorithm may set beside the credit streams
            (`Algorithm.replaces`).

    Raises:
        ValueError: the algorithm has set another field, or ``check`` refuses a sample.
    """
    for index, (sample, written) in enumerate(zip(rollout.samples, draft.samples, strict=True)):
        for name in _SAMPLE_FIELDS:
            is_allowed = name in CREDIT_STREAMS or name in replaces
            if not is_allowed and getattr(written, name) is not getattr(sample, name):
                raise ValueError(f"changed samples[{index}].{name} of a rollout that has ended")
        check(written)


def take_credit(rollout: Rollout, draft: Rollout) -> None:
    """Give a rollout the samples of its draft, and make them read-only.

    The caller has checked the draft (`check_draft`). An array that the algorithm has set is taken
    over and not copied, unless it is a part of a larger one.
    """
    for sample in draft.samples:
        for name in CREDIT_STREAMS:
            values = getattr(sample, name)
            if values is not None:  # the algorithm may use its array again
                setattr(sample, name, values.copy())
    rollout.amend(samples=[sample.freeze() for sample in draft.samples])
