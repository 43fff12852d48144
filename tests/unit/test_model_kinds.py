"""Each command takes a hub folder, a run, a checkpoint or a folder of PEFT as a model, or says which option does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.command_line import DRY_OR_NOT
from torchtitan.experiments.rl import evaluate, export, play, simulate
from torchtitan.experiments.rl.checkpointing.folder import CheckpointWriter
from torchtitan.experiments.rl.command.command_line import parse_command
from torchtitan.experiments.rl.command.hub import model_folder
from torchtitan.experiments.rl.command.resume import save_config
from torchtitan.experiments.rl.command.run_folder import SavedCommand, save_command
from torchtitan.experiments.rl.config_registry import TINY_MODEL, rl_grpo_qwen3_debug
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.models.lora import LoRA, adapter_shapes, write_adapter, write_merged
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.tools.report.run import ReportedRun

DEBUG = ["--config", "rl_grpo_qwen3_debug"]
ADAPTERS = LoRA.Config(rank=4, alpha=8)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """The adapters of the tiny model: 28 matrices, and so 56 tensors."""
    spec = policy_spec(
        ModelConfig(hf_assets_path=str(TINY_MODEL)), device="cpu", max_seq_len=1, lora=ADAPTERS
    )
    random = torch.Generator().manual_seed(0)
    shapes = [
        shape
        for of_target in adapter_shapes(spec, ADAPTERS).values()
        for shape in of_target.items()
    ]
    assert len(shapes) == 56
    return {name: torch.randn(shape, generator=random) for name, shape in shapes}


@pytest.fixture
def peft(tmp_path, tensors) -> Path:
    write_adapter(tmp_path / "peft", tensors, ADAPTERS, base=str(TINY_MODEL))
    return tmp_path / "peft"


@pytest.fixture
def run(tmp_path, tensors) -> Path:
    """A run of adapters, with a policy and a checkpoint of step 2, which holds no tensors."""
    folder = tmp_path / "run"
    folder.mkdir()
    words = ["--trainer.lora.rank", "4", "--trainer.lora.alpha", "8"]
    save_command(
        folder,
        SavedCommand(
            config_name=DEBUG[1],
            module="torchtitan.experiments.rl.config_registry",
            overrides=words,
        ),
    )
    config = rl_grpo_qwen3_debug()
    config.trainer.lora = ADAPTERS
    save_config(folder, config)
    write_merged(folder / "policy" / "step-2", tensors, ADAPTERS, base=Path(TINY_MODEL))
    write_adapter(folder / "policy" / "step-2" / "adapter", tensors, ADAPTERS, base=str(TINY_MODEL))
    checkpoints = CheckpointWriter(folder, keep=1)
    (checkpoints.begin(2) / "trainer").mkdir()
    checkpoints.commit(2)
    return folder


def refusal(main, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        main(list(words))
    return str(error.value)


# ---- a model


def test_a_run_its_checkpoint_its_policy_and_its_adapter_are_one_model(run):
    policy = run / "policy" / "step-2"
    for named in (run, run / "checkpoints" / "step-000002", policy, policy / "adapter"):
        assert model_folder(str(named)) == str(policy), named


def test_a_run_whose_tasks_trained_an_adapter_each_names_one_of_them(run, refused):
    policy = run / "policy" / "step-2"
    for name in ("code", "math"):
        ignored = shutil.ignore_patterns("adapter", "code", "math")
        shutil.copytree(policy, policy / name, ignore=ignored)
    (policy / "config.json").unlink()
    line = refused(*DEBUG, "--model", str(run), "--dry-run")
    assert "its tasks trained an adapter each: name one of them, such as" in line


def test_a_folder_of_peft_is_no_model_and_the_error_says_how_it_becomes_one(peft, refused):
    for option in ("--model", "--against"):
        with pytest.raises(
            ConfigError, match=f"{option} = '{peft}': a folder of PEFT, which has no whole model"
        ):
            model_folder(str(peft), field=option)
    err = refused(*DEBUG, "--model", str(peft))
    assert f"rl.export {peft} --to FOLDER (--init-adapter trains on)" in err
    assert "a folder of PEFT" in refused(*DEBUG, "--model.hf-assets-path", str(peft), "--dry-run")


def test_a_config_that_names_a_run_as_its_model_is_told_where_its_policies_are(run, refused):
    for folder in (run, run / "checkpoints" / "step-000002"):
        shutil.copy(run / "config.json", folder / "config.json") if folder != run else None
        err = refused(*DEBUG, "--model.hf-assets-path", str(folder), "--dry-run")
        assert (
            f"model.hf_assets_path = '{folder}': a run or a checkpoint of one: its policies are"
            in err
        )


# ---- a run to go on with, or to begin with


@pytest.mark.parametrize("option", ["--resume", "--init-from"])
def test_what_is_no_run_is_named_with_the_option_that_takes_it(refused, peft, option):
    given = [] if option == "--resume" else DEBUG
    assert "a hub folder, and no run: --model takes it" in refused(
        *given, option, str(TINY_MODEL), "--dry-run"
    )
    assert "a folder of PEFT, and no run: --init-adapter takes it" in refused(
        *given, option, str(peft), "--dry-run"
    )


def test_a_checkpoint_of_adapters_begins_no_run_of_the_whole_model_nor_of_others(
    refused, command, run
):
    lora = ["--trainer.lora.rank", "4", "--init-from", str(run), "--dry-run"]
    assert command(*DEBUG, *lora)[0] == 0
    assert "it has trained adapters, and this run the whole model" in refused(*DEBUG, *lora[2:])
    assert "trainer.lora.rank = 2: its adapters have rank 4" in refused(
        *DEBUG, *lora, "--trainer.lora.rank", "2"
    )
    save_config(run, rl_grpo_qwen3_debug())
    assert "it has trained the whole model, and this run trains adapters" in refused(*DEBUG, *lora)


def test_adapters_begin_as_those_of_one_folder(refused, run, peft):
    err = refused(*DEBUG, "--init-from", str(run), "--init-adapter", str(peft), "--dry-run")
    assert "the adapters begin as --init-adapter's: leave one of them out" in err


# ---- adapters


def test_a_run_stands_for_the_adapters_of_its_newest_policy(run, peft):
    adapter = run / "policy" / "step-2" / "adapter"
    for named in (run, run / "checkpoints" / "step-000002", adapter.parent, adapter):
        words = parse_command([*DEBUG, "--init-adapter", str(named)]).overrides
        assert words == [
            *(
                "--trainer.lora.rank",
                "4",
                "--trainer.lora.alpha",
                "8.0",
                "--trainer.lora.init-from",
                str(adapter),
            )
        ]
    with pytest.raises(
        ConfigError, match="has no adapter_config.json; of a whole model all weights are trained"
    ):
        parse_command([*DEBUG, "--init-adapter", str(TINY_MODEL)])
    with pytest.raises(ConfigError, match="no such folder; name a folder of PEFT"):
        parse_command([*DEBUG, "--init-adapter", "nowhere"])


@DRY_OR_NOT
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensors: {}, "its adapter_model.safetensors has no tensors"),
        (
            lambda tensors: {
                name: tensor
                for name, tensor in tensors.items()
                if ".layers.0." in name or ".layers.1." in name
            },
            "it has no base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight, and lacks 28 of the 56 tensors",
        ),
        (
            lambda tensors: {
                name: tensor
                for name, tensor in tensors.items()
                if "q_proj" in name or "down_proj" in name
            },
            "train the matrices that it has: --trainer.lora.targets w2 wq",
        ),
        (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if "lora_A" in name},
            "lacks 28 of the 56 tensors",
        ),
        (
            lambda tensors: {
                name.replace("model.layers", "language_model.layers"): t
                for name, t in tensors.items()
            },
            "which is no adapter of trainer.lora.targets in this model",
        ),
        (
            lambda tensors: {name: tensor[:-1] for name, tensor in tensors.items()},
            "has shape [3, 384]",
        ),
        (
            None,
            "has no adapter_model.safetensors: save the adapter again with safe_serialization=True",
        ),
    ],
    ids=[
        "no tensors",
        "half of the layers",
        "one matrix",
        "A without B",
        "other names",
        "another rank",
        "no file",
    ],
)
def test_adapters_that_are_not_those_of_the_model_are_refused_by_their_header(
    refused, peft, tensors, change, fault, dry_run
):
    file = peft / "adapter_model.safetensors"
    file.unlink()
    if change is not None:
        save_file({name: tensor.contiguous() for name, tensor in change(tensors).items()}, file)
    err = refused(*DEBUG, "--init-adapter", str(peft), *dry_run)
    assert f"trainer.lora.init_from = '{peft}'" in err and fault in err


def test_adapters_of_the_model_or_of_the_named_matrices_are_taken(command, peft, tensors):
    assert command(*DEBUG, "--init-adapter", str(peft), "--dry-run")[0] == 0
    some = {
        name: tensor for name, tensor in tensors.items() if "q_proj" in name or "down_proj" in name
    }
    save_file(some, peft / "adapter_model.safetensors")
    code, _, err = command(
        *DEBUG, "--init-adapter", str(peft), "--trainer.lora.targets", "wq", "w2", "--dry-run"
    )
    assert code == 0, err


# ---- options that a command does not use


@pytest.mark.parametrize(
    "parse",
    [
        lambda words: evaluate.parse_options(words),
        lambda words: play.main(words),
    ],
    ids=["evaluate", "play"],
)
def test_a_tool_refuses_the_options_that_it_does_not_use(parse, peft, capsys):
    def fault(*words: str) -> str:
        try:
            assert parse([*DEBUG, *words]) == 2, words
        except ConfigError as error:
            return str(error)
        return capsys.readouterr().err

    for words in (
        ["--gpus", "2"],
        ["--push-to-hub", "me/mine"],
        ["--resume=auto"],
        ["--init-from=run"],
        ["--dry-run"],
    ):
        assert (
            f"{words[0].partition('=')[0]} = " in (err := fault(*words))
            and "means nothing here" in err
        )
    for words in (["--init-adapter", str(peft)], [f"--init-adapter={peft}"]):
        assert (
            "whole models are asked here, and it would be left out" in (err := fault(*words))
            and "rl.export ADAPTER" in err
        )


def test_a_simulation_refuses_what_it_can_not_do(peft):
    assert "--push-to-hub" in refusal(simulate.parse_options, *DEBUG, "--push-to-hub", "me/mine")
    simulate.parse_options(
        [*DEBUG, "--init-adapter", str(peft)]
    )  # it counts the adapters' parameters


def prepared(*words: str):
    options, command = evaluate.parse_options([*words])
    return evaluate._prepare(options, command)


def test_an_evaluation_does_not_leave_out_the_adapters_that_its_config_begins_with(
    tmp_path, monkeypatch, peft, run
):
    """Seen: the base was measured (0.320) in place of the adapters (0.922)."""
    monkeypatch.chdir(tmp_path)
    begins = [
        "--trainer.lora.rank",
        "4",
        "--trainer.lora.alpha",
        "8",
        "--trainer.lora.init-from",
        str(peft),
    ]
    with pytest.raises(
        ConfigError,
        match=r"trainer.lora.init_from = .*: whole models are asked here, and it would be left out",
    ):
        prepared(*DEBUG, *begins)
    with pytest.raises(ConfigError, match=f"--against = '{peft}': a folder of PEFT"):
        prepared(*DEBUG, "--against", str(peft))
    (measured,) = prepared(*DEBUG, "--model", str(run), "--run-dir", "of_a_run")
    assert measured.label == str(run / "policy" / "step-2")
    adapter = str(run / "policy" / "step-2" / "adapter")
    (measured,) = prepared("--model", adapter, *DEBUG, "--run-dir", "of_an_adapter")
    assert measured.label == str(run / "policy" / "step-2")


# ---- report


def test_a_report_of_a_checkpoint_or_of_a_model_is_refused(run):
    shutil.copy(run / "config.json", run / "checkpoints" / "step-000002")
    ReportedRun(run).close()
    for folder in (
        run / "checkpoints" / "step-000002",
        run / "policy" / "step-2",
        Path(TINY_MODEL),
    ):
        with pytest.raises(
            RunError, match="no run, but a checkpoint or a model: name the folder of its run"
        ):
            ReportedRun(folder)


# ---- export


def test_a_folder_of_peft_is_merged_into_the_base_that_it_names(tmp_path, peft, tensors, capsys):
    target = tmp_path / "merged"
    assert export.main([str(peft), "--to", str(target)]) == 0, capsys.readouterr().err
    base, merged = (
        load_file(folder / "model.safetensors") for folder in (Path(TINY_MODEL), target)
    )
    module = "model.layers.2.mlp.up_proj"
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
    assert torch.equal(
        merged[f"{module}.weight"], base[f"{module}.weight"] + 2.0 * (b @ a)
    )  # alpha 8, rank 4
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])
    assert model_folder(str(target)) == str(target) and (target / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "peft"]


def test_an_export_names_the_command_that_evaluates_it_as_the_run_did(tmp_path, monkeypatch):
    checkpoint = tmp_path / "run/checkpoints/step-000002"
    checkpoint.mkdir(parents=True)
    command = SavedCommand(
        config_name="rl_mine", module="my_tasks", overrides=["--trainer.lora.init-from", "a b"]
    )
    save_command(tmp_path / "run", command)
    config = {
        "tasks": {"mine": {"validation": {"count": 8}}},
        "trainer": {"lora": {"init_from": "a b"}},
    }
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    assert export.evaluation(checkpoint, target) is None  # adapters alone
    (target / "config.json").write_text("{}")
    shown = export.evaluation(checkpoint, target).partition("evaluate ")[2]
    assert shown == (
        "--model out --config rl_mine --module my_tasks --trainer.lora.init-from 'a b' "
        "--trainer.lora.init-from None"
    )
    assert export.evaluation(tmp_path / "peft", target).endswith("--model out --config NAME")
    config["tasks"]["mine"]["validation"] = None
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    assert export.evaluation(checkpoint, target) is None


def test_what_can_not_be_merged_is_refused_and_nothing_is_written(tmp_path, peft, tensors, capsys):
    file, config = peft / "adapter_model.safetensors", peft / "adapter_config.json"

    def fault(*words: str) -> str:
        assert export.main([str(peft), "--to", str(tmp_path / "merged"), *words]) == 2
        assert not (tmp_path / "merged").exists()
        return capsys.readouterr().err

    assert "is a folder of PEFT already: leave it out" in fault("--adapter")
    assert f"--model = '{peft}': a folder of PEFT" in fault("--model", str(peft))
    for change, named in (
        (lambda name, tensor: {name.replace("up_proj", "x_proj"): tensor}, "x_proj.lora_"),
        (lambda name, tensor: {name: tensor[..., :-1].contiguous()}, "has shape [4, 383]"),
        (lambda name, tensor: {} if "lora_B" in name else {name: tensor}, "and no base_model"),
        (lambda name, tensor: {}, "has no tensors"),
    ):
        save_file(
            {k: v for name, tensor in tensors.items() for k, v in change(name, tensor).items()},
            file,
        )
        assert named in fault()
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None})
    )
    assert "names no base_model_name_or_path: name the base as --model" in fault()


def test_an_export_of_a_hub_folder_is_refused(tmp_path, capsys):
    assert export.main([str(TINY_MODEL), "--to", str(tmp_path / "new")]) == 2
    assert "a hub folder, and no run: --model takes it as it is" in capsys.readouterr().err
