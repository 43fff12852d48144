"""A model that was built on the meta device, made ready to be trained by the ranks of a mesh."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.experiments.rl.training.config import TrainerConfig


def parallelize(
    model: Any,
    parallelize_fn: Callable[..., Any],
    *,
    dims: ParallelDims,
    parallelism: ParallelismConfig,
    config: TrainerConfig,
    dtype: torch.dtype,
    device: torch.device,
    run_dir: str,
) -> None:
    """Divide the model over the ranks, by torchtitan's function for its family.

    A rank that is alone and computes in the dtype of its parameters gets no FSDP, which would copy all of them in each forward
    pass for nothing.

    Args:
        dtype: of the parameters.
    """
    activation_checkpoint = FullAC.Config() if config.activation_checkpoint else None
    compile_config = CompileConfig(enable=config.compile)
    computes_as_held = getattr(torch, config.mixed_precision_param) == dtype
    if dims.world_size == 1 and computes_as_held and not config.enable_cpu_offload:
        if activation_checkpoint is not None:
            activation_checkpoint.build(dump_folder=run_dir).apply(model)
        if config.compile:
            apply_compile(model, compile_config=compile_config, parallel_dims=dims)
        return
    parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(
            mixed_precision_param=config.mixed_precision_param, enable_cpu_offload=config.enable_cpu_offload
        ),
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=activation_checkpoint,
        dump_folder=run_dir,
    )
    if device.type == "cpu":
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                # gloo has no averaging reduce-scatter.
                module.set_force_sum_reduction_for_comms(True)


def materialize(model: Any, device: torch.device, *, parameters_on_cpu: bool) -> None:
    """Give a model that was built on the meta device its memory, and fill its buffers.

    Args:
        parameters_on_cpu: FSDP keeps them there and copies a layer at a time to ``device``. Buffers are used where they are.
    """
    model.to_empty(device=torch.device("cpu") if parameters_on_cpu else device)
    with torch.no_grad():
        model.init_states(buffer_device=device)


def synchronise_gradients(model: Any, *, shards: int, last: bool) -> None:
    """Say what the next backward pass does with gradients.

    Shards reduce them in each microbatch: a rank that kept them until the last would hold the whole model's gradient, in
    float32. Copies of the model add theirs up once a step.

    Args:
        shards: ranks that share a copy of the model.
        last: it is the step's last microbatch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or shards > 1)
        model.set_requires_all_reduce(last)
