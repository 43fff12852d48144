"""From a checkpoint of a run to a hub folder: config.json, tokenizer and safetensors, as the run's own final policy."""

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from huggingface_hub import save_torch_state_dict

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec

SHORTEST = 2
"""Rows of the model that is made here: it computes nothing."""


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
