"""Where every dispatched rollout ended. The columns of a task always sum to what it dispatched."""

from collections import Counter

from torchtitan.experiments.rl.errors import RunError


class Ledger:
    """Counts rollouts per task and column: ``trained``, ``filtered/<by>``, ``failed/<why>``, ``oversized``, ``untrained``
    (open when the run stopped). What is in no column is open: in flight or buffered."""

    def __init__(self):
        self._dispatched: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {}

    def dispatch(self, task: str, rollouts: int) -> None:
        self._dispatched[task] += rollouts

    def end(self, task: str, column: str, rollouts: int = 1) -> None:
        if rollouts:
            self._ended.setdefault(task, Counter())[column] += rollouts

    def open(self, task: str) -> int:
        return self._dispatched[task] - sum(self._ended.get(task, Counter()).values())

    def check(self, open_rollouts: dict[str, int]) -> None:
        """Compare what is in no column with what the caller sees open.

        Raises:
            RunError: a rollout was lost or counted twice.
        """
        for task, dispatched in self._dispatched.items():
            seen = open_rollouts.get(task, 0)
            if self.open(task) != seen:
                raise RunError(
                    f"the ledger of {task} does not balance: {dispatched} dispatched, {dict(self._ended.get(task, {}))} ended, "
                    f"{seen} open; a rollout was lost or counted twice"
                )

    def counts(self) -> dict[str, int]:
        """``<task>/<column>`` to rollouts, dispatched and open included."""
        counts = {}
        for task, dispatched in self._dispatched.items():
            counts[f"{task}/dispatched"] = dispatched
            counts |= {f"{task}/{column}": n for column, n in sorted(self._ended.get(task, Counter()).items())}
            counts[f"{task}/open"] = self.open(task)
        return counts
