"""Builds the policy's model as one rank holds it: converted, divided over the ranks, compiled.

    build_policy    hub folder or flavor ──▶ spec ──▶ meta device ──▶ divided ──▶ this rank's memory

The weights have no values yet: the checkpoint or the hub folder that is loaded next gives them
(`checkpoints.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.experiments.rl.compat.torch import compile_each_shape
from torchtitan.experiments.rl.models.attention import divide_attention
from torchtitan.experiments.rl.models.decoder import LogprobDecoder
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_config, policy_spec
from torchtitan.experiments.rl.training.config import TrainerConfig
from torchtitan.experiments.rl.training.flops import ModelFlops, peak_flops
from torchtitan.experiments.rl.training.recompute import CompiledFullAC
from torchtitan.experiments.rl.types import DataParallel
from torchtitan.protocols.model_spec import ModelSpec


@dataclass(kw_only=True, slots=True, frozen=True)
class Ranks:
    """The trainer's ranks, in groups by what they share."""

    parallelism: ParallelismConfig
    dims: ParallelDims
    other_rows: DeviceMesh | None
    """Ranks that are sent other rows than each other (torchtitan's dp_replicate x dp_shard). None
    if this rank is alone."""
    same_rows: DeviceMesh | None
    """Ranks that compute the same rows, by tensor or context parallelism. None if this rank is
    alone."""
    context: DeviceMesh | None
    """Ranks that divide each row along its length. None if rows are not divided."""

    @classmethod
    def of(cls, config: TrainerConfig, device: torch.device) -> "Ranks":
        """Make the groups, and torchtitan's backend of the process, for which its modules ask."""
        parallelism = config.parallelism.for_torchtitan()
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        set_spmd_backend(parallelism.spmd_backend)
        other_rows = dims.get_optional_mesh("batch")
        same_rows = dims.get_optional_mesh("tp")
        context = None
        degree = config.parallelism.context_parallel_degree
        if degree > 1:  # there is no tensor parallelism then
            mesh = init_device_mesh(
                device.type,
                (dist.get_world_size() // degree, degree),
                mesh_dim_names=("rows", "context"),
            )
            other_rows = mesh["rows"]
            same_rows = context = mesh["context"]
        return cls(
            parallelism=parallelism,
            dims=dims,
            other_rows=other_rows,
            same_rows=same_rows,
            context=context,
        )

    @property
    def data_parallel(self) -> DataParallel:
        """This rank's share of a step's rows."""
        if self.other_rows is None:
            return DataParallel(rank=0, size=1)
        return DataParallel(rank=self.other_rows.get_local_rank(), size=self.other_rows.size())

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return None if self.other_rows is None else self.other_rows.get_group()

    @property
    def same_rows_group(self) -> dist.ProcessGroup | None:
        return None if self.same_rows is None else self.same_rows.get_group()

    @property
    def sharing_work(self) -> int:
        """Number of ranks that share the work on a row."""
        return self.dims.tp * (1 if self.context is None else self.context.size())


@dataclass(kw_only=True, slots=True, frozen=True)
class BuiltPolicy:
    """The model of one rank, and what was known of it before it was divided."""

    model: Any
    spec: ModelSpec
    flops: ModelFlops


def build_policy(
    config: TrainerConfig,
    model: ModelConfig,
    ranks: Ranks,
    device: torch.device,
    *,
    max_seq_len: int,
    dtype: torch.dtype,
    run_dir: str,
) -> BuiltPolicy:
    """Build this rank's share of the policy's model. Its parameters have no values yet.

    Args:
        max_seq_len: length of the longest row, in tokens.
        dtype: dtype of the parameters.
    """
    spec = policy_spec(
        model,
        device="cuda" if device.type == "cuda" else "cpu",
        max_seq_len=max_seq_len,
        chunk_tokens=config.logprob_chunk_tokens,
        lora=config.lora,
    )
    if config.compile is not None and config.compile.float8 != "off":
        convert_to_float8(spec, config.compile.float8, emulate=device.type == "cpu")
    if ranks.dims.tp_enabled or ranks.dims.ep_enabled:
        # torchtitan's own entry, which sets how each module of the model is sharded.
        decoder_config(spec).update_from_config(
            config=SimpleNamespace(parallelism=ranks.parallelism)
        )
    with torch.device("meta"):
        built: Any = spec.model.build().to(dtype)
    flops = ModelFlops.of(spec.model, built, peak=peak_flops(device), ranks=ranks.sharing_work)
    if ranks.context is not None:
        built.context = ranks.context
        if isinstance(built, LogprobDecoder):  # transformers' attention divides itself
            divide_attention(built, ranks.context)
    parallelize(
        built,
        spec.parallelize_fn,
        ranks=ranks,
        config=config,
        dtype=dtype,
        device=device,
        run_dir=run_dir,
    )
    materialize(built, device, parameters_on_cpu=config.enable_cpu_offload)
    built.train()
    return BuiltPolicy(model=built, spec=spec, flops=flops)


def convert_to_float8(spec: ModelSpec, recipe: str, *, emulate: bool) -> None:
    """Have the layers' matrix products computed in 8-bit floats, by torchtitan's converter.

    Args:
        recipe: name of one of torchao's recipes.
        emulate: True to compute as such a GPU would, on any device.
    """
    # Imported here because its torchao takes seconds.
    from torchtitan.components.quantization import Float8LinearConverter

    converter = Float8LinearConverter.Config(
        recipe_name=recipe,  # type: ignore[arg-type]
        filter_fqns=["lm_head"],
        emulate=emulate,
        model_compile_enabled=True,
    )
    converter.build().convert(decoder_config(spec))


def parallelize(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
    parallelize_fn: Callable[..., Any],
    *,
    ranks: Ranks,
    config: TrainerConfig,
    dtype: torch.dtype,
    device: torch.device,
    run_dir: str,
) -> None:
    """Divide the model over the ranks, by torchtitan's function for its family.

    A rank that is alone, and computes in the dtype of its parameters, gets no FSDP, which would
    copy all of them in each forward pass for nothing.

    Args:
        dtype: dtype of the parameters.
    """
    activation_checkpoint, compile_config = _block_transforms(config, ranks)
    model.lm_head.compile_chunks = config.compile is not None
    if config.compile is not None or device.type == "cuda":
        compile_each_shape()

    computes_as_held = getattr(torch, config.mixed_precision_param) == dtype
    if ranks.dims.world_size == 1 and computes_as_held and not config.enable_cpu_offload:
        if activation_checkpoint is not None:
            activation_checkpoint.build(dump_folder=run_dir).apply(model)
        if compile_config.enable:
            apply_compile(model, compile_config=compile_config, parallel_dims=ranks.dims)
        return

    parallelize_fn(
        model,
        parallel_dims=ranks.dims,
        training=TrainingConfig(
            mixed_precision_param=config.mixed_precision_param,
            enable_cpu_offload=config.enable_cpu_offload,
        ),
        parallelism=ranks.parallelism,
        compile_config=compile_config,
        ac_config=activation_checkpoint,
        dump_folder=run_dir,
    )
    if device.type == "cpu":
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                # gloo has no averaging reduce-scatter.
                module.set_force_sum_reduction_for_comms(True)


def _block_transforms(
    config: TrainerConfig, ranks: Ranks
) -> tuple[ActivationCheckpointing.Config | None, CompileConfig]:
    """Return how transformer blocks are checkpointed and how torchtitan compiles them."""
    policies: dict[str, ActivationCheckpointing.Config | None] = {
        "none": None,
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
    }
    checkpointing = policies[config.activation_checkpoint]
    not_compiled = CompileConfig(enable=False)
    if config.compile is None:
        return checkpointing, not_compiled
    compiled = CompileConfig(
        enable=True, enable_async_tensor_parallel=config.compile.async_tensor_parallel
    )
    if config.activation_checkpoint == "full":
        # It compiles the blocks itself, before it wraps them.
        own = CompiledFullAC.Config(compile_config=compiled, parallel_dims=ranks.dims)
        return own, not_compiled
    return checkpointing, compiled


def materialize(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
    device: torch.device,
    *,
    parameters_on_cpu: bool,
) -> None:
    """Give a model that was built on the meta device its memory, and fill its buffers.

    Args:
        parameters_on_cpu: True if FSDP keeps the parameters in the host's memory, and copies a
            layer at a time to the device. Buffers lie where they are used.
    """
    model.to_empty(device=torch.device("cpu") if parameters_on_cpu else device)
    with torch.no_grad():
        model.init_states(buffer_device=device)


def synchronise_gradients(model: torch.nn.Module, *, shards: int, last: bool) -> None:
    """Set what the next backward pass does with gradients.

    Ranks that share a copy of the model reduce its gradient in each microbatch: a rank that kept it
    until the last would hold the whole model's gradient, in float32. Copies of the model add theirs
    up once a step.

    Args:
        shards: number of ranks that share a copy of the model.
        last: True before the step's last microbatch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or shards > 1)
        model.set_requires_all_reduce(last)
