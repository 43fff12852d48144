"""Synchronous runs of the command repeat themselves: side by side, resumed, and on more ranks and replicas."""

import gzip
import json
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.terminal import Screen
from tests.integration.command_runs import Run, assert_ledger_balances, wait_for
from torchtitan.experiments.rl.command.hub import model_folder
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.observability.console import typed_command
from torchtitan.experiments.rl.observability.metrics import without_timing
from torchtitan.experiments.rl.rollouts.recorder import read_rollouts
from torchtitan.experiments.rl.tools.report.run import ReportedRun
from torchtitan.experiments.rl.types import TrainingSample


def same_but_for_the_clock(left: list[dict], right: list[dict]) -> None:
    """Compare the records of two runs."""
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        ours, theirs = without_timing(ours), without_timing(theirs)
        keys = ours.keys() | theirs.keys()
        assert {
            key: (ours.get(key), theirs.get(key))
            for key in keys
            if ours.get(key) != theirs.get(key)
        } == {}


RECORDED = "--recorder.trainer-logprobs"


SYNC = [
    *"--max-offpolicy-steps 0 --seed 7 --steps 4 --validation.every 2".split(),
    *"--trainer.no-save-final-model --checkpoint.interval 1 --checkpoint.keep 9".split(),
    "--provision.share-gpus",
]
WIDE = [
    *"--max-offpolicy-steps 0 --seed 7 --steps 100000 --validation.every 0".split(),
    *"--trainer.ranks 2 --generator.replicas 2".split(),
]


@pytest.fixture(scope="module")
def sync_run(start) -> Run:
    return start(*SYNC).ended_well()


@pytest.fixture(scope="module")
def wide_run(start) -> Run:
    """Run of two ranks and two generators, whose engines read each version from the ranks' buffers. It runs at a terminal."""
    other = ("--profile-steps", "2:2", RECORDED, "--generator.weights", "device")
    return stopped_after(3, start(*WIDE, *other, columns=80))


def stopped_after(step: int, run: Run) -> Run:
    """End the run by Ctrl-C when it has taken this step."""
    run.until_step(step)
    run.send(signal.SIGINT)
    assert run.wait() == 130, run.out
    return run


def test_resumed_synchronous_run_has_the_metrics_of_the_uninterrupted_one(
    sync_run, tmp_path_factory, start
):
    """Neither the resumption changes a metric, nor an engine that sleeps while the trainer steps."""
    # Files and checkpoints as if killed while the third checkpoint was written, after a weight update and an evaluation.
    folder = tmp_path_factory.mktemp("copied") / "run"
    shutil.copytree(sync_run.folder, folder)
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step-00000{step}")
    index = ReportedRun(folder)
    index.refresh()  # of files that the resumed run cuts back
    run = start("--generator.engine.sleep", resume=folder).ended_well()
    assert run.out.count("resumed ") == 1 and "resumed     step 2, from " in run.out
    assert re.search(r"^steps       (\d+) of \1, \d+ of them in ", run.out, re.MULTILINE)
    same_but_for_the_clock(run.metrics, sync_run.metrics)
    assert any(record["train/grad_norm"] > 0 for record in run.steps)
    for name in ("ledger.jsonl", "rollouts.jsonl.gz"):
        assert lines_of(folder / name) == lines_of(sync_run.folder / name)
    index.refresh()
    for table, name in (("rollouts", "rollouts.jsonl.gz"), ("ledger", "ledger.jsonl")):
        ids = [row[0] for row in index.rows(f"SELECT rollout_id FROM {table}")]
        assert len(ids) == len(set(ids)) == len(lines_of(folder / name))
    index.close()
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        f"step-00000{step}" for step in (1, 2, 3, 4)
    ]


def test_evaluate_gives_the_runs_own_validation_figures_of_version_0(sync_run, start):
    words = "--max-offpolicy-steps 0 --seed 7 --json"
    program = (sys.executable, "-m", "torchtitan.experiments.rl.evaluate")
    evaluation = start(*words.split(), program=program).ended_well()
    (model,) = json.loads(evaluation.out)["models"]
    assert {"step": 0, **model["metrics"]} == sync_run.metrics[0]
    figures = model["tasks"]["sum_digits"]
    assert (
        figures["avg@1"]["value"]
        == figures["pass@1"]["value"]
        == model["metrics"]["validation/reward"]
    )
    rewards = [
        record.rollout.reward for record in read_rollouts(evaluation.folder, kind="validation")
    ]
    assert len(rewards) == 8 and sum(rewards) / 8 == model["metrics"]["validation/reward"]
    evaluation.assert_nothing_left()


def lines_of(path: Path) -> list:
    """The records of a file, in any order, without their seconds."""
    text = (
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    ).decode()
    return sorted(re.sub(r'"(generate|env)_s":[^,}]*', "", line) for line in text.splitlines())


@pytest.mark.slow
def test_two_ranks_and_two_generators_repeat_themselves_however_weights_get_there(wide_run, start):
    plain = stopped_after(3, start(*WIDE))
    same_but_for_the_clock(plain.metrics[:4], wide_run.metrics[:4])
    for record in plain.steps:
        assert_on_policy(record)
    assert not list(plain.folder.glob("trace-*"))
    assert all(sample.trainer_logprobs is None for sample in trained_samples(plain))


def test_a_run_of_two_ranks_and_two_generators_has_a_log_for_each(wide_run):
    assert {path.name for path in (wide_run.folder / "logs").iterdir()} >= {
        "trainer-0.jsonl",
        "trainer-1.jsonl",
        "generator-0.jsonl",
        "generator-1.jsonl",
    }


def test_ctrl_c_ends_the_run_after_its_step_with_a_summary_and_leaves_nothing(wide_run):
    """Compare what stays on the terminal, line by line, beside the signs of an orderly end."""
    run = wide_run
    wait_for(
        lambda: run.out.endswith(f"--resume {run.folder}\r\n"), "the terminal did not show the end"
    )
    assert (
        "stopped by SIGINT" in run.out
        and "stopping after this step" in run.out
        and "Traceback" not in run.out
    )
    assert "waiting for the trainer to start (" in run.out
    rows = [row for row in Screen(1000).feed(run.out).rows if row]
    assert max(len(row) for row in rows if str(run.folder) not in row) <= 80
    labels = "starting config model sizes step steps rollouts metrics records ledger logs policy checkpoint".split()
    others = [row for row in rows if row.split()[0] not in labels and not row.startswith(" " * 12)]
    steps = [row for row in others if re.match(r" +\d+/100000 +\d", row)]
    assert len(steps) >= 3
    assert [row for row in others if row not in steps] == [
        "run         run",
        f"folder      {run.folder}",
        "stopping after this step; once more stops at once",
        f"folder      {run.folder}",
        "profile     trace-steps-2-2.json",
        f"see it      {typed_command('report')} {run.folder}",
        f"go on with  {typed_command('train')} --resume {run.folder}",
    ]


def test_a_profiled_step_has_a_lane_for_each_process(wide_run):
    events = json.loads((wide_run.folder / "trace-steps-2-2.json").read_text())["traceEvents"]
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    names = ["controller", "trainer rank 0", "trainer rank 1", "generator 0", "generator 1"]
    assert list(processes.values()) == names
    seen = {(processes[event["pid"]], event["name"]) for event in events if event["ph"] in "bB"}
    assert seen >= {
        ("controller", name) for name in ("step", "rollout", "generate", "render", "pack", "wait")
    }
    assert seen >= {
        (name, part)
        for name in names[1:3]
        for part in ("forward", "backward", "optimizer", "copy weights out", "digests")
    }
    assert seen >= {
        (name, part) for name in names[3:] for part in ("step", "load weights", "reload")
    }
    rollouts = [event for event in events if event["ph"] == "b" and event["name"] == "rollout"]
    assert len({event["args"]["rollout"] for event in rollouts}) == len(rollouts) >= 32
    (step,) = [event for event in events if event["ph"] == "b" and event["name"] == "step"]
    assert step["args"] == {"step": 2}


def trained_samples(run: Run) -> list[TrainingSample]:
    """Return the recorded samples that the run trained on: at least one of each rollout of a step."""
    records = read_rollouts(run.folder, kind="training")
    trained = [record.rollout for record in records if record.outcome == "trained"]
    assert len(trained) >= 32
    return [sample for rollout in trained for sample in rollout.samples]


def test_records_have_the_trainers_log_probabilities_where_they_are_asked_for(sync_run, wide_run):
    """On-policy they are the generator's."""
    assert all(sample.trainer_logprobs is None for sample in trained_samples(sync_run))
    for sample in trained_samples(wide_run):
        np.testing.assert_allclose(sample.trainer_logprobs, sample.generator_logprobs, atol=1e-4)
        assert (sample.trainer_logprobs[sample.loss_mask] < 0).all()


def assert_on_policy(record: dict) -> None:
    """Check a step's record: each token was sampled by the policy that it trains."""
    assert record["policy/age_max"] == 0 and record["rl/logprob_diff_max"] <= 1e-4
    assert record["rl/ratio_max"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["sync_run", "wide_run"])
def test_synchronous_runs_are_on_policy_at_every_step(name, request):
    run = request.getfixturevalue(name)
    for record in run.steps:
        assert_on_policy(record)
        assert_ledger_balances(record)
    run.assert_nothing_left()


def test_ranks_and_replicas_change_nothing_but_rounding(sync_run, wide_run):
    """The first step has the same rollouts, whoever samples them, and the same loss, however it is shared out."""
    one, two = sync_run.steps[0], wide_run.steps[0]
    assert (
        one["rollout/reward_mean"] == two["rollout/reward_mean"]
        and one["batch/tokens"] == two["batch/tokens"]
    )
    for key in ("loss/total", "train/grad_norm", "policy/entropy"):
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_adapters_that_are_served_and_adapters_that_are_merged_make_the_same_run(start):
    """The second has two ranks, which share each adapter."""
    words = "--max-offpolicy-steps 0 --seed 7 --steps 3 --trainer.no-save-final-model --trainer.lora.rank 4"
    words += " --trainer.optimizer.lr 1e-2"
    served, merged = (
        run.ended_well()
        for run in [
            start(*words.split()),
            start(*words.split(), *"--trainer.lora.serve merged --trainer.ranks 2".split()),
        ]
    )
    for run in (served, merged):
        for record in run.steps:
            assert record["policy/age_max"] == 0 and record["rl/logprob_diff_max"] <= 1e-4
    for ours, theirs in zip(served.steps, merged.steps, strict=True):
        for key in ("rollout/reward_mean", "batch/tokens", "policy/entropy", "train/grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-2, abs=1e-5), key
    assert served.steps[-1]["policy/entropy"] != pytest.approx(
        served.steps[0]["policy/entropy"], rel=1e-2
    ), "nothing was learned"


@pytest.mark.slow
def test_tasks_train_and_sample_with_adapters_of_their_own(start):
    """Two of the three tasks share one, and two ranks each, in whose buffers the engine reads them. What the engine said of a
    token is what the trainer says with the adapter of its task."""
    words = "--max-offpolicy-steps 0 --seed 7 --steps 4 --checkpoint.interval 2 --trainer.ranks 2 --generator.weights device"
    words += " --trainer.lora.rank 4 --trainer.optimizer.lr 1e-2"
    names = {
        "sum_digits": "digits",
        "sum_digits_distilled": "distilled",
        "sum_digits_rounds": "digits",
    }
    for task, adapter in names.items():
        words += f" --tasks.{task}.adapter {adapter}"
    run = start(*words.split(), config="rl_mixed_qwen3_debug").ended_well()
    for record in run.steps:
        assert record["policy/age_max"] == 0 and record["rl/logprob_diff_max"] <= 1e-4
        assert record["digits/train/grad_norm"] > 0 and record["distilled/train/grad_norm"] > 0
    found = [
        load_file(run.folder / f"policy/step-4/{name}/adapter/adapter_model.safetensors")
        for name in ("digits", "distilled")
    ]
    assert found[0].keys() == found[1].keys() and not any(
        torch.equal(found[0][key], found[1][key]) for key in found[0]
    )
    with pytest.raises(ConfigError, match="name one of them, such as .*policy/step-4/d"):
        model_folder(str(run.folder))
    shutil.rmtree(run.folder / "checkpoints" / "step-000004")
    again = start(resume=run.folder).ended_well()
    same_but_for_the_clock(again.metrics, run.metrics)
