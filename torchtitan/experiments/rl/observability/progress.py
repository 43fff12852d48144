"""How far a run is, and about how long the rest of it takes: a line of text."""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

RECENT = 20
"""Steps that the estimate is made of: answers grow longer as a policy learns, so older ones say little."""
BASIS = 3
"""Steps before there is an estimate."""
BAR = 20
"""Columns of the bar."""


class Progress:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """``clock`` gives seconds."""
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._steps = self._total = 0
        self._last_at: float | None = None

    def begin(self, steps_done: int, total_steps: int) -> None:
        """Training begins, or begins again after ``steps_done`` steps. Its first step compiles and warms up: it is left out."""
        self._steps, self._total, self._last_at = steps_done, total_steps, None

    def step(self, step: int) -> None:
        """This step has ended."""
        now = self._clock()
        if self._last_at is not None:
            self._durations.append(now - self._last_at)
        self._steps, self._last_at = step, now

    def step_s(self) -> float | None:
        """Median of the recent steps, in which evaluations and checkpoints do not count; None before there is a basis."""
        return median(self._durations) if len(self._durations) >= BASIS else None

    def seconds_left(self) -> float | None:
        """None before there is a basis."""
        step_s = self.step_s()
        if step_s is None or self._last_at is None:
            return None
        # The step that is under way may take longer than the median: the others are still to come.
        under_way = max(0.0, step_s - (self._clock() - self._last_at))
        left = self._total - self._steps
        return under_way + step_s * (left - 1) if left > 0 else 0.0

    def line(self) -> str:
        """At most 79 columns; "" before training begins."""
        if not self._total:
            return ""
        done = BAR * min(self._steps, self._total) // self._total
        line = f"{f'{self._steps}/{self._total}':>11} [{'#' * done}{'-' * (BAR - done)}]"
        step_s, left_s = self.step_s(), self.seconds_left()
        if step_s is not None and left_s is not None and self._steps < self._total:
            line += f"  {step_s:.{'2g' if step_s < 10 else '0f'}} s a step, about {_rounded(left_s)} left"
        return line


def _rounded(seconds: float) -> str:
    if seconds < 60:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    hours = minutes // 60
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
