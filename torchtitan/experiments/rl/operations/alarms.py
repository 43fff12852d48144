"""What ends a run that goes on for nothing: rollouts that all fail, groups that teach nothing, weights that do not agree.

Groups whose rewards all tie have no learning signal. Before the first group with a signal that is a fault of the setup. Later
it is what success looks like: with a filter that drops such groups, a run on mastered tasks keeps no group at all.

Limits are of groups. A task that does not compare its rollouts has groups of one, and those that one pick of the task mix
starts count as one group (``groups_per_pick``): or one bad example, run 8 times, would be 8 groups in a row.

Digests prove which weights an engine holds, not what it computes with them. What trainer and generator say of the tokens of a
step does, in any precision: it differs by rounding where the token's version is the trainer's, and by what the policy has
learned since where it is older.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from statistics import fmean
from typing import Literal, TypeVar

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.controller.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.controller.saved_state import (
    DropsState,
    MasteryState,
    MismatchState,
    NoSignalState,
    StallState,
)
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.printable import one_sentence, text_of
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

T = TypeVar("T")
Note = Callable[[str, str], None]
"""Prints a line, and a traceback under it, which may be empty."""

FEW_GROUPS = 8
"""The first groups of a run. If all of them fail in one way, more would too."""
MOST_KINDS = 20
"""That are printed."""
SHOWN_CHARACTERS = 80
"""Maximum length of a reply, and of a row, in an error: its cure follows, and must be read."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")

_METRIC = re.compile(r"mismatch/replica/(\d+)/age/(\d+)")
_SHARE = "mismatch/share_of_bound_max"
FIRST_VERSIONS = 5
"""That the bound of an age is derived from."""
FACTOR = 10.0
"""Times the largest distance of the first versions: small batches and longer answers move the mean by less."""
ROUNDING = {"float32": 0.01, "bfloat16": 0.3}
"""Nats that a mean may always reach by rounding alone. Seen: 1e-6 and 0.005."""
LEARNING = 1.0
"""Nats, times age + 1, that a mean may always reach where the policy has learned between sampling and training. Seen: 0.15."""


class FirstFailures(RunEvents):
    """Failures are of one kind if their task is the same, and their causes but for numbers."""

    def __init__(self, note: Note, *, log: str = "logs/controller.jsonl"):
        """
        Args:
            note: prints a failure.
            log: file of this process's log, in the run's folder.
        """
        self._note, self._log = note, log
        self._kinds: dict[tuple[str, str], str] = {}
        """The first cause of each."""

    def group_arrived(self, group: RolloutGroup) -> None:
        """Print the failures of its rollouts that are the first of their kind."""
        for rollout in group.rollouts:
            if rollout.reward is None and rollout.error:
                kind = (group.task_name, _VARIES.sub("#", rollout.error))
                if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
                    self._kinds[kind] = cause = (
                        f"{one_sentence(rollout.error)} (task {group.task_name})"
                    )
                    line = f"a rollout failed: {cause}; the first of its kind, {self._log} has all"
                    self._note(line, rollout.traceback)


class StallDetectors(FirstFailures):
    """Ends a run in which nothing is left to train on, with an error that names the causes, or as complete.

    * The first groups of the run all failed, in one way.
    * ``limit`` groups in a row are dropped. What post-batch filters empty is counted on its own, because they may drop every
      group that the others kept. Ties of mastered tasks count only beside at least as many drops for other causes.
    * None of the first ``limit`` groups has a learning signal. After the first that has one this detects nothing more.
    * Every task is mastered: after groups with a signal, the last ``limit`` groups of each were dropped because their rewards
      tie. Each task is counted on its own, so one that is mastered ends nothing while others learn.
    """

    def __init__(
        self,
        limit: int,
        groups_per_pick: Mapping[str, int],
        note: Note = lambda line, traceback: None,
    ):
        """
        Args:
            groups_per_pick: number of groups that each task starts when the mix picks it.
            note: prints the first failure of each kind.
        """
        super().__init__(note)
        self._limit, self._groups_per_pick = limit, groups_per_pick
        self._failed = Fraction(0) if limit > FEW_GROUPS else None
        """Groups that failed; None from the first on that did not, and where more than FEW_GROUPS have."""
        self._rollouts = 0
        """Number of rollouts without a signal that this process has seen."""
        self._cut_off = 0
        """Number of those that a limit cut off."""
        self._state = StallState(
            drops=_no_drops(),
            emptied=_no_drops(),
            no_signal=NoSignalState(signal_seen=False, groups=Fraction(0), mean_rewards=[]),
            mastery=MasteryState(ties={}, signals={}),
        )

    def group_arrived(self, group: RolloutGroup) -> None:
        super().group_arrived(group)
        if group.failure is None:
            self._failed = None

    def group_scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """
        Raises:
            RunError: the first ``limit`` groups had no learning signal, this one included.
        """
        start, mastery, task = self._state.no_signal, self._state.mastery, group.task_name
        if signal:
            start.signal_seen = True
            count, total = mastery.signals.get(task, (0, 0.0))
            mastery.signals[task], mastery.ties[task] = (
                (count + 1, total + fmean(group.rewards)),
                [],
            )
        elif group.scored and not start.signal_seen:
            start.groups += Fraction(1, self._groups_per_pick[task])
            start.mean_rewards = _counted(start.mean_rewards, [fmean(group.rewards)])
            self._rollouts += len(group.rollouts)
            self._cut_off += sum(rollout.status.is_truncated() for rollout in group.rollouts)
            if start.groups >= self._limit:
                raise RunError(
                    f"none of the first {float(start.groups):g} groups teaches anything: all rollouts of a group got the same "
                    f"reward ({_shares(start.mean_rewards)}), so every advantage is 0; {self._cut_off / self._rollouts:.0%} of "
                    f"the rollouts were cut off by a limit{_one_reply(group)}; {self._no_signal_cure()} "
                    "(max_drops_in_a_row sets how many groups are waited for)"
                )

    def _no_signal_cure(self) -> str:
        if 2 * self._cut_off > self._rollouts:
            return (
                "raise sampling.max_tokens or env.max_rollout_tokens, and if replies should have ended before, see that the "
                "model's end of a turn is among sampling.stop_token_ids"
            )
        return (
            "look at the rubric, and whether the examples are too hard or too easy for this model"
        )

    def group_kept(self) -> None:
        self._state.drops = _no_drops()

    def groups_taken(self) -> None:
        self._state.emptied = _no_drops()

    def group_dropped(
        self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool
    ) -> None:
        """
        Raises:
            RunError: too many in a row, or the first groups of the run all failed in one way.
            NothingLeftToLearn: every task is mastered.
        """
        share = Fraction(1, self._groups_per_pick[group.task_name])
        if group.failure is not None and self._failed is not None:
            self._failed += share
            if self._failed >= FEW_GROUPS:
                self._failed = None
                if len(self._kinds) == 1:
                    (cause,) = self._kinds.values()
                    raise RunError(
                        f"the first {FEW_GROUPS} groups all failed in the same way: {cause}"
                    )
        tie = not signal and self._is_tie_of_mastered(columns, group)
        drops = self._state.emptied if taken else self._state.drops
        drops.groups, drops.ties = drops.groups + share, drops.ties + share * tie
        drops.columns, drops.rewards = (
            _counted(drops.columns, columns),
            _counted(drops.rewards, group.rewards),
        )
        others = drops.groups - drops.ties
        if drops.groups >= self._limit and (others >= self._limit or 2 * others >= drops.groups):
            causes = ", ".join(
                f"{n} {column}" for column, n in Counter(dict(drops.columns)).most_common()
            )
            rewards = f"; rewards {_shares(drops.rewards)}" if drops.rewards else ""
            raise RunError(
                f"{float(drops.groups):g} groups in a row gave nothing to train on (rollouts: {causes}{rewards}); see "
                "logs/controller.jsonl for each cause, or raise max_drops_in_a_row"
            )

    def state(self) -> StallState:
        """What a resumed run continues from."""
        return copy.deepcopy(self._state)

    def restore(self, state: StallState) -> None:
        self._state, self._failed = state, None  # the groups to come are not the run's first

    def _is_tie_of_mastered(self, columns: Iterable[str], group: RolloutGroup) -> bool:
        """Whether filters dropped the group because its rewards tie, in a task that had a signal before."""
        mastery = self._state.mastery
        ends = [column for column in columns if not column.startswith("failed/")]
        if (
            not ends
            or group.task_name not in mastery.signals
            or not all(end.startswith("filtered/") for end in ends)
        ):
            return False
        mastery.ties.setdefault(group.task_name, []).append(fmean(group.rewards))
        if all(
            len(mastery.ties.get(name, [])) >= self._limit * groups
            for name, groups in self._groups_per_pick.items()
        ):
            words = [
                f"{name} at reward {fmean(mastery.ties[name]):.4g}, after groups with a learning signal at {total / count:.4g}"
                for name, (count, total) in mastery.signals.items()
            ]
            raise NothingLeftToLearn(
                f"nothing left to learn: in the last {self._limit} groups of each task all rewards tie ({'; '.join(words)})"
            )
        return True


class MismatchAlarm(RunEvents):
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
        return [
            MismatchState(age=age, distances=list(first))
            for age, first in sorted(self._first.items())
        ]

    def restore(self, state: Sequence[MismatchState]) -> None:
        self._first = {entry.age: list(entry.distances) for entry in state}

    def bound(self, age: int) -> float:
        """Nats."""
        first = self._first.get(age, [])
        if len(first) < FIRST_VERSIONS:
            return LEARNING * (age + 1)
        return max(self._rounding if age == 0 else LEARNING * (age + 1), FACTOR * max(first))

    def step_trained(self, step: int, metrics: dict[str, float]) -> None:
        metrics |= self.check(step - 1, metrics)

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
        reported: dict[str, float] = {}
        for name, distance in metrics.items():
            if not (found := _METRIC.fullmatch(name)):
                continue
            replica, age = map(int, found.groups())
            bound = self.bound(age)
            if not distance <= bound:
                raise RunError(
                    f"generator {replica} and trainer disagree on tokens of version {version - age}: their log-probabilities "
                    f"differ by {distance:.3g} nats on average in the step on version {version}, more than {bound:.3g}; the "
                    "generator computes with other weights, or the learning rate is far too high"
                )
            largest[age] = max(distance, largest.get(age, 0.0))
            reported[f"mismatch/bound/age/{age}"] = bound
            reported[_SHARE] = max(distance / bound, reported.get(_SHARE, 0.0))
        for age, distance in largest.items():
            if len(first := self._first.setdefault(age, [])) < FIRST_VERSIONS:
                first.append(distance)
        return reported


def mismatch_alarm(config: RunConfig) -> MismatchAlarm:
    """The alarm for a run's precision and its way to update weights."""
    dtypes = {
        config.generator.engine.dtype,
        config.trainer.dtype,
        config.trainer.mixed_precision_param,
    }
    return MismatchAlarm(
        "bfloat16" if "bfloat16" in dtypes else "float32",
        exact=config.max_offpolicy_steps == 0 or config.generator.weight_update != "keep",
    )


def _no_drops() -> DropsState:
    return DropsState(groups=Fraction(0), ties=Fraction(0), columns=[], rewards=[])


def _counted(before: list[tuple[T, int]], more: Iterable[T]) -> list[tuple[T, int]]:
    return list((Counter(dict(before)) + Counter(more)).items())


def _one_reply(group: RolloutGroup) -> str:
    """Return one scored reply of a group with its reward and its row, as a part of a sentence."""
    rollout = next(
        (rollout for rollout in group.scored if rollout.turns or rollout.answer is not None), None
    )
    if rollout is None:
        return ""
    answered = (
        rollout.turns[-1].assistant_message["content"] if rollout.answer is None else rollout.answer
    )
    sample = group.data_sample
    row = f"example {sample.sample_id} ({text_of(sample.env_input, SHOWN_CHARACTERS)})"
    return f"; the last of them says {text_of(answered, SHOWN_CHARACTERS)!r} to {row} and earns {rollout.reward:.4g}"


def _shares(values: list[tuple[float, int]]) -> str:
    """The most common values, each with its share."""
    counts = Counter(dict(values))
    return ", ".join(
        f"{value:.4g} in {count / counts.total():.0%}" for value, count in counts.most_common(3)
    )
