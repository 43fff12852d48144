"""Ends a run whose trainer and generators do not compute the same log-probabilities.

Digests prove which weights an engine holds, not what it computes with them. The log-probabilities
of a step's tokens, by the trainer and by the generator that sampled them, do. In any precision they
differ by rounding if the token's version is the trainer's, and by what the policy has learned since
if the version is older. So each age, in versions, has a bound of its own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.events import RunEvents
from torchtitan.experiments.rl.loops.saved_state import MismatchState

FIRST_VERSIONS = 5
"""Number of versions that the bound of an age is derived from."""
FACTOR = 10.0
"""Largest distance, as a multiple of the largest of the first versions.

Small batches and longer answers move the mean by less.
"""
ROUNDING = {"float32": 0.01, "bfloat16": 0.3}
"""Mean distance in nats that rounding alone may always reach. Seen: 1e-6 and 0.005."""
LEARNING = 1.0
"""Mean distance in nats, times ``age + 1``, that learning may always reach. Seen: 0.15."""

_METRIC = re.compile(r"mismatch/replica/(\d+)/age/(\d+)")
_SHARE = "mismatch/share_of_bound_max"


class MismatchAlarm(RunEvents):
    """Observer that checks each step's metrics.

    The bound of an age is FACTOR times what was first seen, and at least ROUNDING or LEARNING.
    """

    def __init__(self, dtype: Literal["float32", "bfloat16"], *, exact: bool):
        """Have no bounds of its own yet.

        Args:
            dtype: coarsest dtype that trainer or generator computes in.
            exact: True if a token's whole prefix is read with the weights on the token's label. It
                is not if running completions keep their keys and values over an update.
        """
        self._least = ROUNDING[dtype] if exact else LEARNING
        """Lower limit of the bound of age 0, in nats."""
        self._first: dict[int, list[float]] = {}
        """Largest distance over the replicas in each of the first versions, by age."""

    def state(self) -> list[MismatchState]:
        """Return what a resumed run needs to go on with the same bounds."""
        return [
            MismatchState(age=age, distances=list(distances))
            for age, distances in sorted(self._first.items())
        ]

    def restore(self, state: Sequence[MismatchState]) -> None:
        """Go on with the bounds of a checkpoint."""
        self._first = {entry.age: list(entry.distances) for entry in state}

    def bound(self, age: int) -> float:
        """Return the largest mean distance of tokens of an age, in nats."""
        learned = LEARNING * (age + 1)
        first = self._first.get(age, [])
        if len(first) < FIRST_VERSIONS:
            return learned
        least = self._least if age == 0 else learned
        return max(least, FACTOR * max(first))

    def step_trained(self, step: int, metrics: dict[str, float]) -> None:
        """Check a step, and add its bounds to its metrics."""
        metrics |= self.check(step - 1, metrics)

    def check(self, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Compare the distances of a step with their bounds.

        Args:
            version: version of the policy that was trained in the step.

        Returns:
            Metrics: the bound of each age that occurred, and the largest distance as a share of its
            bound.

        Raises:
            RunError: a mean distance is above its bound or not a number; names replica and version.
        """
        largest: dict[int, float] = {}
        reported: dict[str, float] = {}
        for name, distance in metrics.items():
            match = _METRIC.fullmatch(name)
            if match is None:
                continue
            replica, age = map(int, match.groups())
            bound = self.bound(age)
            if not distance <= bound:
                raise RunError(
                    f"generator {replica} and trainer disagree on tokens of version "
                    f"{version - age}: their log-probabilities differ by {distance:.3g} nats on "
                    f"average in the step on version {version}, more than {bound:.3g}; the "
                    "generator computes with other weights, or the learning rate is far too high"
                )
            largest[age] = max(distance, largest.get(age, 0.0))
            reported[f"mismatch/bound/age/{age}"] = bound
            reported[_SHARE] = max(distance / bound, reported.get(_SHARE, 0.0))
        for age, distance in largest.items():
            first = self._first.setdefault(age, [])
            if len(first) < FIRST_VERSIONS:
                first.append(distance)
        return reported


def mismatch_alarm(config: RunConfig) -> MismatchAlarm:
    """Return the alarm for a run's precision and its way to update weights."""
    dtypes = {
        config.generator.engine.dtype,
        config.trainer.dtype,
        config.trainer.mixed_precision_param,
    }
    return MismatchAlarm(
        "bfloat16" if "bfloat16" in dtypes else "float32",
        exact=config.max_offpolicy_steps == 0 or config.generator.weight_update != "keep",
    )
