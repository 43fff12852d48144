"""Drafts of samples, to which an algorithm writes credit.

    with Drafts(rollouts) as drafts:       rollout.samples: drafts, which can be written
        Algorithm.score_group(group)       writes to the drafts
        drafts.check(rollout, ...)         compares the drafts with the samples they were made of
        drafts.take(rollout)               the drafts become read-only, and stay

A rollout whose drafts were not taken gets its samples back: an algorithm that fails, or that
changes what it may not, leaves them as they were. After ``score_group`` the task takes drafts only
when those of all rollouts with a reward have passed `Drafts.check`, so one bad draft fails the
group.

``Algorithm.score_rollout`` is given a copy of its rollout with drafts, and the rollout gets its
credit from the copy (`Task.credit_rollout`). A call that is late may go on writing to the copy.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from typing import Self

import numpy as np

from torchtitan.experiments.rl.batching.sample_checks import checked_stream
from torchtitan.experiments.rl.frozen import ReadOnlyList
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.types import CREDIT_STREAMS, STREAMS, TrainingSample

_SAMPLE_FIELDS = tuple(field.name for field in fields(TrainingSample))


class Drafts:
    """Context manager that puts drafts, which can be written, in the place of rollouts' samples.

    The constructor makes the rollouts read-only, for good: only their drafts can be written.
    """

    def __init__(self, rollouts: Sequence[Rollout]):
        self._rollouts = {rollout.rollout_id: rollout.freeze() for rollout in rollouts}
        self._samples = {
            rollout_id: rollout.samples for rollout_id, rollout in self._rollouts.items()
        }
        """Samples that the drafts were made of, by the rollout's id."""
        self._taken: set[str] = set()
        """Ids of the rollouts that keep their drafts."""

    def __enter__(self) -> Self:
        drafts = {
            rollout_id: [_draft(sample) for sample in samples]
            for rollout_id, samples in self._samples.items()
        }
        for rollout_id, rollout in self._rollouts.items():
            _set_samples(rollout, drafts[rollout_id])
        return self

    def __exit__(self, *_: object) -> None:
        for rollout_id, rollout in self._rollouts.items():
            if rollout_id not in self._taken:
                _set_samples(rollout, self._samples[rollout_id])

    def check(
        self,
        rollout: Rollout,
        check_sample: Callable[[TrainingSample], None],
        *,
        replaces: Collection[str] = (),
    ) -> None:
        """Raise if the drafts of a rollout can't become its samples; convert what may be set.

        Each stream that the algorithm may set gets its declared dtype. Every other field of a draft
        must be the same object as in the sample: an equal value is refused too. No array has to be
        compared for that, because those that a draft shares with its sample are read-only.

        Args:
            check_sample: raises if a sample can't be trained on, and gives the credit streams their
                dtype.
            replaces: fields that the algorithm may set beside the credit streams
                (`Algorithm.replaces`); none for ``score_group``.

        Raises:
            ValueError: the algorithm has set another field, or a stream is not one number for each
                token.
            Exception: whatever ``check_sample`` raises.
        """
        samples = self._samples[rollout.rollout_id]
        for index, (sample, draft) in enumerate(zip(samples, rollout.samples, strict=True)):
            for name in _SAMPLE_FIELDS:
                is_allowed = name in CREDIT_STREAMS or name in replaces
                if not is_allowed and getattr(draft, name) is not getattr(sample, name):
                    raise ValueError(f"changed samples[{index}].{name} of a rollout that has ended")
            for name in STREAMS.keys() & replaces:
                values = getattr(draft, name)
                if values is not None:
                    setattr(draft, name, checked_stream(name, values, len(draft)))
            check_sample(draft)

    def take(self, rollout: Rollout) -> None:
        """Make the drafts of a rollout its read-only samples. The caller has checked them.

        Arrays that the algorithm has set are copied, because it may write to its own again.
        """
        samples = self._samples[rollout.rollout_id]
        for sample, draft in zip(samples, rollout.samples, strict=True):
            for name in _SAMPLE_FIELDS:
                values = getattr(draft, name)
                is_new = values is not getattr(sample, name)
                if is_new and isinstance(values, np.ndarray):
                    setattr(draft, name, values.copy())
            draft.freeze()
        self._taken.add(rollout.rollout_id)


def _set_samples(rollout: Rollout, samples: Iterable[TrainingSample]) -> None:
    # Not by `amend`, which would make the samples read-only.
    object.__setattr__(rollout, "samples", ReadOnlyList(samples))


def _draft(sample: TrainingSample) -> TrainingSample:
    """Return a copy of the sample. Its fields can be set, and its credit streams written in place.

    Its other arrays are those of the sample, which are read-only.
    """
    draft = sample.thawed()
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if isinstance(values, np.ndarray):
            setattr(draft, name, values.copy())
    return draft
