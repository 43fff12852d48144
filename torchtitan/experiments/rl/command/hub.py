"""``--model``: a hub folder, a run's folder, or a model of the hub, which is downloaded."""

import contextlib
import os
import re
import shlex
import sys
from pathlib import Path

from torchtitan.experiments.rl.checkpointing.folder import checkpoints, policies
from torchtitan.experiments.rl.command.folder_kinds import (
    AdapterFolder,
    CheckpointFolder,
    PolicyFolder,
    RunFolder,
    folder_kind,
)
from torchtitan.experiments.rl.command.run_folder import SavedCommand, read_command
from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault, push_folder, without_hub
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.hub import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    has_config,
    is_adapter,
)
from torchtitan.experiments.rl.observability.console import near, typed_command, write_line
from torchtitan.experiments.rl.printable import one_sentence, perhaps_meant, printable_line

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer*"]
"""Patterns of the files that are downloaded of a model's repository. Other files hold the same
weights in formats that are not read here."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_folder(model: str, *, field: str = "--model") -> str:
    """Return the hub folder that holds ``model``.

    Of a run it is the newest policy, of a run's checkpoint the policy of that step.

    The folder of PEFT in a run's policy stands for that policy, which has the same adapters merged.
    A model of the hub is downloaded into the hub's own cache, with its progress on stderr.

    Args:
        field: option that names ``model``, for errors.

    Raises:
        ConfigError: it is neither a folder nor a model of the hub that can be downloaded or was
            before, or a run that has saved no policy, or adapters without their model.
    """
    if os.path.isdir(model):
        return str(_policy_in(Path(os.path.abspath(model)), field))
    if not _NAME.fullmatch(model):
        raise ConfigError(
            field,
            model,
            "no such folder, and no name of the hub, such as Qwen/Qwen3-0.6B"
            + perhaps_meant(Path(model)),
        )
    from huggingface_hub import snapshot_download

    fault = hub_fault()
    if fault is None:
        write_line(
            sys.stderr,
            f"model       {model}: looking it up in the hub, and downloading what is not here yet",
        )
    try:
        with contextlib.nullcontext() if fault is None else without_hub():
            return snapshot_download(model, allow_patterns=FILES)
    except Exception as error:  # the hub, the network and the disk raise types of their own
        why = f"can't be downloaded: {one_sentence(f'{type(error).__name__}: {error}')}"
        if fault is not None:  # it is not in the cache, or not whole
            name = model.partition("/")[2]
            download = f"`hf download {model} --local-dir {name}`"
            why = (
                f"no such folder, and never downloaded here ({fault}): where there is a hub, run "
                f"{download}, "
            )
            why += f"bring the folder {name} here, and name it{perhaps_meant(Path(model))}"
        raise ConfigError(field, model, why) from error


def adapter_folder(given: str) -> Path:
    """Return the folder of PEFT that ``--init-adapter`` names, or that of a run's newest policy.

    Raises:
        ConfigError: there is no such folder, or it holds no adapters.
    """
    path = Path(os.path.abspath(given))
    option = "--init-adapter"
    if is_adapter(path):
        return path
    if not path.is_dir():
        raise ConfigError(
            option,
            given,
            "no such folder; name a folder of PEFT, or a run that has trained adapters",
        )
    policy = _policy_in(path, option)
    if is_adapter(policy / ADAPTER_FOLDER):
        return policy / ADAPTER_FOLDER
    cure = f"is no folder of PEFT, for it has no {ADAPTER_CONFIG}"
    if has_config(str(policy)):
        cure += (
            "; of a whole model all weights are trained, or new adapters by --trainer.lora.rank: "
            f"--model {near(policy)}"
        )
    raise ConfigError(option, given, cure)


def command_of_run(model: str | None) -> SavedCommand | None:
    """Return the command that made the run in which ``model`` lies; None where it lies in none."""
    if model is None:
        return None
    match folder_kind(Path(os.path.abspath(model))):
        case RunFolder(run):
            return read_command(run)
        case CheckpointFolder() | PolicyFolder() as part:
            return read_command(part.run)
    return None


def _policy_in(path: Path, option: str) -> Path:
    """Return the policy that a folder is or holds; a folder of no known kind as it is.

    Raises:
        ConfigError: it holds none, or several.
    """
    match folder_kind(path):
        case AdapterFolder() as adapter:
            return _merged_policy(adapter, option)
        case RunFolder(run):
            return _one_policy(path, policies(run), checkpoints(run), option)
        case CheckpointFolder() as checkpoint:
            step = path.name.removeprefix("step-").lstrip("0")
            found = [policy for policy in policies(checkpoint.run) if policy.name == f"step-{step}"]
            return _one_policy(path, found, [path], option)
    return path


def _merged_policy(adapter: AdapterFolder, option: str) -> Path:
    """Return the whole model that has the adapters of a folder.

    Raises:
        ConfigError: no run has saved one beside it.
    """
    if adapter.merged is not None:
        return adapter.merged
    words = f"{typed_command('export')} {near(adapter.path)} --to FOLDER"
    cure = (
        f"a folder of PEFT, which has no whole model: this merges it into its base: {words} "
        "(--init-adapter trains on)"
    )
    raise ConfigError(option, str(adapter.path), cure)


def _one_policy(path: Path, found: list[Path], saved: list[Path], option: str) -> Path:
    """Return the newest of the policies of a run or of a checkpoint.

    Args:
        path: folder that was named.
        found: its policies.
        saved: its checkpoints, one of which becomes a policy by ``rl-export``.

    Raises:
        ConfigError: there is none, or its tasks trained an adapter each.
    """
    if found:
        if (one := next(found[-1].glob("*/config.json"), None)) is not None:
            cure = (
                f"its tasks trained an adapter each: name one of them, such as {near(one.parent)}"
            )
            raise ConfigError(option, str(path), cure)
        return found[-1]
    if not saved:
        cure = "a run that has saved neither a policy nor a checkpoint: name another"
        raise ConfigError(option, str(path), cure)
    words = f"{typed_command('export')} {near(saved[-1])} --to FOLDER"
    cure = f"no policy was saved there; this makes one of the checkpoint: {words}"
    raise ConfigError(option, str(path), cure)


def push(folder: Path, name: str, *, which: str | None = None) -> bool:
    """Upload ``folder`` to the model ``name``, and print whether that went well.

    Args:
        which: words that tell the policy from the run's others; None if there are no others.

    Returns:
        True if it is there; else a line has said how to try again.
    """
    what = f"{folder} ({which})" if which else str(folder)
    write_line(sys.stdout, printable_line(f"pushing     {what} to {name}"))
    try:
        url = push_folder(folder, name)
    except Exception as error:  # noqa: BLE001 - hub, network and disk raise types of their own
        again = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}"
        cause = one_sentence(f"{type(error).__name__}: {error}")
        write_line(
            sys.stderr,
            printable_line(
                f"error: {name} was not pushed ({cause}); the policy is saved; again: {again}"
            ),
        )
        return False
    write_line(sys.stdout, printable_line(f"pushed      {url}"))
    return True
