"""The command that writes a hub folder, ``rl-export``.

It turns a checkpoint, or a PEFT folder and its base, into a folder that transformers loads and that
every command takes as a model.

    python -m torchtitan.experiments.rl.export RUN_OR_CHECKPOINT --to FOLDER [--push-to-hub NAME]
    python -m torchtitan.experiments.rl.export PEFT_FOLDER --to FOLDER [--model BASE]

Exit codes: 0 done; 1 the folder is whole and was not pushed; 2 nothing was written.
"""

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from torchtitan.experiments.rl.command.hub import model_folder, push
from torchtitan.experiments.rl.compat.huggingface_hub import push_fault
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.models.hub import HubConfig, is_adapter
from torchtitan.experiments.rl.observability.console import near, typed_command, write_line
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.process.entry import of_command, run_command
from torchtitan.experiments.rl.process.logs import quiet_libraries
from torchtitan.experiments.rl.process.setup import set_up_process


@of_command(RunError, OSError)
def main(arguments: list[str] | None) -> int:
    options = parser().parse_args(arguments)
    target = Path(options.to).absolute()
    if target.exists():
        raise ConfigError("--to", options.to, "it is there already: name a folder that is not")
    if options.push_to_hub is not None and (fault := push_fault(options.push_to_hub)) is not None:
        raise ConfigError("--push-to-hub", options.push_to_hub, fault)
    set_up_process()
    with quiet_libraries():
        source = _export(options, target)
    lines = [f"exported    {source}", f"policy      {target}"]
    if (command := evaluation(source, target)) is not None:
        lines.append(f"measure it  {command}")
    for line in lines:
        write_line(sys.stdout, printable_line(line))
    return 0 if options.push_to_hub is None or push(target, options.push_to_hub) else 1


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog=typed_command("export"),
        description="Turn a checkpoint of a run into a hub folder.",
    )
    options.add_argument(
        "checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        help="a run folder (its newest checkpoint), or a checkpoint; or a folder of PEFT, which "
        "is merged into its base",
    )
    options.add_argument(
        "--to",
        metavar="FOLDER",
        required=True,
        help="the hub folder to write, or of tasks with adapters one for each; not there yet",
    )
    form = options.add_mutually_exclusive_group()
    form.add_argument(
        "--merge",
        action="store_true",
        help="of a run with trainer.lora: its adapters added to the base (default)",
    )
    form.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with trainer.lora: its adapters alone, as a folder of PEFT",
    )
    options.add_argument(
        "--push-to-hub",
        metavar="NAME",
        help="upload it to this model of the hub, such as me/my-model",
    )
    options.add_argument(
        "--model",
        metavar="FOLDER",
        help="the hub folder of the model that the run began with, if it has moved since; of a "
        "PEFT folder the base",
    )
    return options


def _export(options: argparse.Namespace, target: Path) -> Path:
    """Write the hub folder ``target``.

    Returns:
        What was exported: the checkpoint's folder, or the PEFT folder.
    """
    from torchtitan.experiments.rl.checkpointing.folder import TRAINER_FOLDER
    from torchtitan.experiments.rl.command.resume import find_checkpoint, read_saved
    from torchtitan.experiments.rl.models.lora import LoRA
    from torchtitan.experiments.rl.models.policy import ModelConfig
    from torchtitan.experiments.rl.training.checkpoints import export_checkpoint

    given: str = options.checkpoint
    if is_adapter(given):
        if options.adapter:
            cure = f"{given} is a folder of PEFT already: leave it out"
            raise ConfigError("--adapter", True, cure)
        _merge(given, options.model, target)
        return Path(given)
    run_dir, checkpoint = find_checkpoint(given)
    if options.model is not None:
        HubConfig.read(options.model, field="--model")
    _, config = read_saved(run_dir, checkpoint)
    if config is None or not isinstance(config.get("model"), dict):
        cure = f"{run_dir} has no readable config.json: name a run's folder"
        raise ConfigError("RUN_OR_CHECKPOINT", given, cure)
    trainer = config.get("trainer")
    adapters = trainer.get("lora") if isinstance(trainer, dict) else None
    lora = None if adapters is None else msgspec.convert(adapters, LoRA.Config)
    if lora is None and (options.adapter or options.merge):
        name = "--adapter" if options.adapter else "--merge"
        cure = "the run has trained the whole model, and no adapters: leave it out"
        raise ConfigError(name, True, cure)
    model = ModelConfig(
        hf_assets_path=options.model or config["model"]["hf_assets_path"],
        flavor=config["model"].get("flavor"),
    )
    names = sorted({task.get("adapter", "") for task in config["tasks"].values()})
    export_checkpoint(
        checkpoint / TRAINER_FOLDER, model, target, lora=lora, names=names, adapter=options.adapter
    )
    return checkpoint


def evaluation(source: Path, target: Path) -> str | None:
    """Return the command that evaluates ``target`` as the run of the exported checkpoint did.

    Args:
        source: what was exported: the checkpoint's folder, or the PEFT folder.

    Returns:
        None if ``target`` is no whole model, or the run has no validation set.
    """
    from torchtitan.experiments.rl.command.overrides import last_of_each
    from torchtitan.experiments.rl.command.resume import read_saved

    command = f"{typed_command('evaluate')} --model {shlex.quote(near(target))} --config"
    if not (target / "config.json").is_file():  # adapters, or one folder for each
        return None
    saved, config = read_saved(source.parent.parent, source)
    if saved is None or config is None:
        return f"{command} NAME"
    if not any(task.get("validation") for task in config["tasks"].values()):
        return None
    words = [saved.config_name, "--module", saved.module, *last_of_each(saved.overrides)]
    adapters = config["trainer"].get("lora") or {}
    if adapters.get("init_from") is not None:
        words += ["--trainer.lora.init-from", "None"]  # they are merged into the folder's weights
    return f"{command} {shlex.join(words)}"


def _merge(given: str, base: str | None, target: Path) -> None:
    """Merge the PEFT folder ``given`` into ``base``, or else into the base that it names itself."""
    from torchtitan.experiments.rl.models.lora import adapter_base, merge_adapter

    name = base or adapter_base(Path(given), field="RUN_OR_CHECKPOINT")
    folder = model_folder(name, field="--model")
    HubConfig.read(folder, field="--model")
    merge_adapter(Path(given), Path(folder), target, field="RUN_OR_CHECKPOINT")


if __name__ == "__main__":
    run_command(main)
