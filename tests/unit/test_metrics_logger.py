import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb

from torchtitan.experiments.rl.bounds import check_config, check_fields
from torchtitan.experiments.rl.checkpointing.run_files import cut_back, sizes
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.metrics import (
    METRICS_FILE,
    MetricsLogger,
    read_metrics,
    without_timing,
)
from torchtitan.experiments.rl.observability.trackers import TrackedRun, WandbTracker


def jsonl_only(run_dir, **kwargs) -> MetricsLogger:
    return MetricsLogger.Config(tensorboard=False).build(run_dir=run_dir, **kwargs)


def lines(run_dir) -> list[str]:
    return (run_dir / METRICS_FILE).read_text().splitlines()


def test_a_line_holds_the_step_first_and_the_other_keys_sorted(tmp_path):
    jsonl_only(tmp_path).log(
        3, {"reward/mean": np.float32(0.5), "loss": torch.tensor(2.0), "groups": np.int64(4)}
    )
    assert lines(tmp_path) == ['{"step": 3, "groups": 4, "loss": 2.0, "reward/mean": 0.5}']


def test_a_line_is_on_disk_before_close(tmp_path):
    metrics = jsonl_only(tmp_path)
    metrics.log(1, {"loss": 1.0})
    assert len(lines(tmp_path)) == 1


def test_non_finite_values_become_null_and_are_named_in_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        jsonl_only(tmp_path).log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    assert json.loads(lines(tmp_path)[0], parse_constant=pytest.fail) == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 1.0,
    }
    assert "a, b" in caplog.text


def test_without_timing_keeps_what_a_second_run_repeats():
    record = {
        "step": 1,
        "time/wait_s": 0.1,
        "perf/tokens_per_second": 9.0,
        "timeouts": 2,
        "loss": 0.5,
    }
    assert without_timing(record) == {"step": 1, "timeouts": 2, "loss": 0.5}


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_is_logged_once_and_in_order(tmp_path, step):
    metrics = jsonl_only(tmp_path)
    metrics.log(2, {})
    with pytest.raises(ValueError, match=f"step {step} after step 2"):
        metrics.log(step, {})


def test_a_metric_cannot_hide_the_step(tmp_path):
    with pytest.raises(ValueError, match="called step"):
        jsonl_only(tmp_path).log(1, {"step": 7})


def test_a_resumed_run_goes_on_with_the_record_that_its_checkpoint_has(tmp_path):
    before = jsonl_only(tmp_path)
    for step in (1, 2):
        before.log(step, {"loss": float(step)})
    offsets = sizes(tmp_path)
    before.log(3, {"loss": 3.0})
    before.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    cut_back(tmp_path, offsets)
    after = jsonl_only(tmp_path, resume_step=2)
    after.log(3, {"loss": 30.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path / METRICS_FILE)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_evaluations_that_end_after_the_last_step_are_a_line_more_of_it(tmp_path):
    metrics = jsonl_only(tmp_path)
    with pytest.raises(ValueError, match="no step was logged"):
        metrics.log_more({"validation/reward": 0.5})
    metrics.log(7, {"loss": 1.0})
    metrics.log_more({"validation/reward": 0.5})
    assert lines(tmp_path)[1:] == ['{"step": 7, "validation/reward": 0.5}']


def test_a_new_run_starts_a_new_record(tmp_path):
    for loss in (1.0, 2.0):
        jsonl_only(tmp_path).log(1, {"loss": loss})
    assert lines(tmp_path) == ['{"step": 1, "loss": 2.0}']


def test_tensorboard_gets_the_finite_values(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = MetricsLogger.Config(jsonl=False).build(run_dir=tmp_path)
    metrics.log(5, {"reward/mean": 0.25, "loss": math.nan})
    metrics.close()
    metrics.close()  # a second close does nothing
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(5, 0.25)]
    assert not (tmp_path / METRICS_FILE).exists()


def test_offline_wandb_writes_its_run_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    metrics = MetricsLogger.Config(tensorboard=False, wandb=True).build(
        run_dir=tmp_path, run_config={"seed": 1}
    )
    metrics.log(1, {"loss": 0.5})
    metrics.close()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert record.stat().st_size > 0
    resumed = WandbTracker.Config().build(run=TrackedRun(folder=tmp_path, config={}, resume_step=1))
    assert resumed.wandb_run.id == record.stem.removeprefix("run-")  # W&B goes on with the same run
    resumed.close()


@pytest.mark.parametrize("server_can", [True, False])
def test_a_resumed_run_cuts_its_online_wandb_run_back_where_the_server_can(
    tmp_path, monkeypatch, caplog, server_can
):
    asked = []

    def init(**arguments):
        asked.append({key: arguments.get(key) for key in ("id", "resume", "resume_from")})
        if "resume_from" in arguments and not server_can:
            raise wandb.errors.CommError("rewind is not enabled")
        return SimpleNamespace(finish=lambda: None)

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(wandb, "init", init)
    config = MetricsLogger.Config(tensorboard=False, wandb=True, wandb_mode="online")
    config.build(run_dir=tmp_path).close()
    config.build(run_dir=tmp_path, resume_step=20).close()
    run_id = asked[0]["id"]
    allowed = {"id": run_id, "resume": "allow", "resume_from": None}
    cut_back = {"id": None, "resume": None, "resume_from": f"{run_id}?_step=20"}
    assert asked == ([allowed, cut_back] if server_can else [allowed, cut_back, allowed])
    assert ("can't cut its run" in caplog.text) is not server_can


def test_online_wandb_without_a_key_is_a_one_line_config_error(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError) as error:
        check_config(MetricsLogger.Config(wandb=True, wandb_mode="online"), field="metrics")
    assert (
        str(error.value)
        == "metrics.wandb_mode = 'online': WANDB_API_KEY is not set: set it, or use offline"
    )


def test_an_unknown_wandb_mode_names_the_known_ones():
    with pytest.raises(
        ConfigError,
        match=r"metrics.wandb_mode = 'on': must be one of 'offline', 'online', 'disabled'",
    ):
        check_fields(MetricsLogger.Config(wandb_mode="on"), field="metrics")
