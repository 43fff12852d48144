"""Stall detection: ends a run that generates and learns nothing, with an error that says why."""

from collections import Counter
from collections.abc import Iterable

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class ConsecutiveDrops:
    """Counts groups that were dropped since one was kept, and the ledger columns of their rollouts."""

    def __init__(self, limit: int):
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """A group was kept."""
        self._groups = 0
        self._columns: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()

    def add(self, columns: Iterable[str], group: RolloutGroup) -> None:
        """A group was dropped; its rollouts ended in these ``columns`` of the ledger.

        Raises:
            RunError: ``limit`` groups in a row were dropped.
        """
        self._groups += 1
        self._columns.update(columns)
        self._rewards.update(group.rewards)
        if self._groups >= self._limit:
            causes = ", ".join(f"{n} {column}" for column, n in self._columns.most_common())
            rewards = f"; rewards {_shares(self._rewards)}" if self._rewards else ""
            raise RunError(
                f"{self._groups} groups in a row gave nothing to train on (rollouts: {causes}{rewards}); see "
                "logs/controller.jsonl for each cause, or raise max_drops_in_a_row"
            )


class NoSignalFromStart:
    """Detects a run in which no group has had a learning signal since the start: all rewards of each group tie.

    After the first group with a signal it detects nothing more: later ties mean that the policy has mastered the task.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._signal_seen = False
        self._matcher = ZeroAdvantage.Config().build()
        self._mean_rewards: Counter[float] = Counter()

    def add(self, group: RolloutGroup) -> None:
        """A group was scored.

        Raises:
            RunError: the first ``limit`` groups had no learning signal, this one included.
        """
        if self._signal_seen or not group.scored:
            return
        if not all(self._matcher.matches(group)):
            self._signal_seen = True
            return
        self._mean_rewards[sum(group.rewards) / len(group.rewards)] += 1
        if self._mean_rewards.total() >= self._limit:
            raise RunError(
                f"none of the first {self._mean_rewards.total()} groups teaches anything: all rollouts of a group got the same "
                f"reward ({_shares(self._mean_rewards)}), so every advantage is 0; look at the rubric, and whether the "
                "examples are too hard or too easy for this model (max_drops_in_a_row says how many groups are waited for)"
            )


def _shares(values: Counter[float]) -> str:
    """The most common values, each with its share."""
    return ", ".join(f"{value:.4g} in {count / values.total():.0%}" for value, count in values.most_common(3))
