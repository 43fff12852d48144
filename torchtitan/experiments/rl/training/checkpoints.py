"""Saves and loads what the trainer's ranks hold: model, optimizer, schedule.

``<checkpoint>/trainer/step-N`` is a distributed checkpoint of torch: any number of ranks writes it,
and any other number reads it. torchtitan's CheckpointManager loads it, and writes the run's last
weights as a hub folder.
"""

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
from torchtitan.experiments.rl.compat.torch import persistent_buffers
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.hub import ADAPTER_FOLDER, HubConfig, copy_beside
from torchtitan.experiments.rl.models.lora import (
    Adapters,
    LoRA,
    of_adapter,
    write_adapter,
    write_merged,
)
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_config, policy_spec
from torchtitan.experiments.rl.training.reference import Reference
from torchtitan.experiments.rl.training.staging import HostStager, StagingError
from torchtitan.experiments.rl.weights.publisher import shard_of
from torchtitan.experiments.rl.weights.snapshot import digest

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


@dataclass(kw_only=True, slots=True, frozen=True)
class Trained:
    """Optimizer, schedule and reference of the model, or of one of its adapters."""

    optimizers: OptimizersContainer
    lr_schedulers: LRSchedulersContainer
    reference: Reference | None

    def states(self) -> dict[str, Any]:
        """What a checkpoint has of it."""
        found = {OPTIMIZER: self.optimizers, LR_SCHEDULER: self.lr_schedulers}
        return found if self.reference is None else found | {"reference": self.reference}

    def groups(self) -> list[dict[str, Any]]:
        """Of its parameters, with the hyperparameters of each."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


class TrainerCheckpoints:
    """Saves the state between two steps, and writes the policy at the end.

    Each method is collective.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        trained: Mapping[str, Trained],
        adapter: Any,
        hub_folder: Path,
        run_dir: Path,
        start: TrainerStart | None,
        adapters: Adapters | None = None,
        page_locked: bool = False,
    ):
        """Loads ``start``, or the weights of ``hub_folder``.

        Args:
            trained: by adapter; of a model without, at "".
            adapters: of the model. A checkpoint then has them, and not the base, which comes from ``hub_folder``.
            page_locked: True if the state is copied into page-locked memory: it is on a GPU.
        """
        self._hub_folder, self._export_folder = hub_folder, run_dir / POLICY_FOLDER
        self._model, self._adapters = model, adapters
        first = next(iter(trained.values()))
        self._manager = CheckpointManager.Config(
            enable=True,
            export_dtype=HubConfig.read(str(hub_folder)).dtype,
            interval=1,  # when is decided elsewhere
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
        states = self._manager.states
        self._group = dist.new_group(backend="gloo")
        self._stager = HostStager(self._group, page_locked=page_locked)
        self._writing: Future[Any] | None = None
        if start is None or adapters is not None:
            self._manager.folder = str(
                run_dir / "no-checkpoint-yet"
            )  # else one in it would be loaded
            self._manager.load()
        if adapters is not None and start is None:
            adapters.start()
        states[MODEL] = ModelWeights(model) if adapters is None else AdapterWeights(adapters)
        base = {} if adapters is None else {"base": BaseDigest(model)}
        states |= base
        del states[OPTIMIZER], states[LR_SCHEDULER]
        for name, own in trained.items():
            states |= {of_adapter(name, part): state for part, state in own.states().items()}
        if start is None:
            return
        if start.weights_only:
            load_weights(states[MODEL], start.folder, base)
            return
        settings = [_settings(group) for own in trained.values() for group in own.groups()]
        self._manager.folder = str(start.folder)
        self._manager.load(start.step)
        # The checkpoint has those of the config it was written with. This run's may differ.
        groups = [group for own in trained.values() for group in own.groups()]
        rates = [
            rate
            for own in trained.values()
            for scheduler in own.lr_schedulers.schedulers
            for rate in scheduler.get_last_lr()
        ]
        for group, own_settings, rate in zip(groups, settings, rates, strict=True):
            group.update(own_settings, lr=rate)

    def begin(self, folder: Path, step: int) -> Future[Any]:
        """Copy the state, and write it to ``folder/step-N`` during what follows.

        The optimizer may change the state as soon as this returns.

        Returns:
            A future that completes when this rank's files are written. It has the error if the
            state can't be copied (StagingError) or written.
        """
        self._end_last()
        states = {name: state for name, state in self._manager.states.items() if name != MODEL}
        states |= self._manager.states[MODEL].state_dict()  # in a checkpoint weights have no prefix
        writing: Future[Any] = Future()
        try:
            response = distributed_checkpoint.async_save(
                states,
                checkpoint_id=str(folder / f"step-{step}"),
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
        """Write the weights as a hub folder, with the tokenizer, and return it. It is there when it is whole."""
        self._end_last()
        target = self._export_folder / f"step-{step}"
        being_written = self._export_folder / ".partial"
        if self._adapters is not None:
            found = self._adapters.peft()
            if rank == 0:
                write_policy(target, found, self._adapters.lora, base=self._hub_folder)
            return target
        if rank == 0:  # no rank writes before all have told the manager what they have
            shutil.rmtree(being_written, ignore_errors=True)  # of a run that was killed
        self._manager.folder = str(being_written)
        self._manager.states[MODEL] = ModelWrapper(
            self._model
        )  # hub folders have queries, keys and values apart
        self._manager.save(step, last_step=True)
        self._manager.states[MODEL] = ModelWeights(self._model)
        if rank == 0:
            folder = being_written / f"step-{step}"
            shutil.rmtree(
                folder / "sharded", ignore_errors=True
            )  # the parts it was put together from
            copy_beside(self._hub_folder, folder)
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)
            shutil.rmtree(being_written)
        return target

    def close(self) -> None:
        """Finish what is being written, and free the memory that the state was copied into."""
        self._end_last()
        self._stager.close()
        self._manager.close()

    def _end_last(self) -> None:
        """Wait for the last save, whose files are written from the memory that the next one needs.

        Whoever began it has its error.
        """
        if self._writing is not None:
            self._writing.exception()
            self._writing = None


class ModelWeights(Stateful):
    """A model's weights as each rank holds them. torchtitan's ``ModelWrapper`` gathers the fused queries, keys and values of
    all layers on every rank, and keeps them beside the model."""

    def __init__(self, model: nn.Module):
        held = dict(model.named_parameters()) | persistent_buffers(model)
        self._held = {
            name.replace("_checkpoint_wrapped_module.", ""): tensor.detach()
            for name, tensor in held.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return self._held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checkpoints are read into what ``state_dict`` gave."""


class AdapterWeights(Stateful):
    """All adapters of a model, in place of its weights."""

    def __init__(self, adapters: Adapters):
        self._adapters = adapters

    def state_dict(self) -> dict[str, Any]:
        return {
            of_adapter(name, key): held
            for name, own in self._adapters.held.items()
            for key, held in own.items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, held in self.state_dict().items():
            held.copy_(state_dict[key])
        self._adapters.take_held()


def load_weights(
    weights: Stateful, trainer_folder: Path, others: Mapping[str, Stateful], **options: Any
) -> None:
    """Load the weights alone of a checkpoint's ``trainer_folder``, and ``others``.

    Raises:
        RunError: it has other weights.
    """
    (folder,) = trainer_folder.glob("step-*")
    state = weights.state_dict()
    try:
        distributed_checkpoint.load({**state, **others}, checkpoint_id=str(folder), **options)
    except distributed_checkpoint.CheckpointException as error:
        first = " ".join(str(error).split())[:300]
        whole = "a run of adapters goes on from adapters, of its names, rank and targets, and one of a whole model from that"
        raise RunError(
            f"{folder} does not have the weights that are asked of it: {whole}: {first}"
        ) from error
    weights.load_state_dict(state)


class BaseDigest(Stateful):
    """int64 [tensors]: the digest of each frozen weight, as of one that is published. A checkpoint of adapters has it, and is
    not loaded beside another base."""

    @torch.no_grad()
    def __init__(self, model: nn.Module):
        """Collective."""
        sums = []
        held: list[tuple[str, Any]] = sorted(model.named_parameters())
        for _, parameter in held:
            if parameter.requires_grad:
                continue
            shared = isinstance(parameter, DTensor)
            total = digest(
                parameter.to_local() if shared else parameter,
                shard_of(parameter),
                tuple(parameter.shape),
            )
            for dim, placement in enumerate(parameter.placements if shared else ()):
                if placement.is_shard():
                    dist.all_reduce(total, group=parameter.device_mesh.get_group(dim))
            sums.append(total.cpu())
        self._digest = torch.stack(sums)

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._digest.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            RunError: the checkpoint's adapters are of another base.
        """
        if not torch.equal(state_dict["digest"], self._digest):
            raise RunError(
                "the checkpoint's adapters are of another base: model.hf_assets_path has other weights now"
            )


def write_policy(
    target: Path,
    adapters: Mapping[str, Mapping[str, torch.Tensor]],
    lora: LoRA.Config,
    *,
    base: Path,
    merged: bool = True,
) -> None:
    """The merged hub folder with the adapters in it as a PEFT folder, or that alone. It is there when it is whole.

    Args:
        adapters: of ``Adapters.peft``. Each with a name has a folder of its own.
    """
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # of a run that was killed
    for name, tensors in adapters.items():
        folder = being_written / name
        if merged:
            write_merged(folder, tensors, lora, base=base)
        write_adapter(folder / ADAPTER_FOLDER if merged else folder, tensors, lora, base=str(base))
    shutil.rmtree(target, ignore_errors=True)
    being_written.rename(target)


def write_error(error: BaseException) -> str:
    """The cause of a failed save in one line: torch wraps what each rank raised."""
    failures = list(getattr(error, "failures", {}).values())
    first = failures[0][0] if failures else error
    return f"{type(first).__name__}: {' '.join(str(first).split())}"


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of an optimizer's group."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names", "lr", "initial_lr")
    }


def export_checkpoint(
    trainer_folder: Path,
    model: ModelConfig,
    target: Path,
    *,
    lora: LoRA.Config | None = None,
    names: Sequence[str] = ("",),
    adapter: bool = False,
) -> None:
    """Write the weights in ``trainer_folder`` (of a checkpoint) as the hub folder ``target``, which is there when it is whole.

    The weights have the dtype of the folder that the run began with, whose config.json and tokenizer are copied. All of them
    are in this process's memory once, and experts twice.

    Args:
        target: a folder that is not there yet.
        lora: the checkpoint has adapters of these ``names``. They are added to the base in float32.
        adapter: write them as a PEFT folder, and nothing else.

    Raises:
        ConfigError: the model's folder is not there, or is of no known family.
        RunError: the checkpoint is of another model.
    """
    hub = HubConfig.read(model.hf_assets_path)
    spec = policy_spec(model, device="cpu", max_seq_len=SHORTEST, lora=lora)
    assert spec.state_dict_adapter is not None, "every family has one"
    with torch.device("meta"):
        made = spec.model.build()
    if lora is not None:
        made.to_empty(device="cpu")  # pages of the base are never touched
        adapters = Adapters(made, spec, lora, names)
        load_weights(AdapterWeights(adapters), trainer_folder, {}, no_dist=True)
        write_policy(
            target, adapters.peft(), lora, base=Path(model.hf_assets_path), merged=not adapter
        )
        return
    made.to(getattr(torch, hub.dtype)).to_empty(device="cpu")
    if decoder_config(spec).enable_weight_tying:
        made.lm_head.weight = made.tok_embeddings.weight  # to_empty has parted them
    load_weights(ModelWeights(made), trainer_folder, {}, no_dist=True)
    tensors = spec.state_dict_adapter(spec.model, model.hf_assets_path).to_hf(made.state_dict())
    being_written = target.with_name(f".{target.name}.partial")
    shutil.rmtree(being_written, ignore_errors=True)  # of a command that was killed
    being_written.mkdir(parents=True)
    # Experts are parts of one tensor, of which the writer would keep the first alone.
    apart = {
        name: tensor.clone() if ".experts." in name else tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_torch_state_dict(apart, being_written)
    copy_beside(Path(model.hf_assets_path), being_written)
    being_written.rename(target)
