"""When a run is given up, in words: nothing it generates can be trained on, or teaches anything."""

from collections import Counter
from collections.abc import Iterable

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class DropsInARow:
    """Groups that left with nothing to train on since one was kept, and where their rollouts went."""

    def __init__(self, limit: int):
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """A group was kept."""
        self._groups = 0
        self._columns: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()

    def add(self, columns: Iterable[str], group: RolloutGroup) -> None:
        """A group left; ``columns`` of the ledger are where its rollouts ended.

        Raises:
            RunError: these are too many.
        """
        self._groups += 1
        self._columns.update(columns)
        self._rewards.update(rollout.reward for rollout in group.scored)
        if self._groups >= self._limit:
            causes = ", ".join(f"{n} {column}" for column, n in self._columns.most_common())
            rewards = f"; rewards {_shares(self._rewards)}" if self._rewards else ""
            raise RunError(
                f"{self._groups} groups in a row gave nothing to train on (rollouts: {causes}{rewards}); see "
                "logs/controller.jsonl for each cause, or raise max_drops_in_a_row"
            )


class IdleStart:
    """Notices a run whose every reward ties from its first group on: it would take all its steps and learn nothing.

    Once a group has taught something, ties are what success looks like.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._ended = False
        self._matcher = ZeroAdvantage.Config().build()
        self._mean_rewards: Counter[float] = Counter()

    def add(self, group: RolloutGroup) -> None:
        """A group was scored.

        Raises:
            RunError: it and all before it teach nothing, and these are too many.
        """
        if self._ended or not group.scored:
            return
        if not all(self._matcher.matches(group)):
            self._ended = True
            return
        self._mean_rewards[sum(rollout.reward for rollout in group.scored) / len(group.scored)] += 1
        if self._mean_rewards.total() >= self._limit:
            raise RunError(
                f"none of the first {self._mean_rewards.total()} groups teaches anything: all rollouts of a group got the same "
                f"reward ({_shares(self._mean_rewards)}), so every advantage is 0; look at the rubric, and whether the "
                "examples are too hard or too easy for this model (max_drops_in_a_row says how many groups are waited for)"
            )


def _shares(values: Counter[float]) -> str:
    """The commonest values, each with its share."""
    return ", ".join(f"{value:.4g} in {count / values.total():.0%}" for value, count in values.most_common(3))
