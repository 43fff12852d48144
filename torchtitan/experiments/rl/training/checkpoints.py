"""Saves and loads what the trainer's ranks hold: model, optimizer, schedule.

    between two steps    begin ──▶ copy in the host's memory ──▶ <checkpoint>/trainer/step-N
    at the end           export ──▶ <run folder>/policy/step-N, a hub folder

``<checkpoint>/trainer/step-N`` is a distributed checkpoint of torch: any number of ranks writes it,
and any other number reads it. torchtitan's CheckpointManager loads it, and writes the run's last
weights as a hub folder.
"""

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torchtitan.components.checkpoint import (
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    CheckpointManager,
    ModelWrapper,
)
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.experiments.rl.checkpointing.folder import POLICY_FOLDER
from torchtitan.experiments.rl.compat.torch import PortableWriter, persistent_buffers
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.hub import ADAPTER_FOLDER, HubConfig, copy_beside
from torchtitan.experiments.rl.models.lora import (
    Adapters,
    LoRA,
    of_adapter,
    write_adapter,
    write_merged,
)
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_shape, policy_spec
from torchtitan.experiments.rl.training.reference import Reference
from torchtitan.experiments.rl.training.staging import HostStager, StagingError
from torchtitan.experiments.rl.weights.publisher import shard_of
from torchtitan.experiments.rl.weights.snapshot import digest
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

TORCHS_FILE_WRITER = "inline_container"
"""Part of the errors of torch's file writer, which also stand for those of the system."""
MIB = 2**20
EXPORT_ROW_LENGTH = 2
"""Row length of the model that ``export_checkpoint`` builds, which computes nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerStart:
    """A checkpoint that training goes on from."""

    folder: Path
    """Folder that holds the ``step-N`` of one checkpoint."""
    step: int
    """Number of optimizer steps that the trainer's weights have behind them: N, or 0 if only the
    weights are taken."""
    weights_only: bool = False
    """True if a new run begins with the weights. Its optimizer and schedule start anew."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Trained:
    """Optimizer, schedule and reference of the model, or of one of its adapters."""

    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    reference: Reference | None

    def states(self) -> dict[str, Any]:
        """Return what a checkpoint saves of this record, by torchtitan's names."""
        states: dict[str, Any] = {OPTIMIZER: self.optimizers, LR_SCHEDULER: self.lr_schedulers}
        if self.reference is not None:
            states["reference"] = self.reference
        return states

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, with the hyperparameters of each."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def rates(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group, as the schedule has it now."""
        return [
            rate for scheduler in self.lr_schedulers.schedulers for rate in scheduler.get_last_lr()
        ]


class TrainerCheckpoints:
    """Saves the state between two steps, and writes the policy at the end.

    Each method is collective.
    """

    def __init__(  # noqa: PLR0913 - what a learner has built
        self,
        *,
        model: nn.Module,
        trained: Mapping[str, Trained],
        adapter: BaseStateDictAdapter,
        hub_folder: Path,
        run_dir: Path,
        start: TrainerStart | None,
        adapters: Adapters | None = None,
        page_locked: bool = False,
    ):
        """Load ``start``, or the weights of ``hub_folder``.

        Args:
            model: the model, divided over the ranks, without values.
            trained: what is trained, by the name of the adapter; at "" if the model has no adapters
                with names.
            adapter: converter of the hub's names and layout.
            hub_folder: folder that the run begins with, whose tokenizer is copied to the policy.
            run_dir: the run's folder.
            start: checkpoint to go on from. None begins with ``hub_folder``.
            adapters: adapters of the model. A checkpoint then holds these and not the base, which
                comes from ``hub_folder``.
            page_locked: True if the state is copied into page-locked memory: it is on a GPU.

        Raises:
            RunError: the checkpoint has other weights than the model, or its adapters are of
                another base.
        """
        self._hub_folder = hub_folder
        self._export_folder = run_dir / POLICY_FOLDER
        self._model = model
        self._adapters = adapters
        self._group = dist.new_group(backend="gloo")
        self._stager = HostStager(self._group, page_locked=page_locked)
        self._writing: Future[Any] | None = None
        """Save that was begun last, until it has been waited for."""
        first = next(iter(trained.values()))
        self._manager = CheckpointManager.Config(
            enable=True,
            export_dtype=HubConfig.read(str(hub_folder)).dtype,
            interval=1,  # the run decides when to save
            initial_load_in_hf=True,
            last_save_in_hf=True,
            keep_latest_k=0,
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=first.optimizers,
            lr_schedulers=first.lr_schedulers,
            states={},
            sd_adapter=adapter,
            base_folder=str(run_dir),
        )
        if start is None or adapters is not None:
            # The manager would load a checkpoint that it finds in its folder, and takes the hub
            # folder if there is none.
            self._manager.folder = str(run_dir / "no-checkpoint-yet")
            self._manager.load()
        if start is None and adapters is not None:
            adapters.start()

        base = {} if adapters is None else {"base": BaseDigest(model)}
        states = self._manager.states
        states[MODEL] = ModelWeights(model) if adapters is None else AdapterWeights(adapters)
        states |= base
        # The manager's own are those of the first adapter: all go in below, by name.
        del states[OPTIMIZER]
        del states[LR_SCHEDULER]
        for name, part in trained.items():
            states |= {of_adapter(name, key): state for key, state in part.states().items()}
        if start is None:
            return
        if start.weights_only:
            load_weights(states[MODEL], start.folder, base)
        else:
            self._load(start, trained)

    def _load(self, start: TrainerStart, trained: Mapping[str, Trained]) -> None:
        """Load the whole state of a checkpoint, but keep the hyperparameters of this run's config.

        The checkpoint has the hyperparameters of the config that it was written with.
        """
        groups = [group for part in trained.values() for group in part.groups()]
        settings = [_hyperparameters(group) for group in groups]
        self._manager.folder = str(start.folder)
        self._manager.load(start.step)
        # Loading may replace the groups.
        groups = [group for part in trained.values() for group in part.groups()]
        rates = [rate for part in trained.values() for rate in part.rates()]
        for group, group_settings, rate in zip(groups, settings, rates, strict=True):
            group.update(group_settings, lr=rate)

    def begin(self, folder: Path, step: int) -> Future[Any]:
        """Copy the state, and begin to write it to ``folder/step-N``.

        The optimizer may change the state as soon as this returns.

        Returns:
            A future that completes when this rank's files are written. It has the error if the
            state can't be copied (StagingError) or written.
        """
        self._wait_for_last_save()
        states = {name: state for name, state in self._manager.states.items() if name != MODEL}
        states |= self._manager.states[MODEL].state_dict()  # in a checkpoint weights have no prefix
        writing: Future[Any] = Future()
        try:
            response = distributed_checkpoint.async_save(
                states,
                storage_writer=PortableWriter(folder / f"step-{step}"),
                process_group=self._group,
                async_stager=self._stager,
            )
            assert isinstance(response, Future), "only a stager that returns a future has another"
            writing = response
        except StagingError as error:
            writing.set_exception(error)
        self._writing = writing
        return writing

    def export(self, step: int, *, rank: int) -> Path:
        """Write the weights as a hub folder with the tokenizer, and return the folder.

        The folder appears under its name only when it is whole.

        Args:
            step: number of the last step, which names the folder.
            rank: rank of this process. Rank 0 finishes the folder.
        """
        self._wait_for_last_save()
        target = self._export_folder / f"step-{step}"
        if self._adapters is not None:
            tensors = self._adapters.peft()
            if rank == 0:
                write_policy(target, tensors, self._adapters.lora, base=self._hub_folder)
            return target

        being_written = self._export_folder / ".partial"
        # No rank writes before all have told the manager what they have, so rank 0 is done by then.
        if rank == 0:
            shutil.rmtree(being_written, ignore_errors=True)  # left by a run that was killed
        self._manager.folder = str(being_written)
        # A hub folder has queries, keys and values apart: torchtitan's wrapper takes them apart.
        self._manager.states[MODEL] = ModelWrapper(self._model)
        self._manager.save(step, last_step=True)
        self._manager.states[MODEL] = ModelWeights(self._model)
        if rank == 0:
            folder = being_written / f"step-{step}"
            # The ranks' files, from which the manager has put the hub's together.
            shutil.rmtree(folder / "sharded", ignore_errors=True)
            copy_beside(self._hub_folder, folder)
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            shutil.rmtree(being_written)
        return target

    def close(self) -> None:
        """Finish what is being written, and free the memory that the state was copied into."""
        self._wait_for_last_save()
        self._stager.close()
        self._manager.close()

    def _wait_for_last_save(self) -> None:
        """Wait for the last save, whose files are written from the memory that the next one needs.

        Its error is not raised here: the caller of ``begin`` has it.
        """
        if self._writing is not None:
            self._writing.exception()
            self._writing = None


class ModelWeights(Stateful):
    """A model's weights as each rank holds them.

    torchtitan's ``ModelWrapper`` gathers the fused queries, keys and values of all layers on every
    rank, and keeps them beside the model.
    """

    def __init__(self, model: nn.Module):
        tensors = dict(model.named_parameters()) | persistent_buffers(model)
        self._state = {
            name.replace("_checkpoint_wrapped_module.", ""): tensor.detach()
            for name, tensor in tensors.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: checkpoints are read into the tensors that ``state_dict`` returned."""


class AdapterWeights(Stateful):
    """All adapters of a model, saved in place of its weights."""

    def __init__(self, adapters: Adapters):
        self._adapters = adapters

    def state_dict(self) -> dict[str, Any]:
        return {
            of_adapter(name, key): tensor
            for name, state in self._adapters.states.items()
            for key, tensor in state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, tensor in self.state_dict().items():
            tensor.copy_(state_dict[key])
        self._adapters.load_active()


def load_weights(
    weights: Stateful,
    trainer_folder: Path,
    others: Mapping[str, Stateful],
    *,
    no_dist: bool = False,
) -> None:
    """Load the weights alone of a checkpoint.

    Args:
        weights: state to load the weights into.
        trainer_folder: the checkpoint's folder, which holds its ``step-N``.
        others: further states to load.
        no_dist: True if this process loads by itself.

    Raises:
        RunError: the checkpoint has other weights.
    """
    (folder,) = trainer_folder.glob("step-*")
    state = weights.state_dict()
    try:
        distributed_checkpoint.load({**state, **others}, checkpoint_id=str(folder), no_dist=no_dist)
    except distributed_checkpoint.CheckpointException as error:
        cause = " ".join(str(error).split())[:300]
        raise RunError(
            f"{folder} does not have the weights that are asked of it: a run of adapters goes on "
            "from adapters, of its names, rank and targets, and one of a whole model from that: "
            f"{cause}"
        ) from error
    weights.load_state_dict(state)


class BaseDigest(Stateful):
    """Digest of each frozen weight, int64 [tensors], computed as for a published weight.

    A checkpoint of adapters holds it, and is not loaded beside another base.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        """Compute the digests. Collective."""
        parameters: list[tuple[str, Any]] = sorted(model.named_parameters())
        frozen = [parameter for _, parameter in parameters if not parameter.requires_grad]
        self._digest = torch.stack([_whole_digest(parameter) for parameter in frozen])

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._digest.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare the checkpoint's digests with those of the model.

        Raises:
            RunError: the checkpoint's adapters are of another base.
        """
        if not torch.equal(state_dict["digest"], self._digest):
            raise RunError(
                "the checkpoint's adapters are of another base: model.hf_assets_path has other "
                "weights now"
            )


def _whole_digest(parameter: torch.Tensor) -> torch.Tensor:
    """Return the digest of a parameter that ranks may share, on the CPU. Collective."""
    if not isinstance(parameter, DTensor):
        return digest(parameter, shard_of(parameter), tuple(parameter.shape)).cpu()
    total = digest(parameter.to_local(), shard_of(parameter), tuple(parameter.shape))
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            dist.all_reduce(total, group=parameter.device_mesh.get_group(dim))
    return total.cpu()


def write_policy(
    target: Path,
    adapters: Mapping[str, Mapping[str, torch.Tensor]],
    lora: LoRA.Config,
    *,
    base: Path,
    merged: bool = True,
) -> None:
    """Write adapters merged into their base as a hub folder, or as PEFT folders.

    The folder appears under its name only when it is whole. Each adapter that has a name has a
    folder of its own in it.

    Args:
        target: the folder to write.
        adapters: tensors of each adapter, from ``Adapters.peft``.
        lora: config of the adapters.
        base: the hub folder that was trained on.
        merged: True to write the merged model, with its adapter inside as a PEFT folder. False to
            write the PEFT folder alone.
    """
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # left by a run that was killed
    for name, tensors in adapters.items():
        folder = being_written / name
        if merged:
            write_merged(folder, tensors, lora, base=base)
        write_adapter(folder / ADAPTER_FOLDER if merged else folder, tensors, lora, base=str(base))
    shutil.rmtree(target, ignore_errors=True)
    being_written.rename(target)


def write_error(error: BaseException, folder: Path) -> str:
    """Return in one line why files could not be written below a folder, and the cure.

    torch wraps the error that each rank raised. Its file writer answers a full disk with an error
    about positions in the file, so the free space is named for that error too.
    """
    failures = list(getattr(error, "failures", {}).values())
    cause = failures[0][0] if failures else error
    text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    is_full = any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT))
    if not (is_full or TORCHS_FILE_WRITER in text):
        return text
    free = shutil.disk_usage(folder).free
    fault = "is full" if is_full or free < MIB else "may be full"
    return (
        f"the disk of {folder} {fault}, with {free // MIB:,} MiB free: free space there, or lower "
        f"checkpoint.keep ({text})"
    )


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of an optimizer's group, but for its learning rates."""
    others = ("params", "param_names", "lr", "initial_lr")
    return {name: value for name, value in group.items() if name not in others}


def export_checkpoint(
    trainer_folder: Path,
    model: ModelConfig,
    target: Path,
    *,
    lora: LoRA.Config | None = None,
    names: Sequence[str] = ("",),
    adapter: bool = False,
) -> None:
    """Write the weights of a checkpoint as a hub folder.

    The weights have the dtype of the folder that the run began with, whose config.json and
    tokenizer are copied. All of them are in this process's memory once, and experts twice. The
    folder appears under its name only when it is whole.

    Args:
        trainer_folder: the checkpoint's folder, which holds its ``step-N``.
        model: the model that the run began with.
        target: the folder to write, which is not there yet.
        lora: config of the checkpoint's adapters, which are added to the base in float32. None for
            a checkpoint of the whole model.
        names: names of the checkpoint's adapters.
        adapter: True to write the adapters as PEFT folders, and nothing else.

    Raises:
        ConfigError: the model's folder is not there, or is of no known family.
        RunError: the checkpoint is of another model.
    """
    hub = HubConfig.read(model.hf_assets_path)
    spec = policy_spec(model, device="cpu", max_seq_len=EXPORT_ROW_LENGTH, lora=lora)
    assert spec.state_dict_adapter is not None, "every family has one"
    with torch.device("meta"):
        built = spec.model.build()
    if lora is not None:
        built.to_empty(device="cpu")  # pages of the base are never touched
        adapters = Adapters(built, spec, lora, names)
        load_weights(AdapterWeights(adapters), trainer_folder, {}, no_dist=True)
        base = Path(model.hf_assets_path)
        write_policy(target, adapters.peft(), lora, base=base, merged=not adapter)
        return

    built.to(getattr(torch, hub.dtype)).to_empty(device="cpu")
    if decoder_shape(spec).tied:
        built.lm_head.weight = built.tok_embeddings.weight  # to_empty has separated them
    load_weights(ModelWeights(built), trainer_folder, {}, no_dist=True)
    tensors = spec.state_dict_adapter(spec.model, model.hf_assets_path).to_hf(built.state_dict())
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # left by a command that was killed
    being_written.mkdir(parents=True)
    # Experts are views of one tensor, of which the writer would keep the first alone.
    separate = {
        name: tensor.clone() if ".experts." in name else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_torch_state_dict(separate, being_written)
    copy_beside(Path(model.hf_assets_path), being_written)
    being_written.rename(target)
