"""Drafts of samples, to which an algorithm writes credit.

    with drafts(rollouts) as originals:            rollout.samples: drafts, which can be written
        Algorithm.score_group(group)               writes to the drafts
        check_draft(rollout, originals[i], ...)    compares rollout.samples with the originals
        take_credit(rollout, originals[i])         makes the drafts read-only; they stay
                                                   rollout.samples: drafts taken, or the originals

A rollout whose drafts were not taken gets its samples back: an algorithm that fails, or that
changes what it may not, leaves them as they were.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import numpy as np

from torchtitan.experiments.rl.frozen import ReadOnlyList
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.types import CREDIT_STREAMS, TrainingSample

_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainingSample))


@contextmanager
def drafts(rollouts: Sequence[Rollout]) -> Iterator[list[list[TrainingSample]]]:
    """Put drafts in the place of the samples of rollouts, and yield the originals of each rollout.

    A draft is a copy of a sample that can be written. The originals, and all else of the rollouts,
    are made read-only. When the context ends, a rollout whose drafts were not taken (`take_credit`)
    gets its originals back.
    """
    originals = [rollout.freeze().samples for rollout in rollouts]
    for rollout, samples in zip(rollouts, originals, strict=True):
        _set_samples(rollout, map(_draft, samples))
    try:
        yield originals
    finally:
        for rollout, samples in zip(rollouts, originals, strict=True):
            if not all(sample.frozen for sample in rollout.samples):
                _set_samples(rollout, samples)


def _set_samples(rollout: Rollout, samples: Iterable[TrainingSample]) -> None:
    # Not by `amend`, which would make the samples read-only.
    object.__setattr__(rollout, "samples", ReadOnlyList(samples))


def _draft(sample: TrainingSample) -> TrainingSample:
    """Return a copy of the sample whose fields and credit streams can be written.

    The arrays of other streams are shared, and are read-only.
    """
    draft = sample.thawed()
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if isinstance(values, np.ndarray):
            setattr(draft, name, values.copy())
    return draft


def check_draft(
    rollout: Rollout,
    samples: Sequence[TrainingSample],
    check: Callable[[TrainingSample], None],
    *,
    replaces: Collection[str] = (),
) -> None:
    """Raise if an algorithm has written to a rollout's drafts what the rollout can't take.

    Call it for every rollout of a group before `take_credit` for any: an algorithm's credit is
    taken as a whole.

    Args:
        samples: originals that the drafts were made of (`drafts`).
        check: raises ValueError if a sample can't be trained on. May give a stream of the draft its
            declared dtype.
        replaces: fields that the algorithm may set beside the credit streams
            (`Algorithm.replaces`).

    Raises:
        ValueError: the algorithm has set another field, be it to an equal value, or ``check``
            refuses a sample.
    """
    for index, (sample, draft) in enumerate(zip(samples, rollout.samples, strict=True)):
        for name in _SAMPLE_FIELDS:
            is_allowed = name in CREDIT_STREAMS or name in replaces
            if not is_allowed and getattr(draft, name) is not getattr(sample, name):
                raise ValueError(f"changed samples[{index}].{name} of a rollout that has ended")
        check(draft)


def take_credit(rollout: Rollout, samples: Sequence[TrainingSample]) -> None:
    """Make the drafts of a rollout its read-only samples, with copies of the arrays that were set.

    The caller has checked them (`check_draft`).

    Args:
        samples: originals that the drafts were made of (`drafts`).
    """
    for sample, draft in zip(samples, rollout.samples, strict=True):
        for name in _SAMPLE_FIELDS:
            values = getattr(draft, name)
            is_new = values is not getattr(sample, name)
            if is_new and isinstance(values, np.ndarray):
                setattr(draft, name, values.copy())  # the algorithm may use its array again
        draft.freeze()
