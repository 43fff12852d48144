"""When a checkpoint counts as written, and what becomes of one whose trainer dies, or that nobody waits for any more."""

import asyncio
import errno
import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError
from msgspec import structs
from torch.distributed.checkpoint.api import CheckpointException

from tests.fakes.rollouts import completed_rollout, group_of
from tests.fakes.states import run_state
from tests.fakes.waiting import iterations, until
from torchtitan.experiments.rl.checkpointing.folder import (
    CheckpointConfig,
    CheckpointWriter,
    checkpoints,
    newest_valid,
    step_of,
    verify,
)
from torchtitan.experiments.rl.command.checks import checked_plan
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.controller import run as run_module
from torchtitan.experiments.rl.controller.run import Observers, Run, evaluations_before
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.fleet.context import RunContext
from torchtitan.experiments.rl.fleet.fleet import Fleet
from torchtitan.experiments.rl.loops.saved_groups import write_groups
from torchtitan.experiments.rl.loops.saved_state import (
    BestState,
    ValidationReport,
    read_state,
    write_state,
)
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.observability.console import RunSummary, summary_facts
from torchtitan.experiments.rl.process.lifetime import Lifetime, ProcessLost
from torchtitan.experiments.rl.training.checkpoints import write_error
from torchtitan.experiments.rl.watch.checkpoints import RunCheckpoints, best_set_aside, resume
from torchtitan.experiments.rl.watch.goals import ValidationGoals
from torchtitan.experiments.rl.watch.reports import Evaluated


class Trainer:
    """Writes its part until ``written`` is set, or its process ends."""

    def __init__(self):
        self.life, self.written = Lifetime("trainer"), asyncio.Event()

    async def begin_checkpoint(self, folder, step):
        if self.life.cause is not None:
            raise ProcessLost("trainer", self.life.cause)
        folder.mkdir()

    async def finish_checkpoint(self):
        await self.life.call(self.written.wait())


class Saved:
    def __init__(self, folder, *, recorded: Future | None = None):
        state, self.trainer = run_state(), Trainer()

        async def capture(moment):
            return state.rollouts, [], moment()

        self.checkpoints = RunCheckpoints(
            context=SimpleNamespace(
                config=SimpleNamespace(checkpoint=CheckpointConfig(interval=2), seed=7),
                run_dir=folder,
                synchronous=False,
            ),
            rollouts=SimpleNamespace(capture=capture),
            validator=SimpleNamespace(state=lambda: state.validator),
            stall=SimpleNamespace(state=lambda: state.stall),
            alarm=SimpleNamespace(state=lambda: state.mismatch),
            goals=ValidationGoals(rl_grpo_qwen3_debug()),
            trainer=self.trainer,
            metrics=SimpleNamespace(flush=lambda: None),
            recorder=SimpleNamespace(size_by_now=lambda: recorded),
            reports=SimpleNamespace(first_and_last_validation=lambda: VALIDATIONS),
        )


VALIDATIONS = [Evaluated(0.45, failed=12, attempts=32), Evaluated(None, failed=32, attempts=32)]


async def test_a_resumed_run_knows_the_failures_of_its_evaluations(tmp_path):
    saved = Saved(tmp_path)
    await saved.checkpoints.step_ended(2)
    saved.trainer.written.set()
    await saved.checkpoints.close()
    state = read_state(saved.checkpoints.newest)
    assert evaluations_before(SimpleNamespace(state=state)) == VALIDATIONS
    state.validation_failures = []  # of a checkpoint that an earlier version has written
    assert evaluations_before(SimpleNamespace(state=state)) == [Evaluated(0.45)]
    assert evaluations_before(None) == []


async def test_a_trainer_that_dies_leaves_no_part_of_the_checkpoint_it_was_writing(tmp_path):
    recorded: Future = Future()
    saved = Saved(tmp_path, recorded=recorded)
    saved.trainer.written.set()
    recorded.set_result(0)
    await saved.checkpoints.step_ended(2)
    await saved.checkpoints.close()
    recorded = Future()
    saved.checkpoints.recorder.size_by_now = lambda: recorded
    saved.trainer.written.clear()
    await saved.checkpoints.step_ended(4)
    saved.checkpoints.step_recorded(SimpleNamespace(step=5))
    saved.trainer.life.end("rank 0: killed by SIGKILL")
    closing = asyncio.create_task(saved.checkpoints.close())
    await iterations()
    assert saved.checkpoints.writing and not closing.done(), (
        "a thread may still write into the folder"
    )
    recorded.set_result(0)
    await asyncio.wait_for(closing, 60)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    saved.checkpoints.give_up("trainer rank 0 died: killed by SIGKILL")
    assert (
        saved.checkpoints.failure
        == "the state after step 5 is not saved: trainer rank 0 died: killed by SIGKILL"
    )
    assert newest_valid(tmp_path)[0] == saved.checkpoints.newest


async def test_a_checkpoint_that_nobody_waits_for_any_more_is_written_to_its_end(tmp_path):
    saved = Saved(tmp_path)
    saved.checkpoints.step_recorded(SimpleNamespace(step=3))
    ending = asyncio.create_task(saved.checkpoints.finish())
    await until(lambda: saved.checkpoints.writing)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert saved.checkpoints.writing
    saved.trainer.written.set()
    await saved.checkpoints.close()
    (checkpoint,) = checkpoints(tmp_path)
    verify(checkpoint)


async def test_a_checkpoint_has_a_copy_of_what_a_resume_needs_of_the_runs_folder(tmp_path):
    for name in ("command.json", "config.json"):
        (tmp_path / name).write_text(name)
    saved = Saved(tmp_path)
    saved.trainer.written.set()
    await saved.checkpoints.step_ended(2)
    await saved.checkpoints.close()
    (checkpoint,) = checkpoints(tmp_path)
    assert [(checkpoint / name).read_text() for name in ("command.json", "config.json")] == [
        "command.json",
        "config.json",
    ]


async def test_nothing_is_lost_where_the_last_step_is_saved(tmp_path):
    saved = Saved(tmp_path)
    saved.trainer.written.set()
    await saved.checkpoints.step_ended(2)
    await saved.checkpoints.close()
    saved.checkpoints.give_up("trainer rank 0 died: killed by SIGKILL")
    assert saved.checkpoints.failure is None


async def test_a_slow_checkpoint_counts_as_not_saved_until_it_is_written(tmp_path):
    saved = Saved(tmp_path)
    saved.checkpoints.step_recorded(SimpleNamespace(step=3))
    ending = asyncio.create_task(saved.checkpoints.finish())
    await until(lambda: saved.checkpoints.writing)
    ending.cancel()
    saved.checkpoints.give_up("no answer within 120 s")
    wanted = "the state after step 3 is not saved: no answer within 120 s"
    assert saved.checkpoints.failure == wanted
    saved.trainer.written.set()
    await saved.checkpoints.close()
    assert saved.checkpoints.failure is None and saved.checkpoints.newest.name == "step-000003"


async def fail_after_step_3(saved: Saved, error: str, monkeypatch) -> None:
    """Have a run fail that has taken three steps and saved none of them."""
    folder = saved.checkpoints.context.run_dir
    context = RunContext(checked_plan(rl_grpo_qwen3_debug()), folder)
    run = Run(context, resumed=None, init_from=None)

    async def set_up_and_fail():
        run._observers = Observers(
            profile=None, reports=None, goals=None, checkpoints=saved.checkpoints
        )
        saved.checkpoints.step_recorded(SimpleNamespace(step=3))
        raise RunError(error)

    monkeypatch.setattr(run, "_setup", set_up_and_fail)
    with pytest.raises(RunError, match=f"^{error}$"):
        await run.run()


async def test_an_error_whose_state_takes_too_long_to_save_is_said_to_be_unsaved(
    tmp_path, monkeypatch
):
    saved = Saved(tmp_path)
    monkeypatch.setattr(run_module, "CLOSE_TIMEOUT_S", 0.1)
    await fail_after_step_3(saved, "generator 0 and trainer disagree", monkeypatch)
    wanted = "the state after step 3 is not saved: no answer within 0.1 s"
    assert saved.checkpoints.failure.startswith(wanted)
    saved.trainer.written.set()
    await saved.checkpoints.close()


async def test_steps_of_a_trainer_whose_host_died_are_said_to_be_unsaved(tmp_path, monkeypatch):
    saved = Saved(tmp_path)
    monkeypatch.setattr(Fleet, "trainer_unreachable", True)
    await fail_after_step_3(saved, "host_1 died: no answer", monkeypatch)
    wanted = "the state after step 3 is not saved: host_1 died: no answer"
    assert saved.checkpoints.failure == wanted


async def test_a_checkpoint_of_an_earlier_step_does_not_save_the_last(tmp_path):
    saved = Saved(tmp_path)
    await saved.checkpoints.step_ended(2)
    saved.checkpoints.step_recorded(SimpleNamespace(step=3))
    saved.checkpoints.give_up("the trainer's host died")
    saved.trainer.written.set()
    await saved.checkpoints.close()
    assert saved.checkpoints.newest.name == "step-000002"
    wanted = "the state after step 3 is not saved: the trainer's host died"
    assert saved.checkpoints.failure == wanted


async def test_what_a_trainer_refuses_is_said_in_its_words_and_without_a_traceback(tmp_path):
    """A run may fail when a step is taken and not yet counted."""
    saved = Saved(tmp_path)

    async def refuse(folder, step):
        raise ActorError(
            RunError("trainer rank 0 has taken 3 steps, and can't save the state after 2"),
            "Traceback ...",
        )

    saved.trainer.begin_checkpoint = refuse
    saved.checkpoints.step_recorded(SimpleNamespace(step=2))
    await saved.checkpoints.finish()
    expected = "the state after step 2 is not saved: trainer rank 0 has taken 3 steps, and can't save the state after 2"
    assert saved.checkpoints.failure == expected


async def test_a_trainer_without_memory_for_its_copy_is_a_warning_and_the_next_checkpoint_is_tried(
    tmp_path, caplog
):
    saved = Saved(tmp_path)
    saved.trainer.written.set()
    finish = saved.trainer.finish_checkpoint

    async def refuse():
        raise ActorError(
            RunError("trainer 0: rank 1 can't copy its state into its host's memory"),
            "Traceback ...",
        )

    def warned() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return lines

    saved.trainer.finish_checkpoint = refuse
    await saved.checkpoints.step_ended(2)
    await saved.checkpoints.close()
    cause = "trainer 0: rank 1 can't copy its state into its host's memory"
    assert warned() == [f"there is no checkpoint yet: the state after step 2 is not saved: {cause}"]
    saved.trainer.finish_checkpoint = finish
    await saved.checkpoints.step_ended(4)
    await saved.checkpoints.close()
    assert saved.checkpoints.failure is None and warned() == []
    saved.trainer.finish_checkpoint = refuse
    await saved.checkpoints.step_ended(6)
    await saved.checkpoints.close()
    assert warned() == [
        f"step-000004 stays the newest checkpoint: the state after step 6 is not saved: {cause}"
    ]
    # The end of the run tries the same state again.
    saved.trainer.finish_checkpoint = finish
    await saved.checkpoints.finish()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000004", "step-000006"]
    assert saved.checkpoints.failure is None


def evaluated_run(folder, values: dict[int, float]) -> RunConfig:
    """Write the checkpoints of a run whose evaluations had these values, by their steps."""
    config = rl_grpo_qwen3_debug()
    config.checkpoint = CheckpointConfig(interval=20, keep=9, keep_best="validation/reward")
    config.seed = 7
    (folder / "metrics.jsonl").write_text("0123456789")
    goals = ValidationGoals(config)
    writer = CheckpointWriter(folder, keep=9)
    for step, value in values.items():
        metrics = {"validation/reward": value}
        report = ValidationReport(step=step, reward=value, metrics=metrics)
        goals.step_recorded(StepRecord(step=step, metrics={}, groups=[], validations=[report]))
        partial = writer.begin(step)
        write_groups(partial, [])
        write_state(partial, structs.replace(run_state(), step=step, goals=goals.state()))
        writer.commit(step)
    return config


def test_a_resume_from_an_earlier_step_keeps_the_best_checkpoint_and_says_where(tmp_path, caplog):
    config = evaluated_run(tmp_path, {20: 0.5, 40: 0.6, 60: 0.9, 80: 0.7})
    resumed = resume(tmp_path / "checkpoints/step-000040", run_dir=tmp_path, config=config)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000020", "step-000040"]
    aside = tmp_path / "set_aside/step-000060"
    verify(aside)
    assert (
        "the best checkpoint (validation/reward 0.9) is of step 60, after the one that the run goes "
        f"on from: it stays, as {aside}"
    ) in caplog.messages

    def best_of(value: float) -> list[str]:
        """Lines of the summary once the resumed run has taken step 60 again."""
        goals = ValidationGoals(config)
        on_disk = [step_of(path) for path in checkpoints(tmp_path)]
        goals.restore(resumed.state.goals, checkpoints=on_disk, set_aside=best_set_aside(tmp_path))
        report = ValidationReport(step=60, reward=value, metrics={"validation/reward": value})
        goals.step_recorded(StepRecord(step=60, metrics={}, groups=[], validations=[report]))
        (tmp_path / "checkpoints/step-000060").mkdir(exist_ok=True)
        run = Run(RunContext(checked_plan(config), tmp_path), resumed=None, init_from=None)
        run._observers = Observers(profile=None, reports=None, goals=goals, checkpoints=None)
        summary = RunSummary(
            steps=60,
            total_steps=60,
            wall_time_s=1.0,
            start_val_reward=None,
            final_val_reward=None,
            ledger={},
            files={},
            run_dir=tmp_path,
            best=run._best(),
        )
        return summary_facts(summary)["best"]

    assert best_of(0.8) == "set_aside/step-000060 (validation/reward 0.9 at 60)"
    assert best_of(0.95) == "checkpoints/step-000060 (validation/reward 0.95 at 60)"


def test_a_checkpoint_with_a_sample_that_can_not_be_trained_on_is_refused(tmp_path):
    config = evaluated_run(tmp_path, {20: 0.5})
    checkpoint = tmp_path / "checkpoints/step-000020"
    rollout = completed_rollout(group_id="t-7")
    rollout.assign_advantages(1.0)
    write_groups(checkpoint, [group_of(rollout)])
    assert "t-7" in resume(checkpoint, run_dir=tmp_path, config=config).groups
    rollout.samples[0].advantages = None
    write_groups(checkpoint, [group_of(rollout)])
    with pytest.raises(RunError) as refused:
        resume(checkpoint, run_dir=tmp_path, config=config)
    assert str(refused.value) == (
        f"{checkpoint}: a sample of rollout 't-7/0' has tokens with an rl weight and no advantages: "
        "its algorithm must assign them: resume from another checkpoint"
    )


def test_a_resume_drops_later_checkpoints_where_the_best_is_earlier_or_damaged(tmp_path, caplog):
    for name, values in (("earlier", {20: 0.9, 40: 0.6, 60: 0.7}), ("damaged", {40: 0.6, 60: 0.9})):
        folder = tmp_path / name
        folder.mkdir()
        config = evaluated_run(folder, values)
        if name == "damaged":
            (folder / "checkpoints/step-000060/controller.json").open("a").write(" ")
        resume(folder / "checkpoints/step-000040", run_dir=folder, config=config)
        assert not (folder / "set_aside").exists()
        assert step_of(checkpoints(folder)[-1]) == 40
    (warning,) = [text for text in caplog.messages if "the best checkpoint is not kept" in text]
    assert "controller.json" in warning


async def test_a_run_that_ends_early_saves_its_last_evaluation_and_the_best_that_it_was(tmp_path):
    """The state of a synchronous run is captured before its end is known."""
    saved = Saved(tmp_path)
    saved.trainer.written.set()
    saved.checkpoints.context.synchronous = True
    config = rl_grpo_qwen3_debug()
    config.checkpoint = CheckpointConfig(interval=2, keep_best="validation/reward")
    goals = saved.checkpoints.goals = ValidationGoals(config)
    saved.checkpoints.step_recorded(SimpleNamespace(step=3))
    await saved.checkpoints.step_ended(3)
    saved.checkpoints._captured.state.step = 3
    saved.checkpoints.reports = SimpleNamespace(
        first_and_last_validation=lambda: [Evaluated(0.1, 0, 4), Evaluated(0.9, 0, 4)]
    )
    metrics = {"validation/reward": 0.9}
    goals.ended_early(
        "nothing left to learn", [ValidationReport(step=3, reward=0.9, metrics=metrics)]
    )
    await saved.checkpoints.finish()
    state = read_state(saved.checkpoints.newest)
    assert (state.first_validation, state.last_validation) == (0.1, 0.9)
    assert (state.goals.kept.step, state.goals.kept.value) == (3, 0.9)


async def best_policy(tmp_path, monkeypatch, *, steps: int, export=None, stopped: bool = False):
    """Files and summary of a run that ends after ``steps``, and whose best checkpoint is step 20."""
    (tmp_path / "checkpoints" / "step-000020").mkdir(parents=True)
    final = tmp_path / "policy" / f"step-{steps}"
    (final.with_name("best")).mkdir(parents=True)  # what an earlier end of the run has left
    exported = []
    monkeypatch.setattr(
        run_module, "export_checkpoint", export or (lambda *given, **_: exported.append(given))
    )
    context = RunContext(checked_plan(rl_grpo_qwen3_debug()), tmp_path)
    run = Run(context, resumed=None, init_from=None)
    best = BestState(metric="validation/reward", value=0.91, step=20)
    run._observers = Observers(
        profile=None, reports=None, goals=SimpleNamespace(best=best), checkpoints=None
    )
    run._loops = SimpleNamespace(training=SimpleNamespace(steps_done=steps, stop=lambda: None))
    if stopped:
        run.stop()
    await run._export_best(final)
    assert not (tmp_path / "policy" / "best").exists()
    return [given[0] for given in exported], run._files.get("best policy"), run._best()


async def test_the_best_checkpoint_is_written_as_a_policy_beside_the_last(tmp_path, monkeypatch):
    sources, target, best = await best_policy(tmp_path, monkeypatch, steps=40)
    assert sources == [tmp_path / "checkpoints/step-000020/trainer"]
    assert target == tmp_path / "policy/best" and best.path == sources[0].parent


async def test_the_best_policy_is_not_written_where_it_is_the_last_or_a_signal_stopped_the_run(
    tmp_path, monkeypatch
):
    last = await best_policy(tmp_path / "last", monkeypatch, steps=20)
    stopped = await best_policy(tmp_path / "stopped", monkeypatch, steps=40, stopped=True)
    assert last[:2] == stopped[:2] == ([], None)


async def test_a_best_policy_that_can_not_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    def full(*given, **options):
        raise OSError(28, "No space left on device")

    _, target, best = await best_policy(tmp_path, monkeypatch, steps=40, export=full)
    assert target is None and best.step == 20
    assert "the best policy is not written: OSError: [Errno 28] No space left" in caplog.text


# ---- what is said of a disk that has filled


TORCHS = "[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"


@pytest.mark.parametrize(
    ("raised", "free_mib", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 3, "is full, with 3 MiB free"),
        (RuntimeError(TORCHS), 0, "is full, with 0 MiB free"),
        (RuntimeError(TORCHS), 7_000, "may be full, with 7,000 MiB free"),
    ],
)
def test_files_without_room_name_the_disk_and_the_cure(
    raised, free_mib, said, monkeypatch, tmp_path
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_mib << 20))
    wrapped = CheckpointException("", {0: (raised, [])})
    for error in (raised, wrapped):
        text = write_error(error, tmp_path)
        assert text.startswith(f"the disk of {tmp_path} {said}: free space there, or lower ")
        assert "checkpoint.keep (" in text and str(raised) in text


def test_another_error_of_the_files_is_given_as_it_is(tmp_path):
    denied = OSError(errno.EACCES, "Permission denied")
    assert write_error(denied, tmp_path) == "PermissionError: [Errno 13] Permission denied"
