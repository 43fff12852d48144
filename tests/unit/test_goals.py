"""The best checkpoint, which stays, and the end of a run by its evaluations."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.rollouts import group_of, rewarded_rollout
from tests.fakes.states import through_json
from torchtitan.experiments.rl.checkpointing.folder import (
    CheckpointConfig,
    CheckpointWriter,
    checkpoints,
)
from torchtitan.experiments.rl.command.checks import check
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.config.run_config import RunConfig, StopConfig
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.loops.events import NothingLeftToLearn
from torchtitan.experiments.rl.loops.saved_state import BestState, GoalsState, ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.loops.validation import evaluation_metrics
from torchtitan.experiments.rl.observability.console import (
    BestCheckpoint,
    RunSummary,
    summary_facts,
)
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.watch.goals import ValidationGoals

REWARD = "validation/reward"


def config_of(*, stop: StopConfig | None = None, **checkpoint) -> RunConfig:
    """A config of 100 steps with an evaluation and a checkpoint after every 10th."""
    config = rl_grpo_qwen3_debug()
    config.validation = ValidationConfig(every=10, examples=4)
    config.checkpoint = CheckpointConfig(interval=10, **checkpoint)
    config.stop_at = stop or StopConfig()
    return config


def report(step: int, value: float | None, metric: str = REWARD) -> ValidationReport:
    metrics = {} if value is None else {metric: value}
    return ValidationReport(step=step, reward=value, metrics=metrics)


def recorded(goals: ValidationGoals, step: int, *reports: ValidationReport) -> None:
    goals.step_recorded(StepRecord(step=step, metrics={}, groups=[], validations=reports))


async def why_it_ends(goals: ValidationGoals) -> str | None:
    try:
        await goals.step_begins(1)
    except NothingLeftToLearn as end:
        return str(end)
    return None


def test_the_checkpoint_of_the_best_evaluation_stays_and_others_go():
    goals = ValidationGoals(config_of(keep_best=REWARD))
    goals.started(report(0, 0.9))  # version 0 has no checkpoint
    for step, value in ((10, 0.2), (20, 0.6), (30, 0.6), (40, 0.1)):
        recorded(goals, step, report(step, value))
    assert (goals.best.step, goals.best.value, goals.best.metric) == (20, 0.6, REWARD)
    assert [step for step in (10, 20, 30, 40) if goals.stays(step)] == [20]
    lowest = ValidationGoals(config_of(keep_best=REWARD, best_is="lowest"))
    for step, value in ((10, 0.2), (20, 0.6), (30, 0.2)):
        recorded(lowest, step, report(step, value))
    assert lowest.best.step == 10


def test_a_checkpoint_stays_while_its_evaluation_runs():
    goals = ValidationGoals(config_of(keep_best=REWARD))
    recorded(goals, 12, report(10, 0.5))
    assert [step for step in (10, 20, 30) if goals.stays(step)] == [10, 20, 30]
    recorded(goals, 33, report(20, None))  # every attempt failed: it has no value
    assert [step for step in (10, 20, 30) if goals.stays(step)] == [10, 30]


def test_an_evaluation_between_two_checkpoints_is_the_best_only_if_the_run_ends_with_its_step():
    goals = ValidationGoals(config_of(keep_best=REWARD))
    recorded(goals, 10, report(10, 0.4))
    recorded(goals, 15, report(15, 0.9))
    assert goals.best.step == 10
    goals.add_checkpoint(17)  # the run is stopped two steps later
    assert goals.best.step == 10
    goals.add_checkpoint(15)  # or it is stopped, mastered or fails before the next step
    assert (goals.best.step, goals.best.value) == (15, 0.9)
    worse = ValidationGoals(config_of(keep_best=REWARD))
    recorded(worse, 15, report(10, 0.4), report(15, 0.3))
    worse.add_checkpoint(15)
    assert worse.best.step == 10


def test_a_resumed_run_counts_the_checkpoint_that_it_goes_on_from_wherever_that_lies():
    goals = ValidationGoals(config_of(keep_best=REWARD))
    goals.restore(GoalsState(reported=10), checkpoints=[10, 15])
    assert goals.stays(15)
    recorded(goals, 16, report(15, 0.9))  # its evaluation had not ended when the run was stopped
    assert goals.best.step == 15


def test_old_checkpoints_are_deleted_and_the_best_is_not(tmp_path):
    goals = ValidationGoals(config_of(keep_best=REWARD))
    folder = CheckpointWriter(tmp_path, keep=2)
    for step, value in ((10, 0.2), (20, 0.6), (30, 0.1), (40, 0.1), (50, 0.1)):
        recorded(goals, step, report(step, value))
        (folder.begin(step) / "controller.json").write_text("{}")
        folder.commit(step, stays=goals.stays)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-000020",
        "step-000040",
        "step-000050",
    ]


def test_a_resumed_run_knows_its_best_checkpoint_unless_that_is_gone():
    goals = ValidationGoals(config_of(keep_best=REWARD, stop=StopConfig(patience=3)))
    for step, value in ((10, 0.2), (20, 0.6), (30, 0.5)):
        recorded(goals, step, report(step, value))
    state = goals.state()
    again = ValidationGoals(config_of(keep_best=REWARD, stop=StopConfig(patience=3)))
    again.restore(state, checkpoints=[20, 30])
    assert again.state() == state
    recorded(again, 40, report(40, 0.55))
    assert (again.best.step, again.state().stop.since) == (20, 2)
    gone = ValidationGoals(config_of(keep_best=REWARD))
    gone.restore(state, checkpoints=[30])
    assert gone.best is None
    other = ValidationGoals(config_of(keep_best="validation/sum_digits/pass@1"))
    other.restore(state, checkpoints=[20, 30])
    assert other.best is None
    lowest = ValidationGoals(config_of(keep_best=REWARD, best_is="lowest"))
    lowest.restore(state, checkpoints=[20, 30])
    assert lowest.best is None
    recorded(lowest, 40, report(40, 0.7))
    assert lowest.best.step == 40


@pytest.mark.parametrize("value, kept", [(0.7, 60), (0.5, 20)])
def test_the_best_that_an_earlier_resume_set_aside_is_compared_with(value, kept):
    goals = ValidationGoals(config_of(keep_best=REWARD))
    best = BestState(metric=REWARD, value=0.6, step=20)
    aside = BestState(metric=REWARD, value=value, step=60, set_aside=True)
    goals.restore(GoalsState(kept=best, reported=20), checkpoints=[20], set_aside=[aside])
    assert goals.best.step == kept
    recorded(goals, 60, report(60, 0.1))
    assert not goals.stays(60), "the checkpoint of the same step is another"


async def test_a_value_that_is_reached_ends_the_run_before_the_next_step():
    goals = ValidationGoals(config_of(stop=StopConfig(value=0.75)))
    recorded(goals, 10, report(10, 0.7499))
    assert await why_it_ends(goals) is None
    recorded(goals, 20, report(20, 0.75))
    assert await why_it_ends(goals) == (
        "validation/reward, which is 0.75 at step 20 (stop_at.value = 0.75)"
    )
    already = ValidationGoals(config_of(stop=StopConfig(value=0.5, best_is="lowest")))
    already.started(report(0, 0.25))
    assert "0.25 at step 0" in await why_it_ends(already)


@pytest.mark.parametrize("stop", [StopConfig(value=0.75), StopConfig(patience=2)])
async def test_a_run_that_had_come_far_enough_ends_at_once_and_in_the_same_words_when_resumed(stop):
    goals = ValidationGoals(config_of(stop=stop))
    for step, value in ((10, 0.8 if stop.value else 0.5), (20, 0.4), (30, 0.3)):
        recorded(goals, step, report(step, value))
    why = await why_it_ends(goals)
    goals.ended_early(why, [report(31, 0.9)])  # evaluated at its end
    state = through_json(goals.state(), GoalsState)
    resumed = ValidationGoals(config_of(stop=stop))
    resumed.restore(state, checkpoints=[31])
    assert why is not None and await why_it_ends(resumed) == why
    asks_for_more = [
        StopConfig(value=0.85),
        StopConfig(patience=3),
        StopConfig(),
        replace(stop, best_is="lowest", value=0.1),
    ]
    for more in asks_for_more:
        resumed = ValidationGoals(config_of(stop=more))
        resumed.restore(state, checkpoints=[31])
        assert await why_it_ends(resumed) is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
async def test_a_value_that_is_not_finite_neither_ends_a_run_nor_is_the_best(value):
    for best_is in ("highest", "lowest"):
        stop = StopConfig(value=0.75, patience=1, best_is=best_is)
        goals = ValidationGoals(config_of(stop=stop, keep_best=REWARD, best_is=best_is))
        for step in (10, 20):
            recorded(goals, step, report(step, value))
        assert await why_it_ends(goals) is None and goals.best is None


async def test_evaluations_without_a_gain_end_the_run():
    goals = ValidationGoals(config_of(stop=StopConfig(patience=2, min_gain=0.1)))
    for step, value in ((10, 0.5), (20, 0.59), (30, None), (40, 0.65), (50, 0.7)):
        recorded(goals, step, report(step, value))
        assert await why_it_ends(goals) is None
    recorded(goals, 60, report(60, 0.75))
    assert await why_it_ends(goals) == (
        "validation/reward, which is best at step 40 with 0.65, and has not gained in 2 "
        "evaluations since (stop_at.patience = 2)"
    )


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"keep_best": "validation/rewrad"},
            "checkpoint.keep_best = 'validation/rewrad': no evaluation has it; choose among "
            "validation/reward, validation/sum_digits/reward, validation/sum_digits/avg@1, "
            "validation/sum_digits/pass@1, validation/sum_digits/failed, "
            "validation/sum_digits/truncated, validation/sum_digits/completion_tokens",
        ),
        (
            {"keep_best": REWARD, "interval": 15},
            "checkpoint.keep_best = 'validation/reward': checkpoint.interval = 15 is no multiple "
            "of the 10 steps between two evaluations, so that checkpoints have no value: set it to "
            "10, or the schedule's every",
        ),
        (
            {"keep_best": REWARD, "interval": 0},
            "checkpoint.keep_best = 'validation/reward': checkpoint.interval is 0: set it to the "
            "steps between two checkpoints",
        ),
    ],
)
def test_a_best_checkpoint_that_no_evaluation_tells_is_refused(changes, said):
    config = config_of()
    config.checkpoint = replace(config.checkpoint, **changes)
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert str(raised.value) == said


def test_an_end_by_evaluations_of_a_run_without_any_is_refused():
    config = config_of(stop=StopConfig(patience=3))
    config.validation.every = 0
    with pytest.raises(ConfigError) as raised:
        check(config)
    assert str(raised.value) == (
        "stop_at.metric = 'validation/reward': no task is evaluated: give one a validation set, "
        "and set validation.every"
    )
    check(config_of(stop=StopConfig(value=0.9, metric="validation/sum_digits/pass@1")))


@pytest.mark.parametrize("attempts", [1, 3, 4])
def test_the_metrics_that_can_be_named_are_those_of_an_evaluation(attempts):
    config = ValidationConfig(attempts=attempts, temperature=1.0)
    assert config.passes == {1: [1], 3: [1, 2, 3], 4: [1, 2, 4]}[attempts]
    group = group_of(*[rewarded_rollout(1.0) for _ in range(attempts)])
    given = {
        name.removeprefix("validation/ask/") for name in evaluation_metrics("ask", [group], config)
    }
    assert set(config.metrics) == given - {"examples", "attempts", "version_min", "version_max"}


async def test_a_gain_that_came_after_the_end_is_said_with_the_command_that_goes_on():
    stop = StopConfig(patience=2, min_gain=0.05)
    goals = ValidationGoals(config_of(stop=stop))
    goals.started(report(0, 0.0))
    for step in (10, 20):
        recorded(goals, step, report(step, 0.0))
    why = await why_it_ends(goals)
    goals.ended_early(why, [report(21, 0.05)])
    assert goals.with_late_gain(why) == why and goals.more_patience is None, "no more than min_gain"
    goals.ended_early(why, [report(21, 0.1)])
    summary = RunSummary(
        steps=21,
        total_steps=100,
        wall_time_s=60.0,
        start_val_reward=0.0,
        final_val_reward=0.1,
        ledger={},
        files={"checkpoint": Path("/runs/one/checkpoints/step-000021")},
        run_dir=Path("/runs/one"),
        stopped_by=goals.with_late_gain(why),
        ended_early=True,
        more_patience=goals.more_patience,
    )
    facts = summary_facts(summary)
    assert facts["steps"].partition(", ")[2] == (
        "stopped by validation/reward, which is best at step 0 with 0, and has not gained in 2 "
        "evaluations since (stop_at.patience = 2); after that it gained: 0.1 at step 21"
    )
    assert facts["go on with"].endswith("train --resume /runs/one --stop-at.patience 4")

    state = through_json(goals.state(), GoalsState)
    patient = ValidationGoals(config_of(stop=replace(stop, patience=4)))
    patient.restore(state, checkpoints=[21])
    for step, value in ((30, 0.0), (40, 0.12), (50, 0.14)):  # of which none gains on 0.1
        recorded(patient, step, report(step, value))
        assert await why_it_ends(patient) is None
    recorded(patient, 60, report(60, 0.15))
    assert "best at step 21 with 0.1, and has not gained in 4" in await why_it_ends(patient)


def test_both_are_set_by_the_command_line():
    words = (
        "--config rl_grpo_qwen3_debug --checkpoint.keep-best validation/reward "
        "--checkpoint.best-is lowest --stop-at.value 0.9 --stop-at.patience 3"
    )
    config = load_config(parse_command(words.split()))
    assert (config.checkpoint.keep_best, config.checkpoint.best_is) == (REWARD, "lowest")
    assert config.stop_at == StopConfig(value=0.9, patience=3)


def test_the_summary_names_the_best_checkpoint():
    run_dir = Path("/runs/one")
    summary = RunSummary(
        steps=100,
        total_steps=100,
        wall_time_s=60.0,
        start_val_reward=None,
        final_val_reward=None,
        ledger={},
        files={},
        run_dir=run_dir,
        best=BestCheckpoint(
            path=run_dir / "checkpoints/step-000060", metric=REWARD, value=0.91, step=60
        ),
    )
    assert summary_facts(summary)["best"] == (
        "checkpoints/step-000060 (validation/reward 0.91 at 60)"
    )
