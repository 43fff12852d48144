"""Warnings of a run that goes on and learns nothing."""

import io
from types import SimpleNamespace

import pytest

from torchtitan.experiments.rl.loops.saved_state import ValidationReport
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.observability.console import Console, RunSummary
from torchtitan.experiments.rl.observability.metrics import MetricsLogger, read_metrics
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE
from torchtitan.experiments.rl.watch.reports import Evaluated, RunReports, StepWarnings

HEALTHY = {
    "perf/event_loop_lag_max_s": 0.1,
    "rollout/reward_mean": 0.5,
    "rollout/reward_std": 0.4,
    "rollout/completion_tokens_mean": 12.0,
    "rollout/status/completed": 0.75,
    "rollout/status/truncated_length": 0.25,
    "perf/generator_0/busy": 0.9,
    "perf/generator_1/busy": 0.1,
    "time/wait_s": 8.0,
    "time/step_s": 10.0,
    "rollout/count": 100,
    "filter/post/gibberish": 5,
    "filter/post/repetition": 0,
    "filter/post/zero_advantage": 80,
}
PRINTED = (
    "perf/trained_tokens_per_s",
    "policy/age_mean",
    "policy/age_max",
    "batch/dropped_groups",
)
"""Metrics that the line of every step shows."""
WRONG = {
    "a blocked loop": (
        {"perf/event_loop_lag_max_s": 2.34},
        "blocks the event loop of the rollouts, for 2.3 s",
    ),
    "one reward": (
        {"rollout/reward_std": 0.0},
        "in each of the last 3 steps all rewards were equal, 0.5 now: nothing is learned",
    ),
    "all cut off": (
        {"rollout/status/truncated_length": 0.5, "rollout/status/truncated_max_turns": 0.5},
        "was cut off, at 12 tokens on average: raise the task's sampling.max_tokens",
    ),
    "a filter of another vocabulary": (
        {"filter/post/gibberish": 23},
        "the filter gibberish matches 23% of the rollouts",
    ),
    "idle generators": (
        {"perf/generator_0/busy": 0.15},
        "the trainer waits for 80% of the step, and the generators work for 15% of it",
    ),
}


def warned(*steps, compares_rewards=True):
    lines = []
    warnings = StepWarnings(lines.append, compares_rewards=compares_rewards)
    for step in steps:
        warnings.step(HEALTHY | step)
    return lines


@pytest.mark.parametrize("wrong, text", WRONG.values(), ids=WRONG)
def test_three_steps_in_a_row_are_warned_of_once(wrong, text):
    assert warned(wrong, wrong) == []
    (line,) = warned(wrong, wrong, wrong, wrong, {}, wrong, wrong, wrong)
    assert line.startswith("warning: ") and text in line


@pytest.mark.parametrize("wrong, text", WRONG.values(), ids=WRONG)
def test_odd_steps_among_others_are_not(wrong, text):
    assert warned(wrong, wrong, {}, wrong, wrong, {}) == []


def test_a_healthy_run_and_one_that_learns_from_no_reward_are_not_warned_of():
    assert warned({}, {}, {}, {}) == []
    one = {"rollout/reward_std": 0.0}
    assert warned(one, one, one, compares_rewards=False) == []


def test_a_run_that_ends_early_reports_its_final_evaluation_at_the_last_step(tmp_path):
    text = io.StringIO()
    metrics = MetricsLogger.Config(tensorboard=False).build(run_dir=tmp_path)
    context = SimpleNamespace(console=Console(text), restarts=None)
    reports = RunReports(context, metrics=metrics, compares_rewards=True)
    metrics.log(3, {"loss/total": 0.5})  # the line of the last step
    report = ValidationReport(step=3, reward=0.5, metrics={"validation/reward": 0.5})
    reports.ended_early("nothing left to learn", [report])
    assert reports.first_and_last_validation() == [Evaluated(0.5)]
    assert read_metrics(tmp_path / METRICS_FILE)[1] == {"step": 3, "validation/reward": 0.5}
    assert "validation after step 3: reward 0.500" in text.getvalue()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            [{"ce/nll": 2.31}, {"ce/nll": 1.5}, {"ce/nll": 0.845}],
            ["2.310 at step 1 -> 0.845 at step 3"],
        ),
        ([{"ce/nll": 2.31}, {"ce/nll": 1.5, "rollout/reward_mean": 0.5}], []),
        ([{"rollout/reward_mean": 0.5}, {"ce/nll": 2.31}], []),
    ],
)
def test_the_summary_of_a_run_without_rewards_says_how_the_nll_went(steps, said):
    console = Console(text := io.StringIO())
    ignored = SimpleNamespace(log=lambda *_: None, log_samples=lambda *_: None)
    context = SimpleNamespace(console=console, restarts=SimpleNamespace(counts={}))
    reports = RunReports(context, metrics=ignored, compares_rewards=False)
    for step, metrics in enumerate(steps, 1):
        record = StepRecord(
            step=step, metrics=dict.fromkeys(PRINTED, 0) | metrics, groups=[], validations=[]
        )
        reports.step_recorded(record)
    values = dict.fromkeys(("start_val_reward", "final_val_reward"))
    counts = {"steps": len(steps), "total_steps": 3, "wall_time_s": 1.0}
    console.summary(RunSummary(**counts, **values, ledger={}, files={}, course=reports.course))
    lines = text.getvalue().splitlines()
    assert [line.removeprefix("nll         ") for line in lines if line.startswith("nll ")] == said


def test_the_examples_of_the_last_evaluation_are_counted_over_its_tasks():
    console = Console(io.StringIO())
    context = SimpleNamespace(console=console, restarts=None)
    reports = RunReports(
        context, metrics=SimpleNamespace(log=lambda step, metrics: None), compares_rewards=True
    )
    assert reports.validation_examples is None
    metrics = {"validation/a/examples": 4, "validation/b/examples": 2, "validation/reward": 0.5}
    reports.started(ValidationReport(step=0, reward=0.5, metrics=metrics))
    assert reports.validation_examples == 6
