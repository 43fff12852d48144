import asyncio
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.terminal import Terminal
from torchtitan.experiments.rl.observability.console import (
    TITLE_EVERY,
    WIDTH,
    Console,
    RunSummary,
    step_line,
    title_line,
)
from torchtitan.experiments.rl.process.trace import Stopwatch
from torchtitan.experiments.rl.simulation.clock import run_virtually


def report(step=12, val=None, **changes):
    """The arguments of ``step_line``."""
    metrics = {
        "rollout/reward_mean": 0.4832,
        "perf/trained_tokens_per_s": 11_960.0,
        "policy/age_mean": 0.75,
    }
    metrics |= {
        "policy/age_max": 2,
        "time/wait_s": 0.1,
        "time/train_s": 61.25,
        "time/sync_s": 0.02,
        "batch/dropped_groups": 0,
    }
    return (
        step,
        110,
        metrics | {name.replace("__", "/"): value for name, value in changes.items()},
        val,
    )


def printed_step(console, **changes):
    step, _, metrics, val = report(**changes)
    console.step(step, metrics, val)


def summary(**changes) -> RunSummary:
    values = dict(
        steps=110, total_steps=110, wall_time_s=131.0, start_val_reward=0.31, final_val_reward=0.725
    )
    columns = {
        "dispatched": 28160,
        "filtered/post/zero_advantage": 150,
        "failed/timeout": 10,
        "trained": 28000,
        "lost": 0,
    }
    values |= dict(ledger={f"sums/{column}": count for column, count in columns.items()})
    return RunSummary(
        **values | dict(files={"metrics": Path("outputs/demo/metrics.jsonl")}) | changes
    )


def summary_lines(summary: RunSummary) -> list[str]:
    """Return the lines that a summary prints where there is no terminal."""
    Console(stream := io.StringIO()).summary(summary)
    return stream.getvalue().splitlines()


def test_a_step_line_shows_every_field_in_short():
    line = step_line(*report(val=(0.5, 10)))
    assert line.split() == "12/110 0.483 0.500@10 12.0k 0.75/2 0.10 61.2 0.02 0".split()


def test_a_step_without_validation_or_reward_says_so_without_moving_its_columns():
    line = step_line(*report(rollout__reward_mean=None))
    assert line.split() == "12/110 - 12.0k 0.75/2 0.10 61.2 0.02 0".split()
    assert len(line) == len(step_line(*report(val=(0.5, 10))))


def shown_by(*steps: dict[str, float]) -> list[list[str]]:
    """The first two cells of each line that steps with these metrics print."""
    console = Console(stream := io.StringIO())
    _, _, base, _ = report()
    del base["rollout/reward_mean"]
    for step, metrics in enumerate(steps, 1):
        console.step(step, base | metrics)
    return [line.split()[:2] for line in stream.getvalue().splitlines()]


def test_steps_on_demonstrations_alone_show_their_negative_log_likelihood():
    steps = {"ce/nll": 2.31, "loss/total": 1.0}, {"ce/nll": 0.845, "loss/total": 0.5}
    assert shown_by(*steps) == [["step", "nll"], ["1/0", "2.310"], ["2/0", "0.845"]]


def test_steps_without_reward_and_demonstrations_show_their_loss():
    assert shown_by({"loss/total": 1.25}) == [["step", "loss"], ["1/0", "1.250"]]


def test_once_a_step_has_had_a_reward_the_column_stays_that_of_the_reward():
    assert shown_by({"ce/nll": 2.0}, {"rollout/reward_mean": 0.5}, {"ce/nll": 1.0}) == [
        ["step", "nll"],
        ["1/0", "2.000"],
        ["step", "reward"],
        ["2/0", "0.500"],
        ["3/0", "-"],
    ]


@pytest.mark.parametrize("scale", [1, 1_000])
def test_columns_end_where_their_titles_end(scale):
    line = step_line(
        *report(
            9 * scale,
            perf__trained_tokens_per_s=900.0 * scale,
            time__wait_s=1.0 * scale,
            batch__dropped_groups=scale,
        )
    )
    assert len(line) == len(title_line()) <= WIDTH == 80


def test_titles_return_before_they_scroll_away():
    stream = io.StringIO()
    console = Console(stream)
    for step in range(1, TITLE_EVERY + 2):
        printed_step(console, step=step)
    printed = stream.getvalue().splitlines()
    assert [i for i, line in enumerate(printed) if line == title_line()] == [0, TITLE_EVERY + 1]


def test_the_header_has_a_labelled_line_for_each_fact_and_an_empty_one_at_its_end():
    Console(stream := io.StringIO()).header(
        Path("outputs/demo"),
        config="rl_grpo_qwen3_debug",
        model="tiny_qwen3, 0.9M parameters",
        sizes={f"a rather long size number {i}": i for i in range(8)},
    )
    sizes = ", ".join(f"a rather long size number {i} {i}" for i in range(8))
    assert stream.getvalue().split("\n") == [
        "run         demo",
        "config      rl_grpo_qwen3_debug",
        "model       tiny_qwen3, 0.9M parameters",
        f"sizes       {sizes}",
        "folder      outputs/demo",
        "",
        "",
    ]


def test_the_summary_says_how_far_how_long_what_was_learned_and_where_it_is():
    assert summary_lines(summary()) == [
        "",
        "steps       110 of 110 in 2 min 11 s, done",
        "validation  reward 0.310 -> 0.725 (+0.415)",
        "rollouts    28,160 sums dispatched, 150 sums left out (zero advantage), "
        "10 sums failed (timeout), 28,000 sums trained on",
        "metrics     outputs/demo/metrics.jsonl",
    ]


VALIDATIONS = [
    # rewards of the first and the last evaluation, failed attempts of each, the line
    ((0.31, 0.725), ((0, 32), (0, 32)), "reward 0.310 -> 0.725 (+0.415)"),
    (
        (0.45, 0.742),
        ((12, 32), (1, 32)),
        "reward 0.450 -> 0.742 (+0.292); 12 of 32 attempts failed at first; 1 of 32 attempts failed at last",
    ),
    (
        (0.45, 0.742),
        ((0, 32), (1, 32)),
        "reward 0.450 -> 0.742 (+0.292); 1 of 32 attempts failed at last",
    ),
    ((0.45, None), ((0, 32), (32, 32)), "reward 0.450 -> -; 32 of 32 attempts failed at last"),
    ((0.45, None), ((12, 32), (0, 0)), "reward 0.450; 12 of 32 attempts failed"),
    ((None, None), ((1_000, 1_000), (0, 0)), "reward -; 1,000 of 1,000 attempts failed"),
    ((0.45, None), ((0, 32), (0, 0)), None),
    ((None, None), ((0, 0), (0, 0)), None),
]


@pytest.mark.parametrize("rewards, failures, text", VALIDATIONS)
def test_the_summary_says_how_many_attempts_of_an_evaluation_failed(rewards, failures, text):
    lines = summary_lines(
        summary(
            start_val_reward=rewards[0],
            final_val_reward=rewards[1],
            start_val_failures=failures[0],
            final_val_failures=failures[1],
        )
    )
    found = [line for line in lines if line.startswith("validation  ")]
    assert found == ([f"validation  {text}"] if text else [])


def test_the_examples_of_a_small_evaluation_are_counted_before_its_failures():
    (line,) = [
        line
        for line in summary_lines(summary(val_examples=20, final_val_failures=(2, 20)))
        if line.startswith("validation")
    ]
    assert line == (
        "validation  reward 0.310 -> 0.725 (+0.415) (20 examples); 2 of 20 attempts failed at last"
    )


def test_the_summary_of_a_resumed_run_says_which_steps_its_time_is_of():
    assert (
        summary_lines(summary(steps_before=86))[1]
        == "steps       110 of 110, 24 of them in 2 min 11 s, done"
    )


def test_files_in_the_run_folder_are_named_from_there_and_others_in_full():
    files = {"metrics": Path("/runs/demo/metrics.jsonl"), "profile": Path("/elsewhere/trace.json")}
    lines = summary_lines(summary(files=files, run_dir=Path("/runs/demo")))
    assert lines[-4:-1] == [
        "folder      /runs/demo",
        "metrics     metrics.jsonl",
        "profile     /elsewhere/trace.json",
    ]


def test_the_run_folder_is_named_from_the_current_one_where_it_is_in_there(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "folder      outputs/demo" in summary_lines(
        summary(files={}, run_dir=tmp_path / "outputs" / "demo")
    )


@pytest.mark.parametrize(
    ("examples", "said"), [(6, " (6 examples)"), (1, " (1 example)"), (30, ""), (None, "")]
)
def test_the_summary_says_of_how_few_examples_a_validation_was(examples, said):
    lines = summary_lines(summary(val_examples=examples))
    assert f"validation  reward 0.310 -> 0.725 (+0.415){said}" in lines


def test_the_summary_of_a_stopped_run_says_why_and_claims_no_validation():
    lines = summary_lines(
        summary(steps=40, wall_time_s=8_000, final_val_reward=None, stopped_by="interrupt")
    )
    assert lines[1] == "steps       40 of 110 in 2 h 13 min, stopped by interrupt"
    assert not any("validation" in line for line in lines)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A current folder with an environment in it."""
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("python", "rl-train", "rl-report", "rl-play", "rl-evaluate"):
        (programs / name).write_text("")
        (programs / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("PATH", "/nowhere")
    return programs


def next_commands(tmp_path, **changes) -> list[str]:
    files = {name: tmp_path / name for name in ("policy", "checkpoint")}
    return summary_lines(
        summary(**dict(files=files, run_dir=tmp_path / "outputs/my run") | changes)
    )[-4:]


@pytest.mark.parametrize(
    ("started_as", "on_path", "words"),
    [
        ("train.py", False, ".venv/bin/python -m torchtitan.experiments.rl.{module}"),
        ("train.py", True, "python -m torchtitan.experiments.rl.{module}"),
        ("torchtitan_rl/__main__.py", True, "python -m torchtitan_rl {module}"),
        (".venv/bin/rl-train", False, ".venv/bin/{script}"),
        (".venv/bin/rl-train", True, "{script}"),
    ],
)
def test_the_summary_ends_with_the_commands_that_come_next_as_this_one_was_started(
    environment, tmp_path, monkeypatch, started_as, on_path, words
):
    monkeypatch.setattr("sys.argv", [str(tmp_path / started_as)])
    monkeypatch.delitem(sys.modules, "torchtitan_rl", raising=False)
    if started_as.startswith("torchtitan_rl"):
        monkeypatch.setitem(sys.modules, "torchtitan_rl", ModuleType("torchtitan_rl"))
    if on_path:
        monkeypatch.setenv("PATH", str(environment))
    report, play, evaluate, train = (
        words.format(module=module, script=script)
        for module, script in zip(
            ("report", "play", "evaluate", "train"),
            ("rl-report", "rl-play", "rl-evaluate", "rl-train"),
            strict=True,
        )
    )
    assert next_commands(tmp_path) == [
        f"see it      {report} 'outputs/my run'",
        f"try it      {play} --model 'outputs/my run'",
        f"measure it  {evaluate} --model 'outputs/my run'",
        f"go on with  {train} --resume 'outputs/my run' --steps 220",
    ]
    assert next_commands(tmp_path, stopped_by="SIGINT")[-2:] == [
        f"see it      {report} 'outputs/my run'",
        f"go on with  {train} --resume 'outputs/my run'",
    ]
    why = "validation/reward, which is 0.75 at step 20 (stop_at.value = 0.75)"
    assert next_commands(tmp_path, stopped_by=why, ended_early=True)[-3:] == [
        f"see it      {report} 'outputs/my run'",
        f"try it      {play} --model 'outputs/my run'",
        f"measure it  {evaluate} --model 'outputs/my run'",
    ], "a resume would end at once"
    failed = next_commands(tmp_path, stopped_by="an error (RunError)", files={})
    assert failed[-2:] == [
        f"see it      {report} 'outputs/my run'",
        f"begin again {train} --resume 'outputs/my run'",
    ]


def test_what_a_run_has_not_saved_or_measured_is_not_suggested(environment, tmp_path):
    labels = [
        line.split()[0]
        for line in next_commands(tmp_path, start_val_reward=None, final_val_reward=None)
    ]
    assert "measure" not in labels and "try" in labels
    assert not {"try", "measure", "go"} & {
        line.split()[0] for line in next_commands(tmp_path, files={})
    }


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch):
    def printed(stream: io.StringIO) -> str:
        printed_step(Console(stream), val=(0.5, 10))
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033[" in printed(Terminal())
    assert "\033[" not in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in printed(Terminal())


def test_everything_printed_is_ascii():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(stream)
    printed_step(console)
    console.summary(summary())


def test_a_stopwatch_adds_up_spans_of_a_name_and_starts_anew_after_a_lap():
    async def work():
        watch = Stopwatch()
        with watch.span("wait"):
            await asyncio.sleep(2.0)
        await asyncio.sleep(8.0)
        with pytest.raises(KeyError), watch.span("train"):
            await asyncio.sleep(1.5)
            raise KeyError
        with watch.span("wait"):
            await asyncio.sleep(0.25)
        return watch.lap(), watch.lap()

    assert run_virtually(work) == ({"wait": 2.25, "train": 1.5}, {})
