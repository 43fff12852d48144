"""Stall detection: ends a run that generates and trains on nothing, with an error that names the causes, or as complete.

Groups whose rewards all tie have no learning signal. Before the first group with a signal that is a fault of the setup. Later
it is what success looks like: with a filter that drops such groups, a run on mastered tasks keeps no group at all.

Limits are of groups as the pacer counts them. A task without a barrier has groups of one rollout, and ``config.group_size`` of
these count as one (``groups_in_slot``): or one bad example, run 8 times, would be 8 groups in a row.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from torchtitan.experiments.rl.controller.first_failures import FirstFailures
from torchtitan.experiments.rl.controller.saved_state import DropsState, MasteryState, NoSignalState, StallState
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class NothingLeftToLearn(Exception):
    """Every task of the run is mastered. The run is complete before its last step."""


class Mastery:
    """Detects that every task is mastered.

    A task is mastered when ``limit`` of its groups in a row were dropped by filters because their rewards tie, after groups of
    it had a signal. Each task is counted on its own: a mastered one among others ends nothing, however many of its groups are
    dropped while another's are still running.
    """

    def __init__(self, limit: int, groups_in_slot: Mapping[str, int]):
        self._limit, self._groups_in_slot = limit, groups_in_slot
        self._ties: dict[str, list[float]] = {name: [] for name in groups_in_slot}
        """Mean rewards of the ties of each task since its last group with a signal."""
        self._signals: dict[str, tuple[int, float]] = {}
        """Groups with a signal, and the sum of their mean rewards."""

    def scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """A group was scored."""
        if signal:
            count, total = self._signals.get(group.task_name, (0, 0.0))
            self._signals[group.task_name] = (count + 1, total + _mean(group.rewards))
            self._ties[group.task_name] = []

    def dropped(self, columns: Iterable[str], group: RolloutGroup, *, signal: bool) -> bool:
        """A group was dropped; its rollouts ended in these ``columns`` of the ledger.

        Returns:
            Whether it was a tie of a task that had a signal before.

        Raises:
            NothingLeftToLearn: every task is mastered.
        """
        ends = [column for column in columns if not column.startswith("failed/")]
        tie = bool(ends) and not signal and all(column.startswith("filtered/") for column in ends)
        if not tie or group.task_name not in self._signals:
            return False
        self._ties[group.task_name].append(_mean(group.rewards))
        if all(len(ties) >= self._limit * self._groups_in_slot[name] for name, ties in self._ties.items()):
            self._end()
        return True

    def state(self) -> MasteryState:
        return MasteryState(ties={name: list(ties) for name, ties in self._ties.items()}, signals=dict(self._signals))

    def restore(self, state: MasteryState) -> None:
        self._ties = {name: list(state.ties.get(name, [])) for name in self._ties}
        self._signals = {name: signal for name, signal in state.signals.items() if name in self._ties}

    def _end(self) -> None:
        words = []
        for name, ties in self._ties.items():
            count, total = self._signals[name]
            words.append(f"{name} at reward {_mean(ties):.4g}, after groups with a learning signal at {total / count:.4g}")
        raise NothingLeftToLearn(
            f"nothing left to learn: in the last {self._limit} groups of each task all rewards tie ({'; '.join(words)})"
        )


class ConsecutiveDrops:
    """Counts groups that were dropped since one was kept, and the ledger columns of their rollouts."""

    def __init__(self, limit: int):
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """A group was kept."""
        self._groups, self._ties = Fraction(0), Fraction(0)
        self._columns: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()

    def add(self, columns: Iterable[str], group: RolloutGroup, *, share: Fraction, tie: bool = False) -> None:
        """A group was dropped; its rollouts ended in these ``columns`` of the ledger.

        Args:
            share: of a slot.
            tie: it was dropped because its rewards tie, in a task that had a signal before.

        Raises:
            RunError: ``limit`` groups in a row were dropped, at least half of them for other causes than ties, or ``limit`` of
                them for other causes.
        """
        self._groups += share
        self._ties += share * tie
        self._columns.update(columns)
        self._rewards.update(group.rewards)
        others = self._groups - self._ties
        if self._groups >= self._limit and (others >= self._limit or 2 * others >= self._groups):
            causes = ", ".join(f"{n} {column}" for column, n in self._columns.most_common())
            rewards = f"; rewards {_shares(self._rewards)}" if self._rewards else ""
            raise RunError(
                f"{float(self._groups):g} groups in a row gave nothing to train on (rollouts: {causes}{rewards}); see "
                "logs/controller.jsonl for each cause, or raise max_drops_in_a_row"
            )

    def state(self) -> DropsState:
        return DropsState(
            groups=str(self._groups),
            ties=str(self._ties),
            columns=list(self._columns.items()),
            rewards=list(self._rewards.items()),
        )

    def restore(self, state: DropsState) -> None:
        self._groups, self._ties = Fraction(state.groups), Fraction(state.ties)
        self._columns, self._rewards = Counter(dict(state.columns)), Counter(dict(state.rewards))


class NoSignalFromStart:
    """Detects a run in which no group has had a learning signal since the start: all rewards of each group tie.

    After the first group with a signal it detects nothing more: later ties mean that the policy has mastered the task.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._signal_seen = False
        self._groups = Fraction(0)
        self._mean_rewards: Counter[float] = Counter()

    def add(self, group: RolloutGroup, *, share: Fraction, signal: bool) -> None:
        """A group was scored, which holds this ``share`` of a slot.

        Raises:
            RunError: the first ``limit`` groups had no learning signal, this one included.
        """
        if self._signal_seen or not group.scored:
            return
        if signal:
            self._signal_seen = True
            return
        self._groups += share
        self._mean_rewards[_mean(group.rewards)] += 1
        if self._groups >= self._limit:
            raise RunError(
                f"none of the first {float(self._groups):g} groups teaches anything: all rollouts of a group got the same "
                f"reward ({_shares(self._mean_rewards)}), so every advantage is 0; look at the rubric, and whether the "
                "examples are too hard or too easy for this model (max_drops_in_a_row sets how many groups are waited for)"
            )

    def state(self) -> NoSignalState:
        return NoSignalState(
            signal_seen=self._signal_seen, groups=str(self._groups), mean_rewards=list(self._mean_rewards.items())
        )

    def restore(self, state: NoSignalState) -> None:
        self._signal_seen, self._groups = state.signal_seen, Fraction(state.groups)
        self._mean_rewards = Counter(dict(state.mean_rewards))


class StallDetectors:
    """All of them, for the groups of a run."""

    def __init__(self, limit: int, groups_in_slot: Mapping[str, int], note: Callable[[str], None] = lambda line: None):
        """
        Args:
            groups_in_slot: of each task.
            note: prints the first failure of each kind.
        """
        self._shares = {name: Fraction(1, groups) for name, groups in groups_in_slot.items()}
        self._failures = FirstFailures(note, limit)
        # A post-batch filter may drop every group that the pre-batch filters kept: its drops are counted on their own.
        self._drops, self._emptied = ConsecutiveDrops(limit), ConsecutiveDrops(limit)
        self._no_signal, self._mastery = NoSignalFromStart(limit), Mastery(limit, groups_in_slot)

    def arrived(self, group: RolloutGroup) -> None:
        """A group has arrived, scored or failed."""
        self._failures.arrived(group)

    def scored(self, group: RolloutGroup, *, signal: bool) -> None:
        """A group was scored.

        Raises:
            RunError: no group since the start had a signal.
        """
        self._no_signal.add(group, share=self._shares[group.task_name], signal=signal)
        self._mastery.scored(group, signal=signal)

    def kept(self) -> None:
        """Something of a group is left after the pre-batch filters."""
        self._drops.clear()

    def taken(self) -> None:
        """Something of a step's groups is left after the post-batch filters."""
        self._emptied.clear()

    def dropped(self, columns: Sequence[str], group: RolloutGroup, *, signal: bool, taken: bool) -> None:
        """A group was dropped; its rollouts ended in these ``columns`` of the ledger. ``taken``: a step had taken it.

        Raises:
            RunError: too many in a row, or the first groups of the run all failed in one way.
            NothingLeftToLearn: every task is mastered.
        """
        share = self._shares[group.task_name]
        if group.failure is not None:
            self._failures.group_failed(share)
        tie = self._mastery.dropped(columns, group, signal=signal)
        (self._emptied if taken else self._drops).add(columns, group, share=share, tie=tie)

    def state(self) -> StallState:
        """What a resumed run continues from."""
        return StallState(
            drops=self._drops.state(),
            emptied=self._emptied.state(),
            no_signal=self._no_signal.state(),
            mastery=self._mastery.state(),
        )

    def restore(self, state: StallState) -> None:
        """Continue from a checkpoint."""
        self._failures.resumed()
        self._drops.restore(state.drops)
        self._emptied.restore(state.emptied)
        self._no_signal.restore(state.no_signal)
        self._mastery.restore(state.mastery)


_NO_SIGNAL = ZeroAdvantage.Config().build()


def has_signal(group: RolloutGroup) -> bool:
    """Whether training on the group changes anything: some advantage is not 0, or some token feeds ce or ref_kl."""
    return bool(group.scored) and not all(_NO_SIGNAL.matches(group))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _shares(values: Counter[float]) -> str:
    """The most common values, each with its share."""
    return ", ".join(f"{value:.4g} in {count / values.total():.0%}" for value, count in values.most_common(3))
