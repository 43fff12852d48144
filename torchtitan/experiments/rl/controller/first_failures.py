"""The first failure of each kind, on the terminal; and the end of a run whose first groups all fail in one way."""

import re
from collections.abc import Callable
from fractions import Fraction

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.printable import one_sentence
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

FEW_GROUPS = 8
"""The first groups of a run. If all of them fail in one way, more would too."""
MOST_KINDS = 20
"""That are printed."""
_VARIES = re.compile(r"0x[0-9a-f]+|\d+")


class FirstFailures:
    """Failures are of one kind if their task is the same, and their causes but for numbers."""

    def __init__(self, note: Callable[[str], None], limit: int = 0, *, log: str = "logs/controller.jsonl"):
        """
        Args:
            note: prints a line.
            limit: groups in a row that end the run whatever they failed of.
            log: file of this process's log, in the run's folder.
        """
        self._note, self._log, self._few = note, log, FEW_GROUPS if limit > FEW_GROUPS else None
        self._kinds: dict[tuple[str, str], str] = {}
        """The first cause of each."""
        self._failed = Fraction(0)
        self._began = False

    def arrived(self, group: RolloutGroup) -> None:
        """A group has arrived: print the failures of its rollouts that are the first of their kind."""
        for rollout in group.rollouts:
            if rollout.reward is None and rollout.error:
                kind = (group.task_name, _VARIES.sub("#", rollout.error))
                if kind not in self._kinds and len(self._kinds) < MOST_KINDS:
                    self._kinds[kind] = cause = f"{one_sentence(rollout.error)} (task {group.task_name})"
                    self._note(f"a rollout failed: {cause}; the first of its kind, {self._log} has all")
        if group.failure is None:
            self._began = True

    def group_failed(self, share: Fraction = Fraction(1)) -> None:
        """A group was dropped because its rollouts failed. It held this ``share`` of a slot.

        Raises:
            RunError: the first groups of the run all failed, in one way.
        """
        before, self._failed = self._failed, self._failed + share
        few_now = self._few is not None and before < self._few <= self._failed
        if few_now and not self._began and len(self._kinds) == 1:
            (cause,) = self._kinds.values()
            raise RunError(f"the first {self._few} groups all failed in the same way: {cause}")

    def resumed(self) -> None:
        """The groups to come are not the run's first."""
        self._began = True
