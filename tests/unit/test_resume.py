"""--resume and --init-from: the right checkpoint, the run's own command, and every field of a config may change or may not."""

import copy
import dataclasses
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import Configurable

from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl.bounds import Changeable, declared, field_annotations
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command.command_line import (
    DEFAULT_MODULE,
    load_config,
    parse_command,
)
from torchtitan.experiments.rl.command.history import write_start
from torchtitan.experiments.rl.command.hub import model_folder
from torchtitan.experiments.rl.command.resume import (
    Change,
    _locate,
    check_changes,
    compare,
    files_of_models,
    learning_rate_factor,
    resolved_config,
)
from torchtitan.experiments.rl.command.run_folder import SavedCommand, lock_run_folder, save_command
from torchtitan.experiments.rl.config_registry import rl_mixed_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.evaluate import parse_options
from torchtitan.experiments.rl.observability.metrics import MetricsLogger
from torchtitan.experiments.rl.process import temporary
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric

NAME = "rl_grpo_qwen3_debug"
ROOT = Path(__file__).parents[2]


def make_run(
    run_dir: Path, *overrides: str, steps=(20, 40), started: float = 1.0, config: str = NAME
) -> Path:
    """A run folder as a run leaves it: its command, its config, its checkpoints."""
    run_dir.mkdir(parents=True)
    made = load_config(parse_command(["--config", config, *overrides]))
    (run_dir / "config.json").write_text(json.dumps(resolved_config(made)))
    saved = SavedCommand(
        config_name=config, module=DEFAULT_MODULE, overrides=list(overrides), started=started
    )
    saved.model_files = files_of_models(made)
    save_command(run_dir, saved)
    folder = CheckpointWriter(run_dir, keep=9)
    for step in steps:
        (folder.begin(step) / "state").write_text(str(step))
        folder.commit(step)
    return run_dir


@pytest.fixture
def resumed(command, monkeypatch):
    """Runs the command up to where it would start actors: gives its exit code, its start, its config and its output."""
    starts = []

    def run(config, start, name):
        starts.append((config, start, name))
        start.lock.close()
        return 0

    monkeypatch.setattr("torchtitan.experiments.rl.train._run", run)

    def resume(*words: str):
        starts.clear()
        code, out, err = command(*words)
        assert (code, err) == (0, ""), err
        return (*starts[0][:2], out) if starts else (None, None, out)

    return resume


# ---- which checkpoint, and which command


def test_a_folder_alone_is_enough_and_brings_the_runs_own_command(resumed, tmp_path):
    run = make_run(tmp_path / "run", "--steps", "77", "--trainer.optimizer.lr", "3e-4")
    config, start, out = resumed("--resume", str(run))
    assert (start.run_dir, start.resume_from) == (str(run), run / "checkpoints/step-000040")
    assert (config.steps, config.trainer.optimizer.lr) == (77, 3e-4)
    assert out == f"resumed     step 40, from {run}/checkpoints/step-000040\n"


def test_overrides_come_after_the_runs_own_and_are_kept_for_the_next_resume(resumed, tmp_path):
    run = make_run(tmp_path / "run", "--steps", "77")
    config, _, out = resumed(
        "--resume", str(run), "--steps", "90", "--trainer.ranks", "2", "--validation.every", "5"
    )
    assert (config.steps, config.trainer.ranks) == (90, 2)
    changed = [line for line in out.splitlines() if line.startswith("changed")]
    assert changed == [
        "changed     trainer.ranks = 2 (was 1)",
        "changed     steps = 90 (was 77)",
        "changed     validation.every = 5 (was 10)",
    ]
    assert resumed("--resume", str(run))[0].steps == 90


def test_a_resume_says_which_evaluations_no_longer_count(resumed, tmp_path):
    goals = "--checkpoint.keep-best validation/reward --stop-at.patience 3 --checkpoint.interval 10"
    run = make_run(tmp_path / "run", *goals.split())
    labels = ("best ", "stop ")

    def said(*words: str) -> list[str]:
        out = resumed("--resume", str(run), *words)[2]
        return [line for line in out.splitlines() if line.startswith(labels)]

    assert said("--checkpoint.keep", "4", "--stop-at.patience", "4") == []
    assert said("--checkpoint.best-is", "lowest", "--stop-at.best-is", "lowest") == [
        "best        no checkpoint up to step 40 counts as the best any more: they were compared by "
        "the highest validation/reward",
        "stop        no evaluation up to step 40 counts for stop_at any more: it was for the "
        "highest validation/reward",
    ]


def test_a_checkpoint_that_was_set_aside_begins_a_new_run_and_is_not_resumed(refused, tmp_path):
    run = make_run(tmp_path / "run")
    CheckpointWriter(run, keep=9).set_aside(40)
    aside = run / "set_aside/step-000040"
    assert refused("--resume", str(aside)).endswith(
        "the run went back to an earlier step, and its files say nothing of this one any more: "
        f"start a new run with its weights (--init-from {aside})\n"
    )


# ---- a run that ended before its first checkpoint


def test_a_run_without_a_checkpoint_begins_again_in_its_folder_with_its_own_command(
    resumed, tmp_path
):
    run = make_run(tmp_path / "run", "--steps", "77", steps=())
    config, start, out = resumed("--resume", str(run))
    assert (start.run_dir, start.resume_from, start.init_from) == (str(run), None, None)
    assert config.steps == 77
    assert out == "resumed     step 0: the run has no checkpoint, and begins again\n"


def test_a_run_that_begins_again_says_how_many_steps_it_takes_anew_and_may_change_in_every_field(
    resumed, tmp_path
):
    run = make_run(tmp_path / "run", steps=())
    metrics = MetricsLogger.Config(tensorboard=False).build(run_dir=run)
    for step in range(4):
        metrics.log(step, {"loss/total": 0.0})
    metrics.close()
    words = ["--seed", "3", "--trainer.optimizer.name", "muon", "--tasks.sum-digits.dataset.seed"]
    config, start, out = resumed("--resume", str(run), *words, "5")
    assert start.resume_from is None and config.seed == 3
    assert out.splitlines() == [
        "resumed     step 0: the run has no checkpoint, and begins again; its 3 steps are taken "
        "anew",
        "changed     tasks.sum_digits.dataset.seed = 5 (was 0)",
        "changed     trainer.optimizer.name = 'muon' (was 'adamw')",
        "changed     seed = 3 (was 0)",
    ]


def test_a_run_that_was_stopped_before_its_config_was_saved_begins_again(resumed, tmp_path):
    run = make_run(tmp_path / "run", "--steps", "77", steps=())
    (run / "config.json").unlink()
    config, start, out = resumed("--resume", str(run))
    assert (config.steps, start.resume_from) == (77, None)
    assert out == "resumed     step 0: the run has no checkpoint, and begins again\n"


def test_a_run_that_begins_again_has_the_weights_that_it_began_with(resumed, tmp_path):
    other = make_run(tmp_path / "other")
    run = tmp_path / "run"
    words = ("--config", NAME, "--init-from", str(other), "--run-dir", str(run))
    began_with = resumed(*words)[1].init_from
    assert began_with == other / "checkpoints/step-000040"
    for _ in range(2):  # each resume keeps it for the next one
        _, start, out = resumed("--resume", str(run))
        assert (start.resume_from, start.init_from) == (None, began_with)
        assert f"weights     of {began_with}\n" in out


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(refused, tmp_path):
    trained = make_run(tmp_path / "trained", steps=())
    (trained / "policy/step-40").mkdir(parents=True)
    was_resumed = make_run(tmp_path / "was resumed", steps=())
    write_start(was_resumed, 0)
    write_start(was_resumed, 20)
    for run in (trained, was_resumed):
        assert "it has no complete checkpoint" in refused("--resume", str(run))


MODULE_OF_A_RUN = """
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.data.rows import RowDataset

def mine():
    config = rl_grpo_qwen3_debug()
    config.tasks["sum_digits"].validation = RowDataset.Config(path="mine.csv")
    return config
"""


def test_a_runs_module_is_found_from_any_folder_and_a_file_of_it_is_said_to_be_elsewhere(
    command, tmp_path, monkeypatch
):
    home = tmp_path / "task"
    home.mkdir()
    (home / "module_of_a_run.py").write_text(MODULE_OF_A_RUN)
    run = make_run(home / "run")
    saved = SavedCommand(
        config_name="mine", module="module_of_a_run", overrides=[], folder=str(home)
    )
    save_command(run, saved)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    hint = (
        "tasks.sum_digits.validation.path = 'mine.csv': no such file (--dry-run lists all that is "
        f"missing) (the run was started in {home}: run the command there)\n"
    )
    assert command("--resume", str(run))[2] == f"error: {hint}"
    _, tool = parse_options(["--model", str(run)])
    assert (tool.module, tool.started_in) == ("module_of_a_run", str(home))


SCHEDULE = LRSchedulersContainer.Config(warmup_steps=10)


def test_a_schedule_that_more_steps_stretch_is_said_with_both_rates(resumed, tmp_path):
    """Ten steps of warm-up, one at the whole rate, then 24 or 20 that lead to 0: a run of 30 steps had 7.5e-6 at its last."""
    assert [learning_rate_factor(SCHEDULE, steps, step) for steps, step in ((30, 30), (34, 31), (30, 31), (30, 5))] == [
        pytest.approx(1 - 19 / 20), pytest.approx(1 - 20 / 24), 0.0, 0.5
    ]  # fmt: skip
    run = make_run(tmp_path / "run", "--steps", "40", "--trainer.optimizer.lr", "1e-3")
    (line,) = [
        line
        for line in resumed("--resume", str(run), "--steps", "90")[2].splitlines()
        if line.startswith("schedule")
    ]
    assert (
        f"goes from {1e-3 * (1 - 29 / 30):.3g} at step 40 to {1e-3 * (1 - 30 / 80):.3g} at step 41"
        in line
    )
    assert "one of 90 steps" in line


def test_a_rate_that_does_not_decay_is_no_schedule_to_speak_of(resumed, tmp_path):
    run = make_run(tmp_path / "run", "--steps", "77", "--trainer.lr-scheduler.decay-ratio", "0")
    assert "schedule " not in resumed("--resume", str(run), "--steps", "90")[2]


def test_a_checkpoint_in_a_run_can_be_named(resumed, tmp_path):
    run = make_run(tmp_path / "run")
    for named in (run / "checkpoints/step-000020", run / "checkpoints/../checkpoints/step-000020/"):
        assert resumed("--resume", str(named))[1].resume_from == run / "checkpoints/step-000020"
    assert (
        resumed("--resume", str(run / "checkpoints"))[1].resume_from
        == run / "checkpoints/step-000040"
    )


def test_a_damaged_newest_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    resumed, tmp_path
):
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step-000040/state").write_text("50")
    _, start, out = resumed("--resume", str(run))
    assert start.resume_from == run / "checkpoints/step-000020"
    assert out.splitlines()[0].startswith(
        f"refused     checkpoint {run}/checkpoints/step-000040 is damaged: "
    )
    assert "step-000040/state has other bytes than were written" in out


def test_a_newest_checkpoint_without_its_manifest_is_named_and_the_one_before_is_used(
    resumed, refused, tmp_path
):
    run = make_run(tmp_path / "run")
    (run / "checkpoints/step-000040/manifest.json").unlink()
    _, start, out = resumed("--resume", str(run))
    assert start.resume_from == run / "checkpoints/step-000020"
    assert out.splitlines()[0].startswith(
        f"refused     checkpoint {run}/checkpoints/step-000040 is damaged: "
    )
    assert "step-000040/manifest.json is missing" in out.splitlines()[0]


def test_a_run_whose_command_and_config_a_power_failure_emptied_is_resumed_with_its_checkpoints_copies(
    resumed, tmp_path
):
    run = make_run(tmp_path / "run", "--steps", "77")
    folder = CheckpointWriter(run, keep=9)
    partial = folder.begin(60)
    for name in ("command.json", "config.json"):
        shutil.copy(run / name, partial)
        (run / name).write_text("")
    folder.commit(60)
    config, start, _ = resumed("--resume", str(run))
    assert config.steps == 77 and start.resume_from == run / "checkpoints/step-000060"
    assert json.loads((run / "command.json").read_text())["overrides"] == ["--steps", "77"]


@pytest.mark.parametrize("words", [["--resume"], ["--config", NAME, "--init-from"]])
def test_a_forged_checkpoint_is_refused_in_one_line(refused, tmp_path, words):
    run = make_run(tmp_path / "run", steps=())
    folder = CheckpointWriter(run, keep=9)
    trainer = folder.begin(20) / "trainer/step-20"
    trainer.mkdir(parents=True)
    (trainer / ".metadata").write_bytes(pickle.dumps(eval))
    folder.commit(20)
    assert "step-20/.metadata names builtins.eval, which no checkpoint needs" in refused(
        *words, str(run)
    )


def test_auto_takes_the_run_of_the_config_that_was_started_last_or_starts_a_new_one(
    resumed, tmp_path
):
    outputs = tmp_path / "outputs"
    words = ("--config", NAME, "--resume", "auto", "--output-dir", str(outputs))
    _, start, out = resumed(*words)
    assert (
        start.resume_from is None
        and out == f"no run of {NAME} in {outputs} has a checkpoint: a new run starts\n"
    )
    assert Path(start.run_dir).parent == outputs
    shutil.rmtree(outputs)
    make_run(outputs / "b", started=5.0)
    make_run(outputs / "a", started=9.0)
    make_run(outputs / "other", started=99.0, config="rl_echo_qwen3_debug")
    (outputs / "a file").write_text("")
    assert resumed(*words)[1].resume_from == outputs / "a/checkpoints/step-000040"


@pytest.mark.parametrize("saved_in", ["policy", "checkpoint"], ids=["", "an older run"])
def test_a_run_that_is_complete_has_nothing_to_do_but_to_remove_what_it_left(
    resumed, tmp_path, monkeypatch, saved_in
):
    monkeypatch.setattr(temporary, "_parent", lambda: tmp_path)
    (tmp_path / "torchtitan-rl-killed").mkdir()
    run = make_run(tmp_path / "run", "--steps", "40")
    assert resumed("--resume", str(run))[1] is not None  # its policy is not saved yet
    (run / saved_in / "step-40").mkdir(parents=True)
    config, start, out = resumed("--resume", str(run))
    assert config is None and out.endswith(
        "the run has taken its 40 steps; a higher --steps goes on\n"
    )
    assert not (tmp_path / "torchtitan-rl-killed").exists()
    assert resumed("--resume", str(run), "--steps", "41")[1] is not None


def test_a_dry_run_of_a_resume_changes_nothing(command, tmp_path):
    run = make_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = command("--resume", str(run), "--steps", "200", "--dry-run")
    assert (
        (code, err) == (0, "")
        and "resumed     step 40" in out
        and "steps = 200 (was 100)" in out
        and "memory" in out
    )
    after = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert after == before


# ---- a run as a model


@pytest.mark.parametrize(
    "policies", [["policy/step-9", "policy/step-20"], ["checkpoint/step-9", "checkpoint/step-20"]]
)
def test_a_runs_folder_is_its_newest_policy_and_a_checkpoint_the_policy_of_its_step(
    tmp_path, policies
):
    run = make_run(tmp_path / "run")
    for policy in policies:
        (run / policy).mkdir(parents=True)
    older, newest = (str(run / policy) for policy in policies)
    for given in (
        run,
        run / "checkpoints",
        run / "checkpoints/step-000020",
        run / policies[1],
        Path(newest).parent,
    ):
        assert model_folder(str(given)) == newest
    assert model_folder(older) == older
    with pytest.raises(ConfigError, match=f"export {run}/checkpoints/step-000040 --to FOLDER$"):
        model_folder(str(run / "checkpoints/step-000040"))


def test_a_run_without_a_policy_is_told_how_to_make_one(tmp_path):
    with pytest.raises(
        ConfigError,
        match="no policy was saved there; this makes one of the checkpoint: .*/step-000040 --to F",
    ):
        model_folder(str(make_run(tmp_path / "run")))
    with pytest.raises(ConfigError, match="neither a policy nor a checkpoint"):
        model_folder(str(make_run(tmp_path / "young", steps=())))


@pytest.mark.parametrize("option", ["--resume", "--init-from", "RUN_OR_CHECKPOINT"])
def test_a_policy_in_place_of_a_checkpoint_is_named(tmp_path, option):
    run = make_run(tmp_path / "run")
    (run / "policy/step-40").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=f"a hub folder already: --model takes it as it is, and the run is {run}$"
    ):
        _locate(str(run / "policy/step-40"), option)


def test_a_run_named_as_the_model_brings_its_config_and_its_overrides(tmp_path):
    run = make_run(tmp_path / "run", "--validation.examples", "8")
    (run / "policy/step-40").mkdir(parents=True)
    options, command = parse_options(["--model", str(run / "policy/step-40"), "--attempts", "2"])
    assert command.config_name == NAME and command.overrides == ["--validation.examples", "8"]
    with pytest.raises(
        ConfigError, match="name a config, or a run as --model; .* --list prints the configs"
    ):
        parse_options(["--model", str(tmp_path)])


# ---- refusals


REFUSED = {
    "nowhere": (
        lambda run: ["--resume", str(run / "nowhere")],
        "no such folder; name a run's folder, or a checkpoint in it",
    ),
    "empty": (lambda run: ["--resume", ""], "--resume = '': no such folder"),
    "no run": (lambda run: ["--resume", str(run.parent)], "holds no run that can be resumed"),
    "auto without a config": (lambda run: ["--resume", "auto"], "--config", "name a config"),
    "another folder": (
        lambda run: ["--resume", str(run), "--run-dir", "x"],
        "--run-dir = 'x': a resumed run has its own",
    ),
    "other weights": (
        lambda run: ["--resume", str(run), "--init-from", "x"],
        "--init-from = 'x': a resumed run has its own",
    ),
    "seed": (
        lambda run: ["--resume", str(run), "--seed", "3"],
        "seed = 3: the run that is resumed has 0: keep it, or start a new",
    ),
    "data": (
        lambda run: ["--resume", str(run), "--tasks.sum-digits.dataset.count", "9"],
        "dataset.count = 9",
        "has 10000",
    ),
    "another optimizer": (
        lambda run: ["--resume", str(run), "--trainer.optimizer.name", "muon"],
        "trainer.optimizer.name = 'muon': the checkpoint has the moments of adamw: keep it, or",
    ),
    "another config": (
        lambda run: ["--resume", str(run), "--config", "rl_echo_qwen3_debug"],
        "the run that is resumed has",
    ),
    "a checkpoint that is none": (
        lambda run: ["--resume", str(run / "checkpoints/step-000099")],
        "step-000099': no such folder",
    ),
    "weights of nothing": (
        lambda run: ["--config", NAME, "--init-from", str(run.parent)],
        "it has no complete checkpoint",
    ),
}


@pytest.mark.parametrize(
    "words, parts", [(words, parts) for words, *parts in REFUSED.values()], ids=REFUSED
)
def test_what_can_not_be_resumed_is_one_line(refused, tmp_path, words, parts):
    err = refused(*words(make_run(tmp_path / "runs" / "run")))
    for part in parts:
        assert part in err, err


def test_a_damaged_checkpoint_that_is_named_is_refused(refused, tmp_path):
    run = make_run(tmp_path / "runs/run", steps=(20,))
    (run / "checkpoints/step-000020/state").unlink()
    for named in (run, run / "checkpoints/step-000020"):
        assert "checkpoints/step-000020/state is missing" in refused("--resume", str(named))


def test_a_run_that_runs_is_not_resumed(refused, tmp_path):
    run = make_run(tmp_path / "runs/run")
    with lock_run_folder(run, field="test"):
        assert f"process {os.getpid()} runs in it: wait until it ends, or stop it" in refused(
            "--resume", str(run)
        )


def test_a_lock_ends_with_its_process(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from torchtitan.experiments.rl.command.run_folder import lock_run_folder\n"
        "lock = lock_run_folder(Path(sys.argv[1]), field='x'); print('locked', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} runs in it"):
            lock_run_folder(tmp_path, field="--resume")
        other.kill()
        other.wait()
        lock_run_folder(tmp_path, field="--resume").close()


def test_a_folder_with_a_run_says_how_to_resume_it(command, tmp_path):
    run = make_run(tmp_path / "run")
    code, _, err = command("--config", NAME, "--run-dir", str(run))
    assert code == 2
    assert_one_line(err, "holds files already", f"--resume {run} goes on with the run in it")
    early = make_run(tmp_path / "killed-early", steps=())
    code, _, err = command("--config", NAME, "--run-dir", str(early))
    assert code == 2
    assert_one_line(err, "holds files already", f"--resume {early} begins the run in it again")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/todo.txt").touch()
    code, _, err = command("--config", NAME, "--run-dir", str(tmp_path / "notes"))
    assert code == 2 and "holds files already" in err and "--resume" not in err


# ---- models and other weights


def test_a_model_that_lies_elsewhere_now_is_the_same_and_one_with_other_files_is_not(
    resumed, refused, tmp_path
):
    run = make_run(tmp_path / "runs/run")
    config = load_config(parse_command(["--config", NAME]))
    moved = tmp_path / "moved_model"
    shutil.copytree(config.model.hf_assets_path, moved)
    _, start, out = resumed("--resume", str(run), "--model.hf-assets-path", str(moved))
    assert start is not None and f"changed     model.hf_assets_path = '{moved}' (was " in out
    hub = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(hub | {"rope_theta": 12345.0}))
    line = refused("--resume", str(run))
    assert (
        f"error: model.hf_assets_path = '{moved}': its config.json is not the one the run" in line
    )
    (moved / "config.json").write_text(json.dumps(hub, indent=3))
    other = make_run(tmp_path / "runs/other")
    assert "model.hf_assets_path" in refused(
        "--resume", str(other), "--model.hf-assets-path", str(moved)
    )


def test_a_new_run_begins_with_the_weights_of_another(resumed, tmp_path):
    run = make_run(tmp_path / "run")
    _, start, out = resumed(
        "--config", NAME, "--seed", "5", "--init-from", str(run), "--run-dir", str(tmp_path / "new")
    )
    assert (start.init_from, start.resume_from) == (run / "checkpoints/step-000040", None)
    assert (
        start.run_dir == str(tmp_path / "new")
        and out == f"weights     of {run}/checkpoints/step-000040\n"
    )


# ---- every field may change or may not


@pytest.mark.parametrize(
    ("field", "may"),
    [
        ("steps", True),
        ("trainer.optimizer.lr", True),
        ("trainer.optimizer.betas[1]", True),
        ("trainer.ranks", True),
        ("generator.replicas", True),
        ("generator.engine.tensor_parallel_degree", True),
        ("validation.every", True),
        ("tasks.sums.validation.count", True),
        ("tasks.sums.validation_schedule", True),
        ("metrics.wandb", True),
        ("recorder.fraction", True),
        ("checkpoint.interval", True),
        ("checkpoint.keep_best", True),
        ("stop_at.patience", True),
        ("validation.top_p", True),
        ("tasks.sums.validation_rubric", True),
        ("provision.device", True),
        ("tasks.sums.rubric.reward_fns[0].timeout_s", True),
        ("tasks.sums.algorithm.teacher.replicas", True),
        ("seed", False),
        ("model.hf_assets_path", False),
        ("model.flavor", False),
        ("renderer.name", False),
        ("trainer.dtype", False),
        ("trainer.loss.rl.kl_tau", False),
        ("generator.engine.dtype", False),
        ("tasks.sums.dataset.seed", False),
        ("tasks.sum_digits.algorithm.normalize_std", False),
        ("tasks.sums.algorithm.teacher.path", False),
        ("tasks.sums.sampler.class", False),
        ("tasks.sums.env.max_turns", False),
        ("tasks.sums.rubric.reward_fns[0].weight", False),
        ("tasks.sums.group_size", False),
        ("task_mix.class", False),
        ("pre_batch_filters[0].class", False),
        ("rollouts_per_step", False),
        ("max_offpolicy_steps", False),
    ],
)
def test_what_decides_the_data_and_the_learning_stays_and_how_far_and_where_may_change(field, may):
    config = rl_mixed_qwen3_debug()
    task = config.tasks["sums"] = config.tasks.pop("sum_digits_distilled")
    task.rubric = Rubric.Config(reward_fns=[RewardFn(len, takes="rollout")])
    saved = resolved_config(config)
    inside, words = saved, re.sub(r"\[(\d+)\]", r".\1", field).split(".")
    for word in words[:-1]:
        inside = inside[int(word) if isinstance(inside, list) else word]
    last = int(words[-1]) if isinstance(inside, list) else words[-1]
    assert last in inside or isinstance(inside, list), field
    inside[last] = "another"
    assert [(change.field, change.allowed) for change in compare(saved, config)] == [(field, may)]


def test_a_subclass_that_gives_a_field_another_default_leaves_it_as_free_to_change():
    folder = ROOT / "torchtitan/experiments/rl/tasks/examples"
    for file in folder.glob("[a-z]*.py"):
        importlib.import_module(f"torchtitan.experiments.rl.tasks.examples.{file.stem}")

    def below(config_class: type) -> list[type]:
        return [
            found
            for subclass in config_class.__subclasses__()
            for found in (subclass, *below(subclass))
        ]

    own = [found for found in below(Configurable.Config) if ".experiments.rl." in found.__module__]
    assert len(own) > 50
    for config_class in own:
        for base in config_class.__mro__[1:]:
            if not dataclasses.is_dataclass(base):
                continue
            theirs = field_annotations(base)
            for name, annotation in field_annotations(config_class).items():
                before = name in theirs and declared(theirs[name]).may_change
                assert declared(annotation).may_change or not before, (config_class, name)


def test_a_field_of_a_users_own_class_may_not_change_unless_it_says_so():
    @dataclasses.dataclass
    class Own:
        path: str = "a"
        workers: Changeable[int] = 1

    changes = compare({**resolved_config(Own()), "path": "b", "workers": 2, "gone": 3}, Own())
    assert [(change.field, change.allowed) for change in changes] == [
        ("path", False),
        ("workers", True),
        ("gone", False),
    ]


def test_configs_are_compared_field_by_field():
    saved = {
        "class": "Run",
        "steps": 1,
        "tasks": {"a": {"class": "A", "x": 1}},
        "filters": [{"class": "F", "n": 1}],
        "old": 0,
    }
    new = copy.deepcopy(saved)
    assert compare(saved, new) == []
    new["filters"][0]["n"] = 2
    new["filters"].append({"class": "G"})
    new["tasks"]["a"] = {"class": "B", "y": 3}
    new["tasks"]["b"] = {"class": "B"}
    del new["old"]
    assert [str(change) for change in compare(saved, new)] == [
        "tasks.a.class = 'B' (was 'A')",
        "tasks.b = 'B' (was '(absent)')",
        "filters[0].n = 2 (was 1)",
        "filters[1] = 'G' (was '(absent)')",
        "old = '(absent)' (was 0)",
    ]


def test_the_first_change_that_is_not_allowed_is_named_with_both_values_and_the_cure():
    with pytest.raises(ConfigError) as refusal:
        check_changes([Change("steps", 1, 2, allowed=True), Change("seed", 0, 5)])
    assert dataclasses.astuple(Change("seed", 0, 5)) == ("seed", 0, 5, False)
    assert str(refusal.value) == (
        "seed = 5: the run that is resumed has 0: keep it, or start a new run (--init-from takes the weights)"
    )
