"""``--model``: folders, models of the hub, and what is said without a hub."""

import pytest
from huggingface_hub import constants

from torchtitan.experiments.rl.command import hub
from torchtitan.experiments.rl.command.command_line import parse_command
from torchtitan.experiments.rl.command.hub import model_folder
from torchtitan.experiments.rl.errors import ConfigError

DEBUG = ["--config", "rl_grpo_qwen3_debug"]


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(hub, "hub_fault", lambda: "no hub answers at https://hub")


def test_a_folder_is_taken_as_it_is(command, tokenizer_path, monkeypatch):
    monkeypatch.chdir(tokenizer_path.parent)
    assert model_folder("tiny_qwen3") == str(tokenizer_path)
    code, out, err = command(*DEBUG, "--model", "tiny_qwen3", "--dry-run")
    assert (code, err) == (0, "") and f"weights        {tokenizer_path}\n" in out


def test_without_a_hub_one_line_says_what_to_do(refused, no_hub):
    err = refused(*DEBUG, "--model", "Some/Model-1B")
    assert (
        "--model = 'Some/Model-1B': no such folder, and never downloaded here (no hub answers at https://hub)"
        in err
    )
    assert (
        "run `hf download Some/Model-1B --local-dir Model-1B`, bring the folder Model-1B here, and name it"
        in err
    )


def test_what_is_no_name_of_the_hub_is_refused(refused):
    assert "no such folder, and no name of the hub, such as Qwen/Qwen3-0.6B" in refused(
        *DEBUG, "--model", "a/b/c"
    )


def test_a_model_of_the_hub_is_downloaded_and_its_folder_overrides_the_configs(
    command, no_hub, tokenizer_path, monkeypatch
):
    asked = []

    def download(name, *, allow_patterns):
        asked.append((name, constants.is_offline_mode()))
        return str(tokenizer_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_folder("Some/Model") == str(tokenizer_path)  # downloaded before: nobody is asked
    monkeypatch.setattr(hub, "hub_fault", lambda: None)
    code, out, err = command(*DEBUG, "--model", "Some/Model", "--dry-run")
    assert code == 0 and f"weights        {tokenizer_path}\n" in out
    assert (
        err
        == "model       Some/Model: looking it up in the hub, and downloading what is not here yet\n"
    )
    assert asked[0] == ("Some/Model", True) and asked[1][0] == "Some/Model"


def test_a_download_that_fails_is_one_line(monkeypatch):
    def download(name, *, allow_patterns):
        raise OSError("404 Client\nError")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "hub_fault", lambda: None)
    with pytest.raises(
        ConfigError, match="--model = 'Some/Model': can't be downloaded: OSError: 404 Client Error"
    ):
        model_folder("Some/Model")


def test_the_words_of_a_scheduled_run_keep_the_models_name():
    command = parse_command([*DEBUG, "--model", "Some/Model", "--model.flavor", "0.6B"])
    assert command.model == "Some/Model" and command.overrides == ["--model.flavor", "0.6B"]
    assert command.words_in("/run", resumes=False) == [
        *DEBUG,
        "--model",
        "Some/Model",
        "--model.flavor",
        "0.6B",
        "--run-dir",
        "/run",
    ]
