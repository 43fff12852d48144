"""Counts the deaths of processes, and decides whether another restart is allowed."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.errors import RunError

deaths_logger = logging.getLogger(f"{__name__}.deaths")
"""Logger of deaths and hangs, which the report lists by this logger's name."""


class Restarts:
    """Deaths within a sliding window, by label.

    A label is the name of a role in metrics and in Monarch, such as "generator_1".
    """

    def __init__(self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic):
        """Allow ``max_restarts`` within ``window_s``.

        Args:
            clock: returns the time in seconds.
        """
        self.config = config
        self.counts: Counter[str] = Counter()
        """Number of restarts so far, by label."""
        self._clock = clock
        self._spawned: Counter[str] = Counter()
        self._deaths: dict[str, list[tuple[float, str]]] = {}
        """Time of each death within the window, and a sentence about it, by label."""

    def new_name(self, label: str) -> str:
        """Return a name that no process of the run ever had: the label and a number from 1.

        Monarch may report the death of an earlier process much later, by its name.
        """
        self._spawned[label] += 1
        return f"{label}_{self._spawned[label]}"

    def count(self, label: str, name: str, cause: str) -> str:
        """Count one more death.

        Args:
            name: name of the process that died, for people: "generator 1".

        Returns:
            Which of the allowed restarts this is, such as "1 of 3".

        Raises:
            RunError: no restart is left; names all deaths within the window.
        """
        now = self._clock()
        oldest = now - self.config.window_s
        sentence = f"{name} died: {cause}"
        deaths_logger.info("%s", sentence)
        deaths = [death for death in self._deaths.get(label, []) if death[0] > oldest]
        deaths.append((now, sentence))
        self._deaths[label] = deaths
        allowed = self.config.max_restarts
        if len(deaths) > allowed:
            causes = "; ".join(sentence for _, sentence in deaths)
            raise RunError(f"{causes} (supervision.max_restarts = {allowed})")
        self.counts[label] += 1
        return f"{len(deaths)} of {allowed}"
