"""Saves and loads what the trainer's ranks hold: model, optimizer, schedule. torchtitan's CheckpointManager does the work.

``<checkpoint>/trainer/step-N`` is a distributed checkpoint: any number of ranks writes it, and any other number reads it. A hub
folder is made of it, or of the run's last weights.
"""

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.experiments.rl.checkpointing.folder import POLICY_FOLDER
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec

SHORTEST = 2
"""Rows of the model that is made here: it computes nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerStart:
    """A checkpoint that training goes on from."""

    folder: Path
    """Holds the ``step-N`` of one checkpoint."""
    step: int
    """Optimizer steps behind the trainer's weights then: N, or 0 where only the weights are taken."""
    weights_only: bool = False
    """A new run begins with the weights; optimizer and schedule start anew."""


class TrainerCheckpoints:
    """Each method but ``wait_for_staging`` is collective."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: OptimizersContainer,
        lr_schedulers: LRSchedulersContainer,
        adapter: Any,
        hub_folder: Path,
        run_dir: Path,
        start: TrainerStart | None,
        states: Mapping[str, Stateful] | None = None,
    ):
        """Loads ``start``, or the weights of ``hub_folder``. ``states``: what else is saved, and loaded with ``start``."""
        self._hub_folder, self._export_folder = hub_folder, run_dir / POLICY_FOLDER
        weights_only = start is not None and start.weights_only
        self._manager = CheckpointManager.Config(
            enable=True,
            async_mode="async",
            export_dtype=HubConfig.read(str(hub_folder)).dtype,
            interval=1,  # when is decided elsewhere
            initial_load_in_hf=not weights_only,
            initial_load_path=str(_step_folder(start.folder)) if start is not None and weights_only else None,
            last_save_in_hf=True,
            keep_latest_k=0,
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states={**(states or {})},
            sd_adapter=adapter,
            base_folder=str(run_dir),
        )
        if start is None or weights_only:
            self._manager.folder = str(run_dir / "no-checkpoint-yet")  # else one in it would be loaded
            self._manager.load()
            return
        settings = [_settings(group) for optimizer in optimizers for group in optimizer.param_groups]
        self._manager.folder = str(start.folder)
        self._manager.load(start.step)
        # The checkpoint has those of the config it was written with. This run's may differ.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        rates = [rate for scheduler in lr_schedulers.schedulers for rate in scheduler.get_last_lr()]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def begin(self, folder: Path, step: int) -> Future[Any]:
        """Copy the state, and write it to ``folder/step-N`` beside what follows. Returns when the copy is made.

        Returns:
            Completed when this rank's files are written; has the error if they can't be.
        """
        self._end_last()
        self._manager.folder = str(folder)
        self._manager.save(step)
        future = self._manager.save_future
        assert future is not None, "an asynchronous save has a future"
        return future

    def wait_for_staging(self) -> None:
        """Until the copy of the state that is being saved is complete: the optimizer may change the state then."""
        self._manager.maybe_wait_for_staging()

    def export(self, step: int, *, rank: int) -> Path:
        """Write the weights as a hub folder, with the tokenizer, and return it. It is there when it is whole."""
        self._end_last()
        target = self._export_folder / f"step-{step}"
        being_written = self._export_folder / ".partial"
        if rank == 0:  # no rank writes before all have told the manager what they have
            shutil.rmtree(being_written, ignore_errors=True)  # of a run that was killed
        self._manager.folder = str(being_written)
        self._manager.save(step, last_step=True)
        if rank == 0:
            folder = being_written / f"step-{step}"
            shutil.rmtree(folder / "sharded", ignore_errors=True)  # the parts it was put together from
            for file in self._hub_folder.iterdir():
                if file.is_file() and ".safetensors" not in file.name:
                    shutil.copy(file, folder)
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            shutil.rmtree(being_written)
        return target

    def close(self) -> None:
        """Finish what is being written."""
        self._end_last()
        self._manager.close()

    def _end_last(self) -> None:
        """Wait for the last save. Who began it has its error: torchtitan keeps one that failed, and raises it at the next."""
        if self._manager.save_future is not None:
            self._manager.save_future.exception()
            self._manager.save_future = None


def write_error(error: BaseException) -> str:
    """The cause of a failed save in one line: torch wraps what each rank raised."""
    failures = list(getattr(error, "failures", {}).values())
    first = failures[0][0] if failures else error
    return f"{type(first).__name__}: {' '.join(str(first).split())}"


def _step_folder(folder: Path) -> Path:
    (found,) = folder.glob("step-*")
    return found.resolve()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of an optimizer's group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names", "lr", "initial_lr")}


def export_checkpoint(trainer_folder: Path, model: ModelConfig, target: Path) -> None:
    """Write the weights in ``trainer_folder`` (of a checkpoint) as the hub folder ``target``, which is there when it is whole.

    The weights have the dtype of the folder that the run began with, whose config.json and tokenizer are copied. All of them
    are in this process's memory once.

    Args:
        target: a folder that is not there yet.

    Raises:
        ConfigError: the model's folder is not there, or is of no known family.
        RunError: the checkpoint is of another model.
    """
    hub = HubConfig.read(model.hf_assets_path)
    spec = policy_spec(model, device="cpu", max_seq_len=SHORTEST)
    with torch.device("meta"):
        parameters = dict(spec.model.build().named_parameters())
    dtype = getattr(torch, hub.dtype)
    weights = {name: torch.empty(parameter.shape, dtype=dtype) for name, parameter in parameters.items()}
    (folder,) = trainer_folder.glob("step-*")
    try:
        distributed_checkpoint.load(weights, checkpoint_id=str(folder), no_dist=True)
    except distributed_checkpoint.CheckpointException as error:
        first = " ".join(str(error).split())[:300]
        raise RunError(f"{folder} can't be read as the model of {model.hf_assets_path}: {first}") from error
    assert spec.state_dict_adapter is not None, "every family has one"
    tensors = spec.state_dict_adapter(spec.model, model.hf_assets_path).to_hf(weights)
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # of a command that was killed
    being_written.mkdir(parents=True)
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, being_written)
    for file in Path(model.hf_assets_path).iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, being_written)
    being_written.rename(target)
