"""Setting tasks up and closing them: each exactly once, none that was never set up, and no fault keeps others from closing."""

import asyncio
import sys
import time
from dataclasses import dataclass, field

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.envs import TalkingEnv
from tests.fakes.loops import Loop
from tests.fakes.tasks import StubTask
from tests.fakes.waiting import settle
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.config.run_config import UserCodeLimits
from torchtitan.experiments.rl.controller.closing import Closing
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.group_runner import TaskSet
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.task import Task

CALLS: list[tuple[str, str]] = []
"""Task and method, in the order called."""


class Rows(Dataset):
    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        broken: str = ""

    def __init__(self, config):
        super().__init__(config)
        act(config.broken)

    def __len__(self):
        act(self.config.broken.removeprefix("len "))
        return 3

    def __getitem__(self, index):
        return DataSample(sample_id=str(index), env_input=index)


def act(what):
    if what == "exits":
        sys.exit(3)
    if what == "raises":
        raise ValueError("no luck")
    if what == "hangs":
        time.sleep(1)


class NotedTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        algorithm: Algorithm.Config = field(default_factory=GRPO.Config)
        dataset: Dataset.Config = field(default_factory=Rows.Config)
        on_setup: str = ""
        on_close: str = ""

    def make_env(self, sample):
        return TalkingEnv()

    async def setup(self, policy):
        CALLS.append((self.name, "setup"))
        await asyncio.sleep(0)
        await misbehave(self.config.on_setup)
        await super().setup(policy)

    async def close(self):
        CALLS.append((self.name, "close"))
        await misbehave(self.config.on_close)


async def misbehave(what):
    if what == "hangs":
        await asyncio.sleep(30)
    act(what)


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def task_set(*, hangs=False, **configs) -> TaskSet:
    limit_s = 0.2 if hangs else 30.0
    limits = UserCodeLimits(
        call_timeout_s=limit_s, setup_timeout_s=limit_s, close_timeout_s=limit_s
    )
    return TaskSet(configs, ordered=OrderedCalls(timeout_s=limit_s), limits=limits)


CAUSES = {
    "exits": "SystemExit: 3",
    "raises": "ValueError: no luck",
    "hangs": "no answer within 0.2 s",
}


async def test_tasks_are_closed_once_each(renderer):
    tasks = task_set(a=NotedTask.Config(), b=NotedTask.Config())
    await tasks.build(context_of(renderer))
    await tasks.setup(None)
    assert await tasks.close() == [] and await tasks.close() == []
    assert sorted(CALLS) == [("a", "close"), ("a", "setup"), ("b", "close"), ("b", "setup")]


async def test_task_that_was_never_set_up_is_not_closed(renderer):
    tasks = task_set(a=NotedTask.Config(on_close="raises"))
    await tasks.build(context_of(renderer))
    assert await tasks.close() == [] and CALLS == []


@pytest.mark.parametrize("what", CAUSES)
async def test_setup_that_fails_names_its_task_and_only_those_set_up_are_closed(renderer, what):
    tasks = task_set(
        hangs=what == "hangs",
        a=NotedTask.Config(),
        b=NotedTask.Config(on_setup=what),
        c=NotedTask.Config(),
    )
    await tasks.build(context_of(renderer))
    with pytest.raises(RunError) as caught:
        await tasks.setup(None)
    assert str(caught.value).startswith(f"task 'b': NotedTask.setup: {CAUSES[what]}")
    assert await tasks.close() == []
    assert CALLS == [("a", "setup"), ("b", "setup"), ("a", "close")]


@pytest.mark.parametrize("what", CAUSES)
async def test_close_that_fails_is_reported_and_the_others_are_closed(renderer, what):
    tasks = task_set(hangs=what == "hangs", a=NotedTask.Config(on_close=what), b=NotedTask.Config())
    await tasks.build(context_of(renderer))
    await tasks.setup(None)
    (fault,) = await tasks.close()
    assert fault.startswith(f"task 'a': NotedTask.close: {CAUSES[what]}")
    assert ("b", "close") in CALLS


@pytest.mark.parametrize("what", CAUSES)
async def test_dataset_that_fails_while_it_is_built_names_its_task(renderer, what):
    tasks = task_set(
        hangs=what == "hangs",
        a=NotedTask.Config(),
        b=NotedTask.Config(dataset=Rows.Config(broken=what)),
    )
    with pytest.raises(RunError) as caught:
        await tasks.build(context_of(renderer))
    assert str(caught.value).startswith("task 'b' can't be built: ") and CAUSES[what] in str(
        caught.value
    )


async def test_dataset_whose_length_fails_is_named(renderer):
    tasks = task_set(b=NotedTask.Config(dataset=Rows.Config(broken="len raises")))
    with pytest.raises(
        RunError,
        match=r"^task 'b' can't be built: dataset = 'Rows': .*: ValueError: no luck \(.*:\d+\)$",
    ):
        await tasks.build(context_of(renderer))


async def test_fault_of_one_keeps_no_other_from_closing_and_the_last_built_closes_first():
    closing, closed = Closing(), []

    async def close(name, what=""):
        closed.append(name)
        await misbehave(what)

    closing.push("one", lambda: close("one"))
    closing.push("two", lambda: close("two", "exits"))
    closing.push("three", lambda: close("three", "hangs"), timeout_s=0.1)
    closing.push("four", lambda: close("four", "raises"))
    await closing.close()
    await closing.close()
    assert closed == ["four", "three", "two", "one"]
    wanted = [
        "closing four: ValueError: no luck",
        "closing three: no answer within 0.1 s; it waits in misbehave",
        "closing two: SystemExit: 3",
    ]
    assert [str(fault).partition(" (")[0] for fault in closing.faults] == wanted


async def test_rollout_loop_with_an_unbalanced_ledger_closes_all_and_says_so_once():
    loop = Loop(StubTask(lambda number: [0.0, 1.0], held=True))
    loop.fill()
    await settle()
    loop.ledger.dispatch("stub", ["stub-99/0"], version=0)
    with pytest.raises(RunError, match="the ledger does not balance: lost .'stub-99/0'."):
        await loop.close()
    assert loop.ledger._file is None and not loop._running
    assert loop.ledger.counts()["stub/untrained"] == 8


class HangingRubric(Rubric):
    async def setup(self, policy):
        await asyncio.sleep(30)


async def test_setup_that_hangs_names_the_part_that_hangs(renderer):
    tasks = task_set(hangs=True, a=NotedTask.Config(rubric=HangingRubric.Config()))
    await tasks.build(context_of(renderer))
    with pytest.raises(RunError) as caught:
        await tasks.setup(None)
    wanted = "task 'a': NotedTask.setup: no answer within 0.2 s; it waits in HangingRubric.setup (test_closing.py:"
    assert str(caught.value).startswith(wanted)
