"""Stops a run whose trainer and generator no longer agree on the log-probabilities of the sampled tokens.

Digests prove which weights an engine holds (`generation/vllm_held.py`), not what it computes with them. What both sides say of
the tokens of a step does, in any precision: it differs by rounding where the token's version is the trainer's, and by what the
policy has learned since where it is older.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.saved_state import MismatchState
from torchtitan.experiments.rl.errors import RunError

_METRIC = re.compile(r"mismatch/replica/(\d+)/age/(\d+)")

FIRST_VERSIONS = 5
"""That the bound of an age is derived from."""
FACTOR = 10.0
"""Times the largest distance of the first versions: small batches and longer answers move the mean by less."""
ROUNDING = {"float32": 0.01, "bfloat16": 0.3}
"""Nats that a mean may always reach by rounding alone. Seen: 1e-6 and 0.005."""
LEARNING = 1.0
"""Nats, times age + 1, that a mean may always reach where the policy has learned between sampling and training. Seen: 0.15."""


class MismatchAlarm:
    """``check`` each step's metrics. An age's bound is FACTOR times what was first seen, and at least ROUNDING or LEARNING."""

    def __init__(self, dtype: Literal["float32", "bfloat16"], *, exact: bool):
        """
        Args:
            dtype: the coarsest that trainer or generator computes in.
            exact: a token's whole prefix is read with the weights on its label. Not so if running completions keep their keys
                and values over an update.
        """
        self._rounding = ROUNDING[dtype] if exact else LEARNING
        """Of age 0."""
        self._first: dict[int, list[float]] = {}
        """By age: the largest distance over the replicas, of each of the first versions."""

    def state(self) -> list[MismatchState]:
        """What a resumed run needs to go on with the same bounds."""
        return [MismatchState(age=age, distances=list(first)) for age, first in sorted(self._first.items())]

    def restore(self, state: Sequence[MismatchState]) -> None:
        """Go on from a ``state``."""
        self._first = {entry.age: list(entry.distances) for entry in state}

    def bound(self, age: int) -> float:
        """Nats."""
        first = self._first.get(age, [])
        if len(first) < FIRST_VERSIONS:
            return LEARNING * (age + 1)
        return max(self._rounding if age == 0 else LEARNING * (age + 1), FACTOR * max(first))

    def check(self, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """
        Args:
            version: of the policy that was trained in this step.

        Returns:
            Metrics: the bound of each age that occurred, and the largest distance as a share of its bound.

        Raises:
            RunError: a mean distance is above its bound, or no number; names replica and version.
        """
        largest: dict[int, float] = {}
        shares = []
        for name, distance in metrics.items():
            if not (found := _METRIC.fullmatch(name)):
                continue
            replica, age = int(found[1]), int(found[2])
            bound = self.bound(age)
            if not distance <= bound:
                raise RunError(
                    f"generator {replica} and trainer disagree on tokens of version {version - age}: their log-probabilities "
                    f"differ by {distance:.3g} nats on average in the step on version {version}, more than {bound:.3g}; the "
                    "generator computes with other weights, or the learning rate is far too high"
                )
            largest[age] = max(distance, largest.get(age, 0.0))
            shares.append(distance / bound)
        reported = {f"mismatch/bound/age/{age}": self.bound(age) for age in largest}
        for age, distance in largest.items():
            first = self._first.setdefault(age, [])
            if len(first) < FIRST_VERSIONS:
                first.append(distance)
        return reported | ({"mismatch/share_of_bound_max": max(shares)} if shares else {})


def mismatch_alarm(config: RunConfig) -> MismatchAlarm:
    """The alarm for a run's precision and its way to update weights."""
    dtypes = {config.generator.engine.dtype, config.trainer.dtype, config.trainer.mixed_precision_param}
    return MismatchAlarm(
        "bfloat16" if "bfloat16" in dtypes else "float32",
        exact=config.max_offpolicy_steps == 0 or config.generator.weight_update != "keep",
    )
