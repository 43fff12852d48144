"""The terminal shows how many attempts of an evaluation failed, and why the first of each kind did."""

import io
from types import SimpleNamespace

import pytest

from tests.fakes.contexts import context_of
from tests.fakes.datasets import Numbers
from tests.fakes.policy import ScriptedPolicy
from tests.fakes.tasks import ListTask
from torchtitan.experiments.rl.loops.group_runner import LocalRunner
from torchtitan.experiments.rl.loops.step_metrics import StepRecord
from torchtitan.experiments.rl.loops.validation import Validator
from torchtitan.experiments.rl.observability.console import Console
from torchtitan.experiments.rl.observability.metrics import MetricsLogger, read_metrics
from torchtitan.experiments.rl.rollouts.record_file import METRICS_FILE
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric
from torchtitan.experiments.rl.tasks.task import ValidationConfig
from torchtitan.experiments.rl.watch.alarms import FirstFailures
from torchtitan.experiments.rl.watch.reports import Evaluated, RunReports

STEP = {
    "rollout/reward_mean": 0.5,
    "rollout/reward_std": 0.5,
    "rollout/completion_tokens_mean": 4.0,
    "perf/trained_tokens_per_s": 100.0,
    "policy/age_mean": 0.0,
    "policy/age_max": 0,
    "batch/dropped_groups": 0,
}
CAUSE = "reward function 'score': KeyError: 'a' (test_failed_evaluations.py:"


@pytest.fixture
def terminal(tmp_path, renderer, tokenizer):
    """Return the printed lines of a run whose evaluations fail for the given examples."""
    broken: set[int] = set()

    def score(completion, example):
        if example in broken:
            raise KeyError("a")
        return 1.0

    def ranked(completions, example):
        return [len(completions) / (len(completions) - 1)] * len(completions)

    async def play(*fails: set[int], group_level: bool = False, tasks=("sums",)) -> list[str]:
        """Evaluate version 0 and one version a step, of which the given examples fail."""
        reward = RewardFn(ranked, group_level=True) if group_level else RewardFn(score)
        config = ListTask.Config(
            validation=Numbers.Config(count=4),
            rubric=Rubric.Config(reward_fns=[reward]),
            max_retries=0,
        )
        built = {}
        for name in tasks:
            built[name] = config.build(name=name, context=context_of(renderer))
            built[name].prepared = []
            built[name].made = []
        stream = io.StringIO()
        console = Console(stream)
        metrics = MetricsLogger.Config(tensorboard=False).build(run_dir=tmp_path)
        context = SimpleNamespace(console=console, restarts=SimpleNamespace(counts={}))
        reports = RunReports(context, metrics=metrics, compares_rewards=True)
        validator = Validator(
            built,
            LocalRunner(ScriptedPolicy(tokenizer), seed=0),
            ValidationConfig(examples=4, every=1),
            on_group=FirstFailures(console.note).validation_arrived,
        )
        reports.begin(0, 20)
        for step, examples in enumerate(fails):
            broken.clear()
            broken.update(examples)
            validator.start(step)
            await validator.wait()
            taken = validator.take()
            if step == 0:
                reports.started(taken[0])
            else:
                of_step = STEP | taken[0].metrics
                record = StepRecord(step=step, metrics=of_step, groups=[], validations=taken)
                reports.step_recorded(record)
        metrics.close()
        play.reports = reports
        lines = stream.getvalue().splitlines()
        return [
            line
            for line in lines
            if not line.startswith((" ", "Traceback", "KeyError", "ZeroDivisionError"))
        ]

    return play


async def test_where_some_attempts_fail_their_number_and_the_first_cause_are_printed(
    terminal, tmp_path
):
    first, validation = await terminal({1, 3})
    assert first.startswith(f"a rollout of the validation failed: {CAUSE}")
    assert first.endswith("(task sums); the first of its kind, logs/controller.jsonl has all")
    assert validation == ("validation before the first step: reward 1.000, 2 of 4 attempts failed")
    (metrics,) = read_metrics(tmp_path / METRICS_FILE)
    assert (metrics["validation/sums/failed"], metrics["validation/sums/attempts"]) == (2, 4)


async def test_where_none_fails_nothing_is_said_of_failures(terminal):
    lines = await terminal(set(), set())
    assert lines == ["validation before the first step: reward 1.000"]


async def test_failures_of_a_later_evaluation_are_a_line_under_the_step(terminal):
    lines = await terminal(set(), {2}, {2})
    # The cause is printed with the first of its kind.
    assert lines[0] == "validation before the first step: reward 1.000"
    assert lines[1].startswith(f"a rollout of the validation failed: {CAUSE}")
    assert lines[2:] == [
        "validation of version 1: reward 1.000, 1 of 4 attempts failed",
        "validation of version 2: reward 1.000, 1 of 4 attempts failed",
    ]
    assert terminal.reports.first_and_last_validation() == [
        Evaluated(1.0, failed=0, attempts=4),
        Evaluated(1.0, failed=1, attempts=4),
    ]


async def test_a_later_evaluation_of_which_all_fails_is_warned_of_each_time(terminal):
    everything = {0, 1, 2, 3}
    lines = await terminal(set(), everything, everything)
    for version, (counts, warning) in enumerate([lines[2:4], lines[4:6]], 1):
        assert counts == f"validation of version {version}: no reward, 4 of 4 attempts failed"
        assert warning.startswith(
            f"warning: validation of version {version}: all 4 attempts of task sums failed, the first "
            f"with: {CAUSE}"
        )
    assert len(lines) == 6
    assert terminal.reports.first_and_last_validation()[1] == Evaluated(None, failed=4, attempts=4)


async def test_a_group_level_reward_that_needs_two_fails_a_validation_of_one_attempt(terminal):
    lines = await terminal(set(), group_level=True)
    cause = "reward function 'ranked': ZeroDivisionError: division by zero"
    assert lines[0].startswith(f"a rollout of the validation failed: {cause} (")
    assert lines[1] == "validation before the first step: no reward, 4 of 4 attempts failed"
    assert len(lines) == 2  # the run ends with the error of the training loop


async def test_failures_are_counted_over_all_tasks(terminal):
    lines = await terminal({0}, tasks=("sums", "words"))
    assert lines[-1] == "validation before the first step: reward 1.000, 2 of 8 attempts failed"
    assert [line.partition("(task ")[2].partition(")")[0] for line in lines[:-1]] == [
        "sums",
        "words",
    ]
