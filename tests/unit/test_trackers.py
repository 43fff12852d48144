"""Trackers: what they get, and that none ends or stalls a run, shows a key, or acts on a terminal."""

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb

from tests.fakes.rollouts import group_of, rollout_of, turn_of
from tests.fakes.waiting import wait_until
from torchtitan.experiments.rl.errors import MissingError
from torchtitan.experiments.rl.observability import metrics as metrics_module
from torchtitan.experiments.rl.observability.metrics import (
    MOST_CHARACTERS,
    MetricsLogger,
    conversation,
    read_metrics,
    samples_table,
)
from torchtitan.experiments.rl.observability.trackers import Tracker
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    RolloutGroup,
)

KEY = "0123456789abcdef0123456789abcdef01234567"


class Remembers(Tracker):
    """As a user writes one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        shelf: list = field(default_factory=list)

    def log(self, step, metrics):
        self.config.shelf.append((step, dict(metrics)))

    def log_table(self, step, table):
        self.config.shelf.append((step, table.name, len(table.rows)))

    def close(self):
        self.config.shelf.append("closed")


class Fails(Tracker):
    def log(self, step, metrics):
        raise ConnectionError(f"403: key {KEY} is not known\033[2J")


class Exits(Tracker):
    def __init__(self, config, *, run):
        sys.exit("no account")


class Hangs(Tracker):
    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        began: threading.Event = field(default_factory=threading.Event)
        may_end: threading.Event = field(default_factory=threading.Event)

    def log(self, step, metrics):
        self.config.began.set()
        self.config.may_end.wait()


class OnlyScalars(Tracker):
    def log(self, step, metrics):
        pass


def message(text: str, role: str = "user") -> dict:
    return {"role": role, "content": text}


def group_saying(*texts: str, number: int = 0) -> RolloutGroup:
    rollouts = []
    for index, text in enumerate(texts):
        turn = turn_of([], [])
        turn.prompt_messages = [message("What is 2 + 2?")]
        turn.assistant_message = message(text, "assistant")
        rollouts.append(
            rollout_of(turn, group_id=f"g{number}", index=index, task="sums", reward=0.5)
        )
    return group_of(*rollouts, data_sample=DataSample(sample_id=str(number), env_input=None))


def logger_of(folder, *trackers, **fields) -> MetricsLogger:
    return MetricsLogger.Config(tensorboard=False, trackers=list(trackers), **fields).build(
        run_dir=folder
    )


def test_a_tracker_of_ones_own_gets_every_step_in_order_a_table_in_its_turn_and_an_end(tmp_path):
    config = Remembers.Config()
    metrics = logger_of(tmp_path, config, samples_every=2)
    for step in (1, 2, 3):
        metrics.log(step, {"loss": step / 2, "bad": float("nan")})
        metrics.log_samples(step, [group_saying("4")])
    metrics.close()
    metrics.close()
    losses = [(step, {"loss": step / 2}) for step in (1, 2, 3)]
    assert config.shelf == [*losses[:2], (2, "samples", 1), losses[2], "closed"]


@pytest.mark.parametrize("tracker", [Fails, Exits])
def test_a_tracker_that_fails_is_one_warning_without_keys_and_the_others_go_on(
    tmp_path, caplog, monkeypatch, tracker
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    other = Remembers.Config()
    metrics = logger_of(tmp_path, tracker.Config(), other)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            metrics.log(step, {"loss": 1.0})
        metrics.close()
    (warning,) = [record.getMessage() for record in caplog.records]
    said = {
        Fails: "ConnectionError: 403: key (WANDB_API_KEY) is not known",
        Exits: "SystemExit: no account",
    }[tracker]
    assert (
        warning.startswith(f"nothing more is sent to metrics.trackers[0]: {said}")
        and KEY not in warning
    )
    assert len(other.shelf) == 6 and len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def test_a_tracker_that_hangs_stalls_neither_the_steps_nor_the_end(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(metrics_module, "QUEUED", 5)
    monkeypatch.setattr(metrics_module, "CLOSE_LIMIT_S", 0.01)
    full, ending = Hangs.Config(), Hangs.Config()
    with caplog.at_level(logging.WARNING):
        metrics = logger_of(tmp_path, full)
        metrics.log(1, {"loss": 1.0})
        wait_until(full.began.is_set)
        for step in range(2, 20):
            metrics.log(step, {"loss": 1.0})
        metrics.close()
        assert "metrics.trackers[0]: it has taken nothing of the last 5 entries" in caplog.text
        assert len(caplog.records) == 1 and len(read_metrics(tmp_path / "metrics.jsonl")) == 19
        metrics = logger_of(tmp_path / "ending", ending)
        metrics.log(1, {"loss": 1.0})
        wait_until(ending.began.is_set)
        metrics.close()
    assert "it took more than 0.01 s to end" in caplog.text
    full.may_end.set(), ending.may_end.set()


def test_what_a_model_said_is_shown_escaped_and_with_a_bound():
    table = samples_table(
        [
            group_saying("\033[2J<script>alert(1)</script>\u202e", number=number)
            for number in range(9)
        ],
        3,
    )
    assert (
        table.columns == ("rollout", "task", "reward", "status", "conversation")
        and len(table.rows) == 3
    )
    assert (
        table.rows[0][4]
        == "user: What is 2 + 2?\n\nassistant: \\x1b[2J<script>alert(1)</script>\\u202e"
    )
    long = conversation(group_saying("a" * 2**20).rollouts[0])
    assert (
        len(long) <= MOST_CHARACTERS and long.startswith("user: What") and long.endswith("a" * 100)
    )
    assert "cut from 1,048," in long


def test_the_rollouts_of_a_table_are_of_different_groups():
    groups = [group_saying("first", "second", number=number) for number in range(3)]
    assert [row[0] for row in samples_table(groups, 2).rows] == ["g0/0", "g1/1"]
    assert samples_table([], 4).rows == [] and len(samples_table(groups, 99).rows) == 3


def test_tensorboard_shows_conversations_as_blocks_of_code(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsLogger.Config(jsonl=False, samples_every=1).build(run_dir=tmp_path)
    metrics.log(1, {"loss": 1.0})
    metrics.log_samples(1, [group_saying("# <b>4</b>\n\033[31m")])
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("samples/text_summary")
    (text,) = (value.decode() for value in event.tensor_proto.string_val)
    assert event.step == 1 and all(line.startswith("    ") for line in text.splitlines())
    assert "    assistant: # <b>4</b>\n    \\x1b[31m" in text


def test_wandb_shows_conversations_as_a_table_and_no_key_is_in_the_run_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    config = MetricsLogger.Config(tensorboard=False, wandb=True, samples_every=1)
    metrics = config.build(run_dir=tmp_path, run_config={"seed": 1})
    metrics.log(1, {"loss": 1.0})
    metrics.log_samples(1, [group_saying("the answer is 4")])
    metrics.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    (table,) = [path for path in files if path.name.endswith(".table.json")]
    assert json.loads(table.read_text())["data"][0][-1].endswith("assistant: the answer is 4")
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_wandb_prints_nothing_of_itself_on_the_terminal_of_a_run(tmp_path):
    """In a process of its own: wandb reads its settings once. An imported openai has it advertise."""
    code = (
        "import sys; from pathlib import Path; import openai\n"
        "from torchtitan.experiments.rl.observability.metrics import MetricsLogger\n"
        "config = MetricsLogger.Config(tensorboard=False, wandb=True)\n"
        "metrics = config.build(run_dir=Path(sys.argv[1]))\n"
        "metrics.log(1, {'loss': 1.0}); metrics.close()"
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=own,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


class Trackio:
    """As much of trackio as the tracker uses, with the points that a dashboard would show."""

    def __init__(self):
        self.__spec__ = object()  # by which Python sees that it is installed
        self.points, self.runs = [], []
        self.Table = lambda columns, data: {"rows": len(data)}

    def init(self, **arguments):
        self.runs.append(arguments)
        print("* Trackio project initialized")
        return SimpleNamespace(
            log=lambda metrics, step: self.points.append((step, *metrics)),
            finish=lambda: print("* done"),
        )


def test_a_resumed_run_goes_on_in_trackio_without_a_point_twice(tmp_path, monkeypatch, capsys):
    stub = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", stub)
    for resume_step, steps in ((None, (1, 2, 3)), (2, (3, 4))):
        config = MetricsLogger.Config(tensorboard=False, trackio=True, samples_every=4)
        metrics = config.build(run_dir=tmp_path, resume_step=resume_step, run_config={"seed": 1})
        for step in steps:
            metrics.log(step, {"loss": 1.0})
            metrics.log_samples(step, [group_saying("4")])
        metrics.close()
    assert stub.points == [(1, "loss"), (2, "loss"), (3, "loss"), (4, "loss"), (4, "samples")]
    assert [run["resume"] for run in stub.runs] == ["never", "allow"] and {
        run["name"] for run in stub.runs
    } == {tmp_path.name}
    assert capsys.readouterr().out == ""


def test_trackio_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(MissingError) as error:
        MetricsLogger.Config(trackio=True).validate(field="metrics")
    assert (
        str(error.value)
        == "metrics.trackio_project = 'torchtitan-rl': trackio is not installed: pip install trackio"
    )


def test_a_tracker_says_what_is_wrong_with_its_config_by_its_place():
    class Demanding(Tracker):
        @dataclass(kw_only=True, slots=True)
        class Config(Tracker.Config):
            def validate(self, *, field: str) -> None:
                raise MissingError(f"{field}.url", None, "give one")

    with pytest.raises(MissingError, match=r"metrics.trackers\[1\].url = None: give one"):
        MetricsLogger.Config(trackers=[OnlyScalars.Config(), Demanding.Config()]).validate(
            field="metrics"
        )


def test_a_table_for_a_tracker_that_shows_none_is_no_error(tmp_path, caplog):
    metrics = logger_of(tmp_path, OnlyScalars.Config(), samples_every=1)
    metrics.log(1, {"loss": 1.0})
    metrics.log_samples(1, [group_saying("4")])
    metrics.close()
    assert caplog.text == ""


def test_wandb_without_a_network_ends_no_run(tmp_path, monkeypatch, caplog):
    def init(**arguments):
        raise wandb.errors.CommError(f"Network error (ConnectionError), key={KEY}")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb, "init", init)
    config = MetricsLogger.Config(tensorboard=False, wandb=True, wandb_mode="online")
    metrics = config.build(run_dir=tmp_path)
    metrics.log(1, {"loss": 1.0})
    metrics.close()
    assert (
        "nothing more is sent to metrics.wandb: CommError: Network error" in caplog.text
        and KEY not in caplog.text
    )
