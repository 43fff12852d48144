"""What is said while a run waits: when, what, and for how long. The clock here is the test's own."""

import pytest

from torchtitan.experiments.rl.observability.console import Waits


class Hours:
    """A clock that moves a second at a time, and asks each second whether a line is due."""

    def __init__(self):
        self.now, self.said = 100.0, []
        self.waits = Waits(lambda: self.now)

    def until(self, seconds):
        while self.now < 100.0 + seconds:
            self.now += 1
            if self.waits.due():
                self.said.append((self.now - 100.0, self.waits.line()))


def test_a_long_wait_is_said_after_5_15_30_and_60_seconds_and_then_each_minute():
    hours = Hours()
    hours.waits.begin("trainer to start")
    hours.until(200)
    assert [at for at, _ in hours.said] == [5.0, 15.0, 30.0, 60.0, 120.0, 180.0]
    assert hours.said[1][1] == "waiting for trainer to start (15 s)"


def test_what_is_there_is_not_waited_for_and_what_is_not_has_its_own_seconds():
    hours = Hours()
    hours.waits.begin("trainer to start")
    hours.until(4)
    hours.waits.begin("generator 0 to start")
    hours.until(5)
    hours.waits.end("trainer to start")
    hours.until(15)
    assert [line for _, line in hours.said] == [
        "waiting for trainer to start (5 s), generator 0 to start (1 s)",
        "waiting for generator 0 to start (11 s)",
    ]


def test_nothing_is_said_once_nothing_is_waited_for():
    hours = Hours()
    with pytest.raises(KeyError), hours.waits.wait("tasks to be set up"):
        raise KeyError
    hours.waits.end("what was never begun")
    hours.until(600)
    assert hours.said == [] and hours.waits.line() == ""
    hours.waits.begin("the first step")
    hours.until(605)
    assert [line for _, line in hours.said] == ["waiting for the first step (5 s)"], (
        "each wait begins with the first line"
    )


def test_many_waits_are_one_line_of_80_columns():
    hours = Hours()
    for index in range(32):
        hours.waits.begin(f"generator {index} to start")
    assert (
        hours.waits.line()
        == "waiting for generator 0 to start (0 s), generator 1 to start (0 s) and 30 more"
    )
