"""What the Controller does when the trainer dies: the parts here end as a list says, and the checkpoints are folders."""

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter, step_of
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.controller import actor
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.observability.console import RunSummary
from torchtitan.experiments.rl.process.lifetime import ProcessLost

RUN = inspect.unwrap(vars(actor.Controller)["run"]._method)
REQUEST_STOP = inspect.unwrap(vars(actor.Controller)["request_stop"]._method)
LOST = ProcessLost("trainer rank 0", "killed by SIGKILL")


class Parts:
    """Takes ``steps`` and then ends with ``end``; both are of the next entry of ``plan``."""

    plan: list[tuple[int, object]] = []
    made: list["Parts"] = []

    def __init__(self, context, *, resumed, init_from):
        self.resumed, self.init_from, self.restarts = resumed, init_from, context.restarts
        self.steps_done = 0 if resumed is None else resumed.state.step
        self.ended_early, self.writes_checkpoint, self.closed, self.stopped = (
            None,
            False,
            False,
            False,
        )
        self.supervisor = SimpleNamespace(died=lambda death: None)
        self.run_dir = context.run_dir
        Parts.made.append(self)

    async def run(self):
        if len(Parts.made) == 1:
            (self.run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
        steps, end = Parts.plan.pop(0)
        self.steps_done += steps
        if callable(end):
            end = await end(self)
        if end is not None:
            raise end

    def stop(self):
        self.stopped = True

    async def settle(self):
        return []

    async def close(self):
        self.closed = True
        return []

    def summary(self, *, wall_time_s, stopped_by, checkpoint):
        return RunSummary(
            steps=self.steps_done,
            total_steps=100,
            wall_time_s=wall_time_s,
            start_val_reward=None,
            final_val_reward=None,
            ledger={},
            files={} if checkpoint is None else {"checkpoint": checkpoint},
            stopped_by=stopped_by,
        )


class Lost:
    """A run in ``folder`` that has taken the named checkpoints, and whose trainer dies."""

    def __init__(self, folder: Path, capsys, *, max_restarts: int = 3, **options):
        self.folder, self._capsys = folder, capsys
        config = rl_grpo_qwen3_debug()
        config.supervision.max_restarts = max_restarts
        Parts.made = []
        self.controller = actor.Controller(
            checked_plan(config), run_dir=str(folder), config_name="debug", **options
        )

    def checkpoints(self, *steps: int) -> None:
        folder = CheckpointWriter(self.folder, keep=9)
        for step in steps:
            (folder.begin(step) / "state").write_text(str(step))
            folder.commit(step)

    async def run(self, *plan) -> list[str]:
        """The lines about the trainer that the run prints."""
        Parts.plan = list(plan)
        try:
            self.summary = await RUN(self.controller)
        finally:
            self.out = self._capsys.readouterr().out
        return [line for line in self.out.splitlines() if line.startswith("trainer rank")]


@pytest.fixture
def lost(tmp_path, monkeypatch, capsys):
    def read(checkpoint, *, run_dir, config):
        return SimpleNamespace(
            checkpoint=checkpoint, state=SimpleNamespace(step=step_of(checkpoint))
        )

    monkeypatch.setattr(actor, "Run", Parts)
    monkeypatch.setattr(actor, "resume", read)
    monkeypatch.setattr(actor, "set_up_logging", lambda *arguments: None)
    return lambda **options: Lost(tmp_path, capsys, **options)


async def test_the_run_goes_on_from_its_newest_checkpoint(lost):
    run = lost()
    run.checkpoints(20, 40)
    (line,) = await run.run((43, LOST), (60, None))
    assert (
        line
        == "trainer rank 0 died: killed by SIGKILL; the run goes on from step 40; 3 steps lost (1 of 3)"
    )
    assert (run.summary.steps, run.summary.stopped_by) == (100, None)
    built = Parts.made[-1]
    assert built.resumed.state.step == 40 and all(parts.closed for parts in Parts.made)
    assert built.restarts is Parts.made[0].restarts and built.restarts.counts == {"trainer": 1}
    assert run.out.count("config      debug") == 1


async def test_a_run_that_was_resumed_goes_on_from_that_checkpoint_while_there_is_none_newer(
    lost, tmp_path
):
    run = lost(resume_from=tmp_path / "checkpoints" / "step-000020")
    run.checkpoints(20)
    (line,) = await run.run((1, LOST), (0, None))
    assert line.endswith("the run goes on from step 20; 1 step lost (1 of 3)")


async def test_a_run_without_a_checkpoint_begins_again(lost, tmp_path):
    weights = tmp_path / "of another run"
    run = lost(init_from=weights)
    (line,) = await run.run((5, LOST), (100, None))
    assert line.endswith(
        "killed by SIGKILL; the run begins again, for it has no checkpoint; 5 steps lost (1 of 3)"
    )
    assert Parts.made[-1].resumed is None and Parts.made[-1].init_from == weights
    assert not (tmp_path / "metrics.jsonl").exists(), (
        "what it had written is of steps that are taken again"
    )


async def test_a_damaged_newest_checkpoint_is_passed_over(lost, tmp_path, caplog):
    run = lost()
    run.checkpoints(20, 40)
    (tmp_path / "checkpoints" / "step-000040" / "state").write_text("??")
    (line,) = await run.run((41, LOST), (0, None))
    assert "goes on from step 20; 21 steps lost" in line
    assert "step-000040 is damaged" in caplog.text


async def test_a_run_that_has_damaged_checkpoints_only_ends_and_keeps_its_files(lost, tmp_path):
    run = lost()
    run.checkpoints(20)
    (tmp_path / "checkpoints" / "step-000020" / "state").write_text("??")
    with pytest.raises(
        RunError,
        match="^trainer rank 0 died: killed by SIGKILL, and the run can't go on: .*is damaged",
    ):
        await run.run((21, LOST))
    assert (tmp_path / "metrics.jsonl").exists() and "stopped by an error" in run.out


async def test_a_trainer_that_dies_too_often_ends_the_run_with_every_cause(lost):
    run = lost(max_restarts=2)
    run.checkpoints(20)
    other = ProcessLost("trainer rank 1", "hung: a computation of the trainer for 121 s")
    with pytest.raises(RunError) as caught:
        await run.run((21, LOST), (1, other), (1, LOST))
    assert str(caught.value) == (
        "trainer rank 0 died: killed by SIGKILL; trainer rank 1 died: hung: a computation of the trainer for 121 s; "
        "trainer rank 0 died: killed by SIGKILL (supervision.max_restarts = 2)"
    )
    assert len(Parts.made) == 3


async def test_a_trainer_that_may_not_be_made_again_ends_the_run_by_its_name(lost):
    run = lost(max_restarts=0)
    with pytest.raises(
        RunError, match=r"^trainer rank 0 died: killed by SIGKILL \(supervision.max_restarts = 0\)$"
    ):
        await run.run((0, LOST))


async def test_a_trainer_that_dies_while_the_run_is_stopped_is_not_made_again(lost):
    run = lost()
    run.checkpoints(20)

    async def stopped(parts):
        await REQUEST_STOP(run.controller, "SIGINT")
        assert parts.stopped
        return LOST

    (line,) = await run.run((21, stopped))
    assert (
        line == "trainer rank 0 died: killed by SIGKILL; what follows the last checkpoint is lost"
    )
    assert run.summary.stopped_by == "SIGINT" and len(Parts.made) == 1


async def test_a_run_that_is_stopped_before_it_is_built_again_ends(lost, monkeypatch):
    run = lost()
    run.checkpoints(20)
    read = actor.resume

    def stopped_meanwhile(*arguments, **options):
        run.controller._stopped_by = "SIGTERM"
        return read(*arguments, **options)

    monkeypatch.setattr(actor, "resume", stopped_meanwhile)
    (line,) = await run.run((21, LOST))
    assert "goes on from step 20" in line
    assert (run.summary.steps, run.summary.stopped_by) == (20, "SIGTERM")
    assert run.summary.files["checkpoint"].name == "step-000020"


async def test_nothing_is_built_while_a_checkpoint_is_being_written(lost):
    run = lost()
    run.checkpoints(20)

    async def writing(parts):
        parts.writes_checkpoint = True
        return LOST

    with pytest.raises(
        RunError,
        match="killed by SIGKILL, and the run can't go on: a checkpoint is still being written$",
    ):
        await run.run((21, writing))
    assert len(Parts.made) == 1


async def test_a_status_that_can_not_be_drawn_is_said_once_and_the_run_goes_on(lost, caplog):
    run = lost()
    drawn = []

    def draw():
        drawn.append(True)
        raise LookupError("unknown encoding: x")

    run.controller._console.draw = draw

    async def last_step(parts):
        await asyncio.sleep(0.01)

    await run.run((100, last_step))
    assert run.summary.stopped_by is None and len(drawn) == 1
    (line,) = [record for record in caplog.records if "status" in record.message]
    assert "LookupError: unknown encoding: x" in line.message


async def test_other_errors_end_the_run_as_before(lost):
    run = lost()
    run.checkpoints(20)
    with pytest.raises(RunError, match="^task 'sums' failed$"):
        await run.run((21, RunError("task 'sums' failed")))
    assert len(Parts.made) == 1
