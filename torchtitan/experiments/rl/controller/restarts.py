"""How often each part of a run has died, and whether it may be made again. Outlives what it counts: one for each command."""

import logging
import time
from collections import Counter

from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.errors import RunError

logger = logging.getLogger(__name__)


class Restarts:
    def __init__(self, config: SupervisionConfig):
        self._config = config
        self.counts: Counter[str] = Counter()
        """How often each part was made again, by its label in metrics."""
        self._spawned: Counter[str] = Counter()
        self._deaths: dict[str, list[tuple[float, str, str]]] = {}
        """When, which process and why, by the label of the part; of the last ``window_s``."""

    def incarnation(self, label: str) -> int:
        """The number of the part's next process, from 1 on. Monarch may report the death of an earlier one much later."""
        self._spawned[label] += 1
        return self._spawned[label]

    def count(self, label: str, process: str, cause: str) -> str:
        """One more death of the part ``label``.

        Args:
            process: what people call the process that ended: "generator 1".

        Returns:
            How many of the restarts that are allowed this is, such as "1 of 3".

        Raises:
            RunError: it may not be made again.
        """
        now = time.monotonic()
        logger.info("%s died: %s", process, cause)
        before = [death for death in self._deaths.get(label, []) if death[0] > now - self._config.window_s]
        deaths = self._deaths[label] = [*before, (now, process, cause)]
        allowed = self._config.max_restarts
        if len(deaths) > allowed:
            one_process = len({process for _, process, _ in deaths}) == 1
            who = process if one_process else label.replace("_", " ")
            causes = "; ".join(cause if one_process else f"{process}: {cause}" for _, process, cause in deaths)
            more = f" {len(deaths)} times in {now - deaths[0][0]:.0f} s" if len(deaths) > 1 else ""
            raise RunError(f"{who} died{more}: {causes} (supervision.max_restarts = {allowed})")
        self.counts[label] += 1
        return f"{len(deaths)} of {allowed}"
