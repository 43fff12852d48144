"""``--push-to-hub`` and the export command: what is refused before anything is written, and what a failed upload leaves."""

from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from tests.unit.command_line import assert_one_line
from torchtitan.experiments.rl import export, train
from torchtitan.experiments.rl.command import gate
from torchtitan.experiments.rl.command import hub as config_hub
from torchtitan.experiments.rl.command.start import NothingToStart
from torchtitan.experiments.rl.compat import huggingface_hub as hub
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug

DEBUG = ["--config", "rl_grpo_qwen3_debug"]


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")


@pytest.fixture
def hub_answers(monkeypatch, token):
    """A hub that knows the token; gives what was uploaded."""
    uploaded = []
    monkeypatch.setattr(hub, "hub_fault", lambda: None)
    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "me"})
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, exist_ok: f"https://hub/{name}")
    monkeypatch.setattr(
        HfApi,
        "upload_folder",
        lambda self, repo_id, folder_path: uploaded.append((repo_id, folder_path)),
    )
    return uploaded


def test_without_a_token_nothing_begins(refused, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "--push-to-hub = 'me/mine': there is no token: run `hf auth login`" in refused(
        *DEBUG, "--push-to-hub", "me/mine"
    )


def test_without_a_hub_nothing_begins(refused, monkeypatch, token):
    monkeypatch.setattr(hub, "hub_fault", lambda: "no hub answers at https://hub")
    assert "no hub answers at https://hub; leave it out, and" in refused(
        *DEBUG, "--push-to-hub", "me/mine"
    )


def test_what_is_no_name_and_what_has_nothing_to_push_is_refused(refused, hub_answers):
    assert "no name of a model" in refused(*DEBUG, "--push-to-hub", "a/b/c")
    words = ["--push-to-hub", "me/mine", "--trainer.no-save-final-model"]
    assert "there is nothing to push: trainer.save_final_model is False" in refused(*DEBUG, *words)


def test_a_token_that_the_hub_refuses_is_said(hub_answers, monkeypatch):
    def whoami(self):
        raise OSError("401 Client\nError")

    monkeypatch.setattr(HfApi, "whoami", whoami)
    assert hub.push_fault("me/mine") == "the hub refuses the token: 401 Client Error"


def test_the_newest_policy_of_a_run_is_pushed(hub_answers, command, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def trained(config, start, name) -> int:
        for step in (9, 10):
            (run / "policy" / f"step-{step}").mkdir(parents=True)
        return 0

    monkeypatch.setattr(train, "_run", trained)
    code, out, err = command(*DEBUG, "--run-dir", str(run), "--push-to-hub", "me/mine")
    assert (code, err) == (0, "") and hub_answers == [("me/mine", run / "policy/step-10")]
    assert out.endswith("pushed      https://hub/me/mine\n")


@pytest.mark.parametrize(
    "written, pushed",
    [
        (["step-10", "best"], "policy/best (the best by validation/reward)"),
        (["step-10"], "policy/step-10 (of the last step)"),
    ],
)
def test_a_run_that_keeps_its_best_checkpoint_pushes_that_policy_and_says_which(
    hub_answers, command, tmp_path, monkeypatch, written, pushed
):
    run = tmp_path / "run"

    def trained(config, start, name) -> int:
        for policy in written:
            (run / "policy" / policy).mkdir(parents=True)
        return 0

    monkeypatch.setattr(train, "_run", trained)
    words = ["--checkpoint.keep-best", "validation/reward", "--push-to-hub", "me/mine"]
    code, out, err = command(*DEBUG, *words, "--run-dir", str(run))
    assert (code, err) == (0, "") and hub_answers == [("me/mine", run / pushed.split()[0])]
    assert out.endswith(f"pushing     {run}/{pushed} to me/mine\npushed      https://hub/me/mine\n")


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "the policy of the last step is pushed to me/mine"),
        (
            ["--checkpoint.keep-best", "validation/reward"],
            "the best policy by validation/reward is pushed to me/mine",
        ),
    ],
)
def test_the_plan_says_which_policy_is_pushed(hub_answers, command, words, said):
    code, out, _ = command(*DEBUG, *words, "--push-to-hub", "me/mine", "--dry-run")
    assert code == 0 and f"\nhub            {said}\n" in out


def test_a_run_that_had_ended_is_pushed_when_it_is_resumed(
    hub_answers, command, tmp_path, monkeypatch
):
    """A job that was killed between its last step and the upload is started again."""
    run = tmp_path / "run"
    (run / "policy/step-10").mkdir(parents=True)
    resumed = SimpleNamespace(run_dir=run, command=lambda command: command)
    monkeypatch.setattr(train, "_find_run", lambda given: resumed)
    monkeypatch.setattr(gate, "pass_gate", lambda config, command, resumed: NothingToStart())
    words = ["--resume", str(run), "--push-to-hub", "me/mine"]
    config = rl_grpo_qwen3_debug()
    monkeypatch.setattr(train, "load_config", lambda command: config)
    code, _, err = command(*words)
    assert (code, err) == (0, "") and hub_answers == [("me/mine", run / "policy/step-10")]


def test_a_run_without_a_policy_says_that_nothing_was_pushed(
    hub_answers, command, tmp_path, monkeypatch
):
    """A run that can learn nothing ends before its first step."""
    monkeypatch.setattr(train, "_run", lambda config, start, name: 0)
    run = tmp_path / "run"
    code, _, err = command(*DEBUG, "--run-dir", str(run), "--push-to-hub", "me/mine")
    assert code == 1 and hub_answers == []
    assert_one_line(err, "error: me/mine was not pushed: the run has written no policy")


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_try_again(
    tmp_path, capsys, monkeypatch
):
    def fail(folder, name):
        raise ConnectionError("the network\nis gone")

    monkeypatch.setattr(config_hub, "push_folder", fail)
    (tmp_path / "my policy").mkdir()
    assert not config_hub.push(tmp_path / "my policy", "me/mine")
    err = capsys.readouterr().err
    assert_one_line(
        err,
        "me/mine was not pushed (ConnectionError: the network",
        f"again: hf upload me/mine '{tmp_path}/my policy'",
    )
    assert (tmp_path / "my policy").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--to", "new"], "RUN_OR_CHECKPOINT = 'nowhere': no such folder"),
        (["empty", "--to", "new"], "can't be resumed: it has no complete checkpoint"),
        (
            ["empty", "--to", "empty"],
            "--to = 'empty': it is there already: name a folder that is not",
        ),
    ],
)
def test_what_can_not_be_exported_is_one_line_and_writes_nothing(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert export.main(words) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
