"""User code that the rollout loop calls: a fault ends the run with one error that names its owner, and the ledger balances."""

import asyncio
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.fakes.datasets import Numbers
from tests.fakes.loops import Loop, ids
from tests.fakes.tasks import StubTask
from tests.fakes.waiting import LIMIT_S
from torchtitan.experiments.rl.ask.ordered import OrderedCalls
from torchtitan.experiments.rl.data import sampler as sampler_module
from torchtitan.experiments.rl.data.difficulty_pool import DifficultyPool
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor
from torchtitan.experiments.rl.data.task_mix import TaskMix, WeightedRoundRobin
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.selection import Selection
from torchtitan.experiments.rl.rollouts.filters import Filter
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks.examples.sum_digits import SumDigitsDataset


def exits():
    sys.exit(3)


def interrupts():
    raise KeyboardInterrupt


def raises():
    raise KeyError(2)


def cancels():
    raise asyncio.CancelledError


def hangs():
    time.sleep(1)


FAULTS = {
    exits: "SystemExit: 3",
    interrupts: "KeyboardInterrupt",
    raises: "KeyError: 2",
    cancels: "CancelledError",
    hangs: "no answer within 0.2 s",
}


class BadSampler(SampleStrategy):
    def next(self):
        return self.what()


class BadObserver(ShuffledCursor):
    def observe(self, group):
        return self.what()


class BadMix(TaskMix):
    def next(self):
        return self.what()


class BadMixObserver(TaskMix):
    def next(self):
        return "stub"

    def observe(self, group):
        return self.what()


class BadFilter(Filter):
    def matches(self, group):
        return self.what()


class BadRows(Numbers):
    def __getitem__(self, index):
        return self.what()


def loop_with(place, what):
    """A loop whose user code does ``what`` in ``place``."""
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task, max_offpolicy_steps=0)
    ordered = loop._selection._ordered = OrderedCalls(timeout_s=0.2)
    assert ordered is loop._selection._ordered
    data = Numbers.Config().build()
    if place is BadRows:
        data = BadRows.Config().build()
        task.sampler = ShuffledCursor.Config().build(dataset=data, seed=0)
        data.what = what
    elif issubclass(place, SampleStrategy):
        task.sampler = place.Config().build(dataset=data, seed=0)
        task.sampler.what = what
    elif issubclass(place, TaskMix):
        mix = loop._selection._mix = place.Config().build(weights={"stub": 1.0})
        mix.what = what
    else:
        loop._selection.filters["pre"] = [(place.Config().build(), "pre/bad_filter")]
        loop._selection.filters["pre"][0][0].what = what
    return loop


OWNERS = {
    BadSampler: "task 'stub': sampler BadSampler.next",
    BadObserver: "task 'stub': sampler BadObserver.observe of group stub-",
    BadRows: "task 'stub': sampler ShuffledCursor.next",
    BadMix: "task mix BadMix.next",
    BadMixObserver: "task mix BadMixObserver.observe of group stub-",
    BadFilter: "filter bad_filter failed on group stub-",
}


@pytest.mark.parametrize("what", FAULTS, ids=lambda what: what.__name__)
@pytest.mark.parametrize("place", OWNERS, ids=lambda place: place.__name__)
async def test_fault_ends_the_run_by_name_and_the_event_loop_goes_on(place, what):
    loop = loop_with(place, what)
    loop.fill()
    ticks = []
    asyncio.get_running_loop().call_later(0.05, ticks.append, 1)
    with pytest.raises(RunError) as caught:
        await loop.batch()
    assert str(caught.value).startswith(OWNERS[place]) and FAULTS[what] in str(caught.value), str(
        caught.value
    )
    if place is BadRows and what is not hangs:
        assert "dataset BadRows: item " in str(caught.value)
    if what is hangs:
        assert ticks, "the event loop ran meanwhile"
    await asyncio.wait_for(loop.close(), LIMIT_S)
    assert loop.ledger.counts().get("stub/open", 0) == 0


@pytest.mark.parametrize(
    ("place", "answer", "said"),
    [
        (
            BadSampler,
            None,
            "task 'stub': sampler BadSampler.next returned NoneType, want an example",
        ),
        (BadRows, {"question": 1}, "dataset BadRows: item "),
        (BadMix, "other", "task mix BadMix.next returned 'other', want one of ['stub']"),
        (BadMix, ["stub"], "task mix BadMix.next returned list, want one of ['stub']"),
        (BadFilter, None, "it returned NoneType, want a list of 2 bools"),
        (BadFilter, "no", "it returned str, want a list of 2 bools"),
        (BadFilter, {True, False}, "it returned set, want a list of 2 bools"),
        (BadFilter, [True], "it returned 1 entries, the group has 2 scored rollouts"),
        (BadFilter, [None, None], "it returned an entry of type NoneType, want True or False"),
    ],
)
async def test_wrong_answer_is_named_before_anything_is_made_of_it(place, answer, said):
    loop = loop_with(place, lambda: answer)
    loop.fill()
    with pytest.raises(RunError) as caught:
        await loop.batch()
    assert said in str(caught.value)
    if place in (BadSampler, BadRows):
        assert loop._tasks["stub"].started == [], "no rollout was generated"
    await loop.close()
    assert loop.ledger.counts().get("stub/open", 0) == 0


async def test_async_sampler_is_awaited():
    async def later():
        await asyncio.sleep(0)
        return DataSample(sample_id="0", env_input=None)

    loop = loop_with(BadSampler, later)
    loop.fill()
    assert ids(await loop.batch()) == [0, 1]
    await loop.close()


async def test_slow_task_mix_does_not_hold_up_the_loop_and_every_slot_is_filled():
    loop = loop_with(BadMix, lambda: time.sleep(0.03) or "stub")
    loop.fill()
    assert ids(await loop.batch()) == [0, 1] and loop.pacer.free_places == 0
    await loop.close()


async def test_group_that_comes_back_with_fewer_rollouts_names_its_task_and_the_ledger_balances():
    task = StubTask(lambda number: [0.0, 1.0])
    loop = Loop(task)
    score = task.score_group

    async def pops(group):
        group.rollouts.pop()
        await score(group)

    task.score_group = pops
    loop.fill()
    with pytest.raises(
        RunError,
        match="task 'stub': group stub-0 came back with 1 rollouts, not the 2 that were dispatched",
    ):
        await loop.batch()
    await loop.close()
    assert loop.ledger.counts()["stub/open"] == 0


class Pops(Filter):
    def matches(self, group):
        answer = [False] * len(group.scored)
        group.rollouts.clear()
        return answer


@pytest.mark.parametrize("place", ["filters", "post_filters"])
async def test_filter_that_empties_the_list_it_is_given_is_named(place):
    loop = Loop(StubTask(lambda number: [0.0, 1.0]), **{place: [Pops.Config()]})
    loop.fill()
    with pytest.raises(RunError, match="filter pops failed on group stub-0: TypeError: this dict"):
        await loop.batch()
    await loop.close()


def test_a_sampler_or_mix_that_a_resumed_run_can_not_go_on_with_is_named_with_what_it_lacks():
    class Forgetful(BadSampler):
        def state_dict(self):
            return {"cursor": 1}

    def task(sampler):
        return SimpleNamespace(sampler=object.__new__(sampler))

    tasks = {"kept": task(ShuffledCursor), "new": task(BadSampler), "half": task(Forgetful)}
    assert Selection(OrderedCalls(), mix=object.__new__(BadMix), tasks=tasks).without_state() == [
        f"{part} has no {methods}: a resumed run has it begin again; write {methods} if it should not"
        for part, methods in (
            ("task 'new': sampler BadSampler", "state_dict and load_state_dict"),
            ("task 'half': sampler Forgetful", "load_state_dict"),
            ("task mix BadMix", "state_dict and load_state_dict"),
        )
    ]
    assert (
        Selection(
            OrderedCalls(),
            mix=object.__new__(WeightedRoundRobin),
            tasks={"kept": task(DifficultyPool)},
        ).without_state()
        == []
    )


@pytest.mark.parametrize("made", [SumDigitsDataset, Numbers])
async def test_examples_are_read_in_one_thread_that_is_not_the_event_loops(monkeypatch, made):
    threads, read = set(), sampler_module.read_example

    def noted(dataset, index):
        threads.add(threading.get_ident())
        return read(dataset, index)

    monkeypatch.setattr(sampler_module, "read_example", noted)
    task = StubTask(lambda number: [0.0, 1.0])
    task.sampler = ShuffledCursor.Config().build(dataset=made.Config().build(), seed=0)
    loop = Loop(task, max_offpolicy_steps=0)
    loop.fill()
    await loop.batch()
    assert len(threads) == 1 and threads != {threading.get_ident()}
    await loop.close()
