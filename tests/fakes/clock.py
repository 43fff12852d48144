"""A clock that a test moves."""


class Clock:
    """Clock that shows ``now``. Each reading first moves it by ``step`` seconds."""

    def __init__(self, now: float = 0.0, *, step: float = 0.0):
        self.now = now
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
