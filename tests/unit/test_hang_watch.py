"""Processes that hang are found and ended, on a clock that the test moves."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.fakes.clock import Clock
from tests.fakes.waiting import iterations, until
from torchtitan.experiments.rl.config.run_config import SupervisionConfig
from torchtitan.experiments.rl.fleet import hangs as hang_watch
from torchtitan.experiments.rl.fleet.hangs import HangWatch, is_stopped, stacks_of
from torchtitan.experiments.rl.process.heartbeat import Heartbeat, Pulse
from torchtitan.experiments.rl.process.lifetime import Lifetime

CONFIG = SupervisionConfig(stall_s=20.0, slow_work_s=200.0)


@pytest.fixture
def clock(monkeypatch):
    """Looks follow each other at once, and each moves the clock by a second."""
    monkeypatch.setattr(hang_watch, "LOOK_S", 0.0)
    return Clock(step=1.0)


class Process:
    """Gives the pulse that the test sets; none while it is silent."""

    def __init__(self, clock):
        self.clock, self.silent = clock, False
        self.doing, self.since, self.slow = "", 0.0, False
        self.pulse = SimpleNamespace(choose=self.answer)

    async def answer(self) -> Pulse:
        while self.silent:
            await asyncio.sleep(0)
        return Pulse(doing=self.doing, seconds=self.clock.now - self.since, slow=self.slow)


@pytest.fixture
async def watched(clock):
    process, life, lines = Process(clock), Lifetime("generator 1"), []
    watch = HangWatch(CONFIG, on_hang=lines.append, clock=clock)
    running = asyncio.create_task(watch.watch(process, life, stacks=""))
    yield process, life, lines
    running.cancel()
    await asyncio.wait({running})


async def test_a_thread_that_is_at_one_step_for_too_long_ends_its_process(watched, clock):
    process, life, lines = watched
    await until(lambda: clock.now > 100)
    assert life.cause is None, "it waits for work"
    process.doing, process.since = "a step of the engine", clock.now
    await until(lambda: life.cause is not None)
    assert 20 < clock.now - process.since < 25
    assert life.cause.startswith("hung: a step of the engine for 2") and lines[0].startswith(
        "generator 1 hangs: a step of"
    )


async def test_work_that_may_take_long_has_the_longer_limit(watched, clock):
    process, life, _ = watched
    process.doing, process.slow, process.since = "building the engine", True, clock.now
    await until(lambda: clock.now - process.since > 190)
    assert life.cause is None
    await until(lambda: life.cause is not None)
    assert clock.now - process.since > 200


async def test_a_process_that_does_not_answer_ends(watched, clock):
    process, life, lines = watched
    await until(lambda: clock.now > 10)
    process.silent, silent_since = True, clock.now
    await until(lambda: life.cause is not None)
    assert 20 < clock.now - silent_since < 30 and life.cause.startswith("hung: no answer for 2")
    said, hangs = lines
    assert (
        said == "generator 1 has not answered for 16 s: its host is busy, stopped or out of reach"
    )
    assert "no stack could be had" in hangs


async def test_a_silence_is_said_once_and_its_end_too(watched, clock):
    process, life, lines = watched
    await until(lambda: clock.now > 5)
    process.silent = True
    await until(lambda: lines)
    await iterations(2)
    process.silent = False
    await until(lambda: len(lines) > 1)
    assert life.cause is None and len(lines) == 2
    assert lines[0].startswith("generator 1 has not answered for ") and lines[1].startswith(
        "generator 1 answers again after "
    )


async def test_a_pause_of_everything_is_no_hang(watched, clock):
    process, life, _ = watched
    await until(lambda: clock.now > 5)
    process.doing, process.since, clock.step = "a step of the engine", clock.now, 0.1
    for _ in range(3):  # a laptop sleeps, three times
        clock.now += 1000.0
        await iterations(20)
        assert life.cause is None
        process.since = clock.now - 1000.0  # the step takes longer by as much
        await iterations(20)
    anew = clock.now
    await until(lambda: life.cause is not None)
    assert clock.now - anew < 30, "it hangs all the same, and is noticed as long after the pause"


def test_a_heartbeat_says_what_is_done_and_since_when(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(
        "torchtitan.experiments.rl.process.heartbeat.time.monotonic", lambda: now[0]
    )
    heartbeat = Heartbeat()
    assert heartbeat.pulse() == Pulse(doing="", seconds=0.0, slow=False)
    with heartbeat.work("a step", slow=True):
        now[0] += 3
        assert heartbeat.pulse() == Pulse(doing="a step", seconds=3.0, slow=True)
        heartbeat.beat()
        now[0] += 1
        assert heartbeat.pulse() == Pulse(doing="a step", seconds=1.0, slow=True)
        heartbeat.beat("a load", slow=False)
        assert heartbeat.pulse() == Pulse(doing="a load", seconds=0.0, slow=False)
    assert heartbeat.pulse().doing == ""


SLEEPER = """
import faulthandler, os, signal, time
file = os.memfd_create("stacks")
faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
print(f"/proc/{os.getpid()}/fd/{file}", flush=True)
def stuck():
    time.sleep(600)
stuck()
"""


async def test_stacks_are_had_of_a_process_that_runs_and_not_of_one_that_is_stopped(monkeypatch):
    monkeypatch.setattr(hang_watch, "STACK_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    try:
        path, life = process.stdout.readline().strip(), Lifetime("generator 1")
        life.watch(process.pid)
        text = ""
        while "stuck" not in text:
            text = await stacks_of(life, path)
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: is_stopped(process.pid))
        assert await stacks_of(life, path) == ""
        life.kill("hung")
        assert await asyncio.to_thread(process.wait) == -9, "a stopped process can be killed"
    finally:
        process.kill()
        process.wait()
