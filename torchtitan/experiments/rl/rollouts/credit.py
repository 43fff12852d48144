"""Drafts of samples, to which an algorithm writes credit.

    with Drafts(rollouts) as drafts:       rollout.samples: drafts, which can be written
        Algorithm.score_group(group)       writes to the drafts
        drafts.check(rollout, ...)         compares the drafts with the samples they were made of
        drafts.take(rollout)               the drafts become read-only, and stay

A rollout whose drafts were not taken gets its samples back: an algorithm that fails, or that
changes what it may not, leaves them as they were. ``Algorithm.score_rollout`` is given a copy of
its rollout with drafts, and the rollout takes them from the copy (`Task.credit_rollout`).
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

    The rollouts become read-only when it is made, and stay so: only their drafts can be written.
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
        """Raise if an algorithm has written to a rollout's drafts what the rollout can't take.

        Streams that the algorithm may set get their declared dtype. Of other fields it is enough to
        see that they are the same objects: their arrays are read-only.

        Args:
            check_sample: raises ValueError if a sample can't be trained on, and gives the credit
                streams their dtype.
            replaces: fields that the algorithm may set beside the credit streams
                (`Algorithm.replaces`).

        Raises:
            ValueError: the algorithm has set another field, or ``check_sample`` refuses a sample.
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
        """Make the drafts of a rollout its read-only samples. The caller has checked them."""
        samples = self._samples[rollout.rollout_id]
        for sample, draft in zip(samples, rollout.samples, strict=True):
            for name in _SAMPLE_FIELDS:
                values = getattr(draft, name)
                is_new = values is not getattr(sample, name)
                if is_new and isinstance(values, np.ndarray):
                    setattr(draft, name, values.copy())  # the algorithm may use its array again
            draft.freeze()
        self._taken.add(rollout.rollout_id)


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
