"""The steps: what overlaps, what waits for what, how a run ends. Trainer and weights are stand-ins that note each call."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.fakes.loops import loops_of
from tests.fakes.tasks import ROW_LENGTH, StubTask
from tests.fakes.waiting import LIMIT_S, settle
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn, RunEvents
from torchtitan.experiments.rl.loops.parts import Schedule
from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.watch.alarms import StallDetectors
from torchtitan.experiments.rl.weights.sync import CopiedOut, SyncReport


class Parts:
    """Trainer, weights and validator in one: each call is noted, and answered at once unless its name is held."""

    data_parallel_size = 1

    def __init__(self, policy):
        self.policy, self.events, self.held, self.released = policy, [], set(), asyncio.Event()
        self.reports: list[ValidationReport] = []

    async def _answer(self, *event):
        self.events.append(event)
        if event in self.held:
            await self.released.wait()

    async def forward_backward(self, packed, step):
        await self._answer("gradient", step)
        return step

    async def optim_step(self, gradient):
        await self._answer("train", gradient)
        return {"loss/total": 0.5}

    async def copy_out(self, version):
        await self._answer("copy", version)
        return CopiedOut(version=version, seconds=0.0)

    async def update(self, copied):
        await self._answer("update", copied.version)
        self.policy.version = copied.version
        self.events.append(("live", copied.version))
        zeros = dict.fromkeys(
            ("canary_max_diff", "copy_out_s", "load_s", "verify_s", "reload_s"), 0.0
        )
        return SyncReport(
            version=copied.version,
            fetched_bytes={"host 1": 100 + copied.version},
            fetch_s=0.25,
            **zeros,
        )

    async def sleep(self):
        self.events.append(("sleep",))

    def start(self, step, *, final=False):
        self.events.append(("evaluate", step, "final" if final else "due"))
        self.reports.append(
            ValidationReport(step=step, reward=step / 10, metrics={"validation/reward": step / 10})
        )

    async def wait(self):
        await self._answer("evaluated")

    def take(self):
        reports, self.reports = self.reports, []
        return reports

    def stop(self):
        self.events.append(("stop",))

    async def close(self):
        self.events.append(("closed",))


class Noted(RunEvents):
    def __init__(self):
        self.records, self.starts = [], []

    def started(self, report):
        self.starts.append(report)

    def step_recorded(self, record):
        self.records.append(record)


def build(*, steps=3, bound=1, task=None, sleep=False):
    task = task or StubTask(lambda number: [0.0, 1.0])
    policy = SimpleNamespace(version=0)
    parts, noted = Parts(policy), Noted()
    loops = loops_of(
        task,
        policy=policy,
        schedule=Schedule(steps=steps, rollouts_per_step=4, max_offpolicy_steps=bound, sleep=sleep),
        row_length=ROW_LENGTH,
        watchers=[StallDetectors(5, {task.name: 1}), noted],
        trainer=parts,
        weights=parts,
        validator=parts,
    )
    return SimpleNamespace(
        loop=loops.training,
        parts=parts,
        rollouts=loops.rollouts,
        task=task,
        records=noted.records,
        starts=noted.starts,
        noted=noted,
    )


async def test_an_error_of_the_last_evaluation_ends_the_run_once_its_step_is_kept():
    run = build(steps=2)
    start = run.parts.start

    def failing(step, *, final=False):
        start(step, final=final)
        if final and step == 2:
            run.rollouts.fail(RunError("the validation set can't be read"))

    run.parts.start = failing
    with pytest.raises(RunError, match="the validation set can't be read"):
        await run.loop.run()
    await run.rollouts.close()
    assert [record.step for record in run.records] == [1, 2]


@pytest.mark.parametrize("event", ["step_begins", "groups_taken"])
async def test_an_error_of_the_last_evaluation_ends_a_run_that_is_complete_early_too(event):
    """Without the error such a run would end as complete, and lack the reward of its policy."""
    run = build(steps=100)
    ends = []
    run.noted.ended_early = lambda why, reports: ends.append(why)
    start = run.parts.start

    def failing(step, *, final=False):
        start(step, final=final)
        if final:
            run.rollouts.fail(RunError("the validation set can't be read"))

    run.parts.start = failing

    def complete():
        if run.loop.steps_done == 2:
            raise NothingLeftToLearn("stop_at is reached")

    async def step_begins(step):
        complete()

    setattr(run.noted, event, step_begins if event == "step_begins" else complete)
    with pytest.raises(RunError, match="the validation set can't be read"):
        await asyncio.wait_for(run.loop.run(), LIMIT_S)
    await run.rollouts.close()
    assert [record.step for record in run.records] == [1, 2] and ends == []


async def test_a_run_that_is_complete_early_needs_no_group_beside_its_last_evaluation():
    """One that failed there would promise in the log an end of the run that never came."""
    run = build(steps=100)
    order = []
    stop, start = run.rollouts.stop, run.parts.start

    def stopped():
        order.append("stop")
        stop()

    def started(step, *, final=False):
        order.append("final" if final else "due")
        start(step, final=final)

    async def step_begins(step):
        if run.loop.steps_done == 2:
            raise NothingLeftToLearn("stop_at is reached")

    run.rollouts.stop, run.parts.start = stopped, started
    run.noted.step_begins = step_begins
    await asyncio.wait_for(run.loop.run(), LIMIT_S)
    assert order.index("stop") < order.index("final")
    await run.rollouts.close()


async def test_every_step_trains_copies_out_and_is_recorded():
    run = build(steps=3)
    await run.loop.run()
    await run.rollouts.close()
    assert [event for event in run.parts.events if event[0] == "train"] == [
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]
    assert [event for event in run.parts.events if event[0] == "live"] == [
        ("live", 1),
        ("live", 2),
        ("live", 3),
    ]
    assert run.loop.steps_done == 3 and [record.step for record in run.records] == [1, 2, 3]
    last = run.records[-1].metrics
    assert (
        last["loss/total"] == 0.5
        and last["ledger/stub/trained"] == 12
        and last["ledger/stub/open"] == 0
    )
    newest = int(last["perf/sync_version"])
    assert (
        last["weights/bytes_fetched/host 1"] == 100 + newest and last["time/sync_fetch_s"] == 0.25
    )
    assert "perf/event_loop_lag_max_s" in last and run.rollouts.ledger.counts()["stub/open"] == 0


async def test_trainer_takes_its_next_step_while_the_generators_load():
    run = build(steps=3, bound=1)
    run.parts.held = {("update", 1)}
    running = asyncio.create_task(run.loop.run())
    while ("train", 2) not in run.parts.events:
        await asyncio.sleep(0)
    await settle()
    # Version 1 is not live, and step 2 was taken; its weights wait, since the buffers of version 1 are still being read.
    assert ("copy", 2) not in run.parts.events
    assert ("live", 1) not in run.parts.events
    run.parts.released.set()
    await asyncio.wait_for(running, LIMIT_S)
    await run.rollouts.close()
    assert run.loop.steps_done == 3


async def test_synchronous_step_begins_when_the_one_before_is_live_and_evaluated():
    run = build(steps=3, bound=0)
    await run.loop.run()
    await run.rollouts.close()
    events = run.parts.events
    for step in (2, 3):
        assert (
            events.index(("live", step - 1))
            < events.index(("evaluate", step - 1, "due"))
            < events.index(("train", step))
        )
        assert ("evaluated",) in events[
            events.index(("evaluate", step - 1, "due")) : events.index(("train", step))
        ]


async def test_generators_sleep_from_the_last_evaluation_to_the_next_version():
    run = build(steps=2, bound=0, sleep=True)
    await run.loop.run()
    await run.rollouts.close()
    order = ["evaluated", "sleep", "train", "copy", "update", "live"]
    assert [event[0] for event in run.parts.events if event[0] in order][:12] == 2 * order


async def test_asynchronous_training_goes_on_beside_an_evaluation():
    run = build(steps=3, bound=1)
    await run.loop.run()
    await run.rollouts.close()
    between = run.parts.events[
        run.parts.events.index(("train", 1)) : run.parts.events.index(("train", 3))
    ]
    assert ("evaluate", 1, "due") in between and ("evaluated",) not in between


async def test_first_and_final_policy_are_evaluated_with_nothing_changing_under_them():
    run = build(steps=2, bound=1)
    await run.loop.run()
    await run.rollouts.close()
    events = run.parts.events
    assert events[:2] == [("evaluate", 0, "due"), ("evaluated",)] and [
        report.step for report in run.starts
    ] == [0]
    assert (
        events.index(("live", 2)) < events.index(("evaluate", 2, "final"))
        and ("evaluate", 2, "due") not in events
    )
    last = run.records[-1]
    assert [report.step for report in last.validations][-1] == 2
    assert last.metrics["validation/reward"] == 0.2


@pytest.mark.parametrize("bound", [0, 1])
async def test_a_first_evaluation_of_which_all_fails_ends_the_run_before_its_first_step(bound):
    run = build(steps=2, bound=bound)
    fault = "all 4 attempts of task stub failed, the first with: KeyError: 'a'"
    run.parts.start = lambda step: run.parts.reports.append(
        ValidationReport(step=step, reward=None, metrics={}, unmeasured={"stub": fault})
    )
    with pytest.raises(RunError) as caught:
        await run.loop.run()
    await run.rollouts.close()
    assert str(caught.value) == (
        f"validation before the first step: {fault} (--validation.every 0 trains without validation)"
    )
    assert len(run.starts) == 1 and run.loop.steps_done == 0  # the report was told to all


async def test_a_later_evaluation_of_which_all_fails_ends_nothing():
    run = build(steps=2)
    start = run.parts.start

    def failing(step, *, final=False):
        start(step, final=final)
        if final:
            report = ValidationReport(
                step=step, reward=None, metrics={}, unmeasured={"stub": "all"}
            )
            run.parts.reports[-1] = report

    run.parts.start = failing
    await run.loop.run()
    await run.rollouts.close()
    assert run.loop.steps_done == 2
    assert run.records[-1].validations[-1].unmeasured == {"stub": "all"}


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("evaluation", ["first", "last"])
async def test_a_stop_is_not_held_up_by_an_evaluation(bound, evaluation):
    run = build(steps=2, bound=bound)
    stopped = asyncio.Event()
    under_way = ("evaluate", 0, "due") if evaluation == "first" else ("evaluate", 2, "final")

    async def wait():
        if under_way in run.parts.events:
            await stopped.wait()

    run.parts.wait = wait
    run.parts.stop = stopped.set
    running = asyncio.create_task(run.loop.run())
    async with asyncio.timeout(LIMIT_S):
        while under_way not in run.parts.events:
            await settle()
    await settle()
    assert not running.done()
    run.loop.stop()
    await asyncio.wait_for(running, LIMIT_S)
    await run.rollouts.close()
    steps = [record.step for record in run.records]
    assert steps == ([] if evaluation == "first" else [1, 2])
    assert len(run.starts) == (evaluation == "last"), "an evaluation that was cut short is none"


async def test_the_error_that_ends_a_step_is_the_first_though_its_record_fails_too():
    run = build(steps=3, bound=0)

    async def update(copied):
        raise RunError("generators disagree")

    def step_recorded(record):
        raise OSError("the disk is full")

    run.parts.update = update
    run.noted.step_recorded = step_recorded
    with pytest.raises(RunError, match="generators disagree"):
        await asyncio.wait_for(run.loop.run(), LIMIT_S)
    await run.rollouts.close()
    await run.loop.close()


async def test_run_that_is_stopped_ends_after_its_step():
    run = build(steps=100)
    running = asyncio.create_task(run.loop.run())
    while run.loop.steps_done < 2:
        await settle()
    run.loop.stop()
    await asyncio.wait_for(running, LIMIT_S)
    await run.rollouts.close()
    assert 2 <= run.loop.steps_done < 100


async def test_weights_that_do_not_arrive_end_the_run():
    run = build(steps=3)

    async def update(copied):
        raise RunError("generators disagree")

    run.parts.update = update
    with pytest.raises(RunError, match="generators disagree"):
        await asyncio.wait_for(run.loop.run(), LIMIT_S)
    await run.rollouts.close()
    await run.loop.close()


async def test_an_evaluation_that_can_not_be_started_ends_the_run():
    run = build(steps=3)
    start = run.parts.start

    def failing(step, **options):
        if step == 1:
            raise ZeroDivisionError("of an evaluation")
        start(step, **options)

    run.parts.start = failing
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(run.loop.run(), LIMIT_S)
    await run.rollouts.close()


@pytest.mark.parametrize("call", ["forward_backward", "optim_step"])
async def test_step_that_fails_ends_the_run_and_the_ledger_still_balances(call):
    run = build(steps=3)

    async def fail(*args):
        raise RunError("the gradient is not finite")

    setattr(run.parts, call, fail)
    with pytest.raises(RunError, match="not finite"):
        await run.loop.run()
    await run.rollouts.close()
    counts = run.rollouts.ledger.counts()
    assert counts["stub/open"] == 0 and "stub/trained" not in counts
    assert run.records == [] and run.loop.steps_done == 0
    assert not [event for event in run.parts.events if event[0] in ("train", "copy")]


async def test_an_observer_ends_the_run_before_a_step_and_all_before_it_is_recorded():
    run = build(steps=100)
    ends = []
    run.noted.ended_early = lambda why, reports: ends.append(why)

    async def step_begins(step):
        if step == 4:
            raise NothingLeftToLearn("validation/reward, which is 0.3 at step 3")

    run.noted.step_begins = step_begins
    await asyncio.wait_for(run.loop.run(), LIMIT_S)
    await run.rollouts.close()
    assert ends == ["validation/reward, which is 0.3 at step 3"]
    assert [record.step for record in run.records] == [1, 2, 3]
    assert ("evaluate", 3, "final") in run.parts.events
    assert run.rollouts.ledger.counts()["stub/open"] == 0


async def test_run_with_nothing_left_to_learn_evaluates_its_final_policy_and_ends_without_an_error():
    run = build(steps=100)
    ends = []
    run.noted.ended_early = lambda why, reports: ends.append(
        (why, [report.step for report in reports])
    )

    def nothing_left():
        raise NothingLeftToLearn("nothing left to learn: all rewards tie")

    running = asyncio.create_task(run.loop.run())
    while run.loop.steps_done < 2:
        await settle()
    run.noted.groups_taken = nothing_left
    await asyncio.wait_for(running, LIMIT_S)
    await run.rollouts.close()
    ((why, steps),) = ends
    assert (
        why.startswith("nothing left to learn")
        and run.loop.steps_done in steps
        and run.loop.steps_done < 100
    )
    assert ("evaluate", run.loop.steps_done, "final") in run.parts.events
