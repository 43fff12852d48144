"""Ends a run that goes on for nothing: its rollouts all fail, or its groups teach nothing.

A group whose rewards all tie has no learning signal. Before the first group with a signal that is a
fault of the setup. Later it is what success looks like: with a filter that drops such groups, a run
on mastered tasks keeps no group at all.

Limits count groups. A task that does not compare its rollouts has groups of one, and those that one
pick of the task mix starts count as one group together (``groups_per_pick``). Otherwise one bad
example, run 8 times, would be 8 groups in a row.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from statistics import fmean
from typing import TypeVar

from torchtitan.experiments.rl.errors import RunError, kind_of
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.saved_state import (
    DropsState,
    MasteryState,
    NoSignalState,
    StallState,
)
from torchtitan.experiments.rl.printable import one_sentence, text_of
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics.rubric import completion_of
from torchtitan.experiments.rl.tasks.group_run import prompts_cure, several_prompts

T = TypeVar("T")
Note = Callable[[str, str], None]
"""Function that prints a line, and under it a traceback, which may be empty."""

FEW_GROUPS = 8
"""Number of first groups after which a run ends if all of them failed in one way."""
MOST_KINDS = 20
"""Maximum number of distinct failures to print."""
SHOWN_CHARACTERS = 80
"""Maximum length of a reply, and of a row, in an error: its cure follows, and must be read."""


class FirstFailures(RunEvents):
    """Observer that prints the first failure of each kind.

    Failures are of one kind if they have the same task, and the same cause but for numbers.
    """

    def __init__(self, note: Note, *, log: str = "logs/controller.jsonl"):
        """Print by ``note``.

        Args:
            log: file of this process's log, in the run's folder.
        """
        self._note = note
        self._log = log
        self._printed: set[tuple[str, str]] = set()
        """Kinds of which the first failure was printed."""

    def group_arrived(self, group: RolloutGroup) -> None:
        """Print those failures of the group's rollouts that are the first of their kind."""
        self._print_new(group, "a rollout")

    def validation_arrived(self, group: RolloutGroup) -> None:
        """Print those failures of an evaluation's group that are the first of their kind."""
        self._print_new(group, "a rollout of the validation")

    def _print_new(self, group: RolloutGroup, what: str) -> None:
        for rollout, kind in _failures(group):
            if kind in self._printed or len(self._printed) >= MOST_KINDS:
                continue
            self._printed.add(kind)
            cause = _cause(rollout)
            line = f"{what} failed: {cause}; the first of its kind, {self._log} has all"
            self._note(line, rollout.traceback)


class SeveralPrompts(RunEvents):
    """Observer that warns, once a task, of a group whose rollouts were asked different things."""

    def __init__(self, note: Note):
        self._note = note
        self._tasks: set[str] = set()
        """Names of the tasks that were warned of."""

    def group_arrived(self, group: RolloutGroup) -> None:
        name = group.task_name
        if name in self._tasks or not group.costs.get(several_prompts(name)):
            return
        self._tasks.add(name)
        self._note(
            f"warning: the rollouts of group {group.group_id} were asked different things, and are "
            f"compared with each other as if they were not: {prompts_cure(name)}",
            "",
        )


class StallDetectors(FirstFailures):
    """Observer that ends a run in which nothing is left to train on.

    The run ends with an error that names the causes if

    * its first groups all failed, in one way;
    * ``limit`` groups in a row are dropped. What post-batch filters empty is counted on its own,
      because they may drop every group that the others kept. Ties of mastered tasks count only
      beside at least as many drops for other causes;
    * none of its first ``limit`` groups has a learning signal.

    It ends as complete if every task is mastered: after groups with a signal, the last ``limit``
    groups of each were dropped because their rewards tie. Each task is counted on its own, so one
    that is mastered ends nothing while others learn.
    """

    def __init__(
        self,
        limit: int,
        groups_per_pick: Mapping[str, int],
        note: Note = lambda line, traceback: None,
    ):
        """Have seen no group yet.

        Args:
            limit: number of groups that are waited for.
            groups_per_pick: number of groups that each task starts when the mix picks it.
            note: prints the first failure of each kind.
        """
        super().__init__(note)
        self._limit = limit
        self._groups_per_pick = groups_per_pick
        self._first_failed: Fraction | None = Fraction(0) if limit > FEW_GROUPS else None
        """Number of first groups that failed; None once one did not, or if ``limit`` is smaller."""
        self._causes: dict[tuple[str, str], str] = {}
        """First failure of each kind that a group to train on had, in words."""
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

    def state(self) -> StallState:
        """Return what a resumed run continues from."""
        return copy.deepcopy(self._state)

    def restore(self, state: StallState) -> None:
        """Continue from a checkpoint. The groups to come are not the first of the run."""
        self._state = state
        self._first_failed = None

    def group_arrived(self, group: RolloutGroup) -> None:
        """Print new failures, and note a group that did not fail."""
        super().group_arrived(group)
        if group.failure is None:
            self._first_failed = None
        if self._first_failed is not None:
            for rollout, kind in _failures(group):
                self._causes.setdefault(kind, _cause(rollout))

    def group_scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """Count a group with or without a learning signal.

        Raises:
            RunError: the first ``limit`` groups had no learning signal, this one included.
        """
        no_signal = self._state.no_signal
        if signal:
            no_signal.signal_seen = True
            mastery = self._state.mastery
            count, total = mastery.signals.get(group.task_name, (0, 0.0))
            mastery.signals[group.task_name] = (count + 1, total + fmean(group.rewards))
            mastery.ties[group.task_name] = []
            return
        if not group.scored or no_signal.signal_seen:
            return
        no_signal.groups += self._share(group)
        no_signal.mean_rewards = _counted(no_signal.mean_rewards, [fmean(group.rewards)])
        self._rollouts += len(group.rollouts)
        self._cut_off += sum(rollout.status.is_truncated() for rollout in group.rollouts)
        if no_signal.groups >= self._limit:
            raise RunError(
                f"none of the first {float(no_signal.groups):g} groups teaches anything: all "
                "rollouts of a group got the same reward "
                f"({_shares(no_signal.mean_rewards)}), so every advantage is 0; "
                f"{self._cut_off / self._rollouts:.0%} of the rollouts were cut off by a limit"
                f"{_one_reply(group)}; {self._no_signal_cure()} "
                "(max_drops_in_a_row sets how many groups are waited for)"
            )

    def group_kept(self) -> None:
        """Begin to count drops in a row anew."""
        self._state.drops = _no_drops()

    def groups_taken(self) -> None:
        """Begin to count anew what post-batch filters empty."""
        self._state.emptied = _no_drops()

    def group_dropped(
        self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool
    ) -> None:
        """Count a group that was dropped.

        Raises:
            RunError: too many in a row, or the first groups of the run all failed in one way.
            NothingLeftToLearn: every task is mastered.
        """
        self._count_first_failure(group)
        tie = not signal and self._is_tie_of_mastered(columns, group)
        if tie:
            ties = self._state.mastery.ties.setdefault(group.task_name, [])
            ties.append(fmean(group.rewards))
            del ties[: -self._limit * self._groups_per_pick[group.task_name]]
            self._end_if_all_mastered()
        share = self._share(group)
        drops = self._state.emptied if taken else self._state.drops
        drops.groups += share
        drops.ties += share * tie
        drops.columns = _counted(drops.columns, columns)
        drops.rewards = _counted(drops.rewards, group.rewards)
        others = drops.groups - drops.ties
        enough_without_ties = others >= self._limit
        enough_beside_ties = 2 * others >= drops.groups
        if drops.groups >= self._limit and (enough_without_ties or enough_beside_ties):
            causes = ", ".join(
                f"{n} {column}" for column, n in Counter(dict(drops.columns)).most_common()
            )
            rewards = f"; rewards {_shares(drops.rewards)}" if drops.rewards else ""
            raise RunError(
                f"{float(drops.groups):g} groups in a row gave nothing to train on (rollouts: "
                f"{causes}{rewards}); see logs/controller.jsonl for each cause, or raise "
                "max_drops_in_a_row"
            )

    def _share(self, group: RolloutGroup) -> Fraction:
        """Return what the group counts: a share of one if its pick started several."""
        return Fraction(1, self._groups_per_pick[group.task_name])

    def _count_first_failure(self, group: RolloutGroup) -> None:
        """Raise if the group is the last of the first groups, which all failed in one way."""
        if group.failure is None or self._first_failed is None:
            return
        self._first_failed += self._share(group)
        if self._first_failed < FEW_GROUPS:
            return
        self._first_failed = None
        if len(self._causes) == 1:
            (cause,) = self._causes.values()
            raise RunError(f"the first {FEW_GROUPS} groups all failed in the same way: {cause}")

    def _is_tie_of_mastered(self, columns: Iterable[str], group: RolloutGroup) -> bool:
        """Return True if a filter dropped the group for its tie, in a task that had a signal."""
        ends = [column for column in columns if not column.startswith("failed/")]
        all_filtered = bool(ends) and all(end.startswith("filtered/") for end in ends)
        return all_filtered and group.task_name in self._state.mastery.signals

    def _end_if_all_mastered(self) -> None:
        """Raise NothingLeftToLearn if the last ``limit`` groups of every task tie."""
        mastery = self._state.mastery
        mastered = all(
            len(mastery.ties.get(name, [])) >= self._limit * groups
            for name, groups in self._groups_per_pick.items()
        )
        if mastered:
            words = [
                f"{name} at reward {fmean(mastery.ties[name]):.4g}, after groups with a learning "
                f"signal at {total / count:.4g}"
                for name, (count, total) in mastery.signals.items()
            ]
            raise NothingLeftToLearn(
                f"nothing left to learn: in the last {self._limit} groups of each task all rewards "
                f"tie ({'; '.join(words)})"
            )

    def _no_signal_cure(self) -> str:
        if 2 * self._cut_off > self._rollouts:
            return (
                "raise sampling.max_tokens or env.max_rollout_tokens, and if replies should have "
                "ended before, see that the model's end of a turn is among sampling.stop_token_ids"
            )
        return (
            "look at the rubric, and whether the examples are too hard or too easy for this model"
        )


def _failures(group: RolloutGroup) -> Iterable[tuple[Rollout, tuple[str, str]]]:
    """Yield each rollout of the group that failed, with the kind of its failure."""
    for rollout in group.rollouts:
        if rollout.reward is None and rollout.error:
            yield rollout, (group.task_name, kind_of(rollout.error))


def _cause(rollout: Rollout) -> str:
    return f"{one_sentence(str(rollout.error))} (task {rollout.task_name})"


def _no_drops() -> DropsState:
    return DropsState(groups=Fraction(0), ties=Fraction(0), columns=[], rewards=[])


def _counted(before: list[tuple[T, int]], more: Iterable[T]) -> list[tuple[T, int]]:
    """Return the counts of ``before`` and of ``more`` together."""
    return list((Counter(dict(before)) + Counter(more)).items())


def _one_reply(group: RolloutGroup) -> str:
    """Return one scored reply of a group with its reward and its row, as a part of a sentence."""
    rollout = next(
        (rollout for rollout in group.scored if rollout.turns or rollout.answer is not None), None
    )
    if rollout is None:
        return ""
    answered = completion_of(rollout)
    sample = group.data_sample
    row = f"example {sample.sample_id} ({text_of(sample.env_input, SHOWN_CHARACTERS)})"
    reply = text_of(answered, SHOWN_CHARACTERS)
    return f"; the last of them says {reply!r} to {row} and earns {rollout.reward:.4g}"


def _shares(values: list[tuple[float, int]]) -> str:
    """Return the most common values, each with its share, as a part of a sentence."""
    counts: Counter[str] = Counter()
    for value, count in values:
        counts[f"{value:.4g}"] += count  # which joins those that rounding tells apart
    return ", ".join(
        f"{value} in {count / counts.total():.0%}" for value, count in counts.most_common(3)
    )
