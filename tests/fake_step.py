"""The learner's step of a GPU config, traced without memory: the bytes and the operations of one trainer rank.

    python -m tests.fake_step [CONFIG ...] [--families]

Prints a line for each config, and exits with 1 where the planned memory is more than a tenth off.

torch's FakeTensors have shapes and no values, and its fake process group answers collectives with nothing. So the Learner
itself is built and takes its step: FSDP, tensor parallelism, checkpointing, head, loss, backward pass, optimizer. Each storage
is counted from its birth to its end.

1. A CPU build of torch can't lead a backward pass over tensors that call themselves CUDA ones. These call themselves CPU ones,
   and the model is the one that GPUs get: flex attention, and norms as the one kernel that CUDA has for them.
2. Nothing is compiled: a compiled graph runs on values. Flex attention, which no one runs otherwise, is stood in for by what
   its kernels keep: queries, keys, values, the output and a float32 normaliser.
3. What a program reads from the device (masks, metrics) is stood in for: every token is trained on, and numbers are 1.
4. Not seen: CUDA's and NCCL's own memory, and what the allocator can't use.
5. Planned operations are planned seconds times a GPU's rate. They are more than the traced ones where the host launches layers
   more slowly than the GPU computes them, as with 0.6B.
"""

import argparse
import atexit
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torchtitan.models.common.attention import FlexAttention

from tests.fakes.hub_families import LARGE, large_config
from tests.unit.loss_batches import batch_of
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.models import decoder, transformers_attention
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.plan.costs import DEVICES, FLOPS_SHARE, GIB
from torchtitan.experiments.rl.plan.placement import needed_gpus
from torchtitan.experiments.rl.plan.plan import RunPlan
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training import learner as learning
from torchtitan.experiments.rl.training import model as building
from torchtitan.experiments.rl.types import TrainingBatch

ATEN = torch.ops.aten
MEMORY_SHARE = 0.1
"""Share of the traced memory by which the planned one may be off."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Traced:
    """Of one rank, of a step of two microbatches whose optimizer state is there."""

    state: int
    """Bytes of parameters and moments, between steps."""
    peak: int
    """Bytes at most, of the passes and the optimizer."""
    matrix_flops: float
    """Of the matrix products of one microbatch, forward and backward, what is computed again included."""
    attention_flops: float
    """The same of the attention, by the places that a token sees."""
    model_flops: float
    """As the trainer counts them for its utilisation; of the whole microbatch."""


def traced(config: RunConfig, sample_tokens: int) -> Traced:
    """The step of rank 0 of the config's trainer. Rows are full, with samples of ``sample_tokens`` tokens."""
    rows, length = config.batcher.rows_per_microbatch, config.batcher.row_length
    positions = torch.arange(length) % sample_tokens
    batch = batch_of(
        (rows, length),
        positions=positions.expand(rows, length),
        loss_mask=(positions > 0).expand(rows, length),
    )
    seen = rows * int((positions + 1).sum())
    watch = Watch()
    with (
        pytest.MonkeyPatch.context() as patch,
        process_group(config.trainer.ranks),
        watch.resizes_seen(),
    ):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        stand_in(patch, watch, fake, seen)
        learner = learning.Learner(
            replace(config.trainer, compile=None),
            model=config.model,
            device="cpu",
            max_seq_len=length,
            rows=rows,
            total_steps=10,
            run_dir="/nonexistent",
        )
        with fake, watch:
            step(learner, [batch])  # makes the moments
            state = watch.live
            watch.peak = watch.flops = watch.attention_flops = 0
            step(learner, [batch, batch])
        return Traced(
            state=state,
            peak=watch.peak,
            matrix_flops=watch.flops / 2,
            attention_flops=watch.attention_flops / 2,
            model_flops=learner.flops.of_batch(batch),
        )


def step(learner: learning.Learner, batches: list[TrainingBatch]) -> None:
    learner.forward_backward(batches, 0)
    learner.optim_step()


class Watch(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and operations; answers for values that FakeTensors lack."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.flops = self.attention_flops = 0.0
        self._sizes: Any = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first it becomes operations on this rank's part
        found = known_value(func, args)
        out = func(*args, **(kwargs or {})) if found is None else found
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor.untyped_storage())
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        if (
            func is ATEN._grouped_mm.default
        ):  # torch has no count of it: each row meets one expert's matrix
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        return out

    def hold(self, storage: torch.UntypedStorage) -> None:
        """A storage is new, or has another size."""
        if storage not in self._sizes:
            self._sizes[storage] = size = [0]
            weakref.finalize(storage, self._forget, size)
        size = self._sizes[storage]
        self.live += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _forget(self, size: list[int]) -> None:
        self.live -= size[0]

    @contextmanager
    def resizes_seen(self) -> Iterator[None]:
        """FSDP frees what it gathered by resizing its storage, which no dispatch mode sees."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage in self._sizes:
                self.hold(storage)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", resize_)
            yield


def known_value(func: Any, args: Any) -> Any:
    """What an operation gives that depends on values, if every mask is full and every number 1. None: it does not."""
    if func is ATEN._local_scalar_dense.default:
        return 1.0 if args[0].dtype.is_floating_point else 1
    if func is ATEN.nonzero.default:
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
    if func is ATEN.index.Tensor and any(
        index is not None and index.dtype == torch.bool for index in args[1]
    ):
        return args[0].flatten().clone()
    if func in (ATEN._unique2.default, ATEN.unique_dim.default):
        return args[0][:1].clone(), *(args[0].new_empty(0, dtype=torch.int64) for _ in range(2))
    return None


class KernelOfNorm(torch.autograd.Function):
    """As CUDA has it: it keeps its input. On CPU torch keeps float32 copies of it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class KernelsOfFlex(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        count: Callable[[int], None],
    ) -> Any:
        out, normaliser = (
            torch.empty_like(query),
            query.new_empty(query.shape[:3], dtype=torch.float32),
        )
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.count = count
        count(2)  # products: scores, output
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, _, normaliser = ctx.saved_tensors
        delta = torch.empty_like(normaliser)  # noqa: F841  lives as long as the kernel
        ctx.count(5)  # scores again, and the gradients of value, weights, query and key
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def stand_in(patch: pytest.MonkeyPatch, watch: Watch, fake: FakeTensorMode, seen: int) -> None:
    """
    Args:
        seen: places that the tokens of a microbatch see, in all.
    """
    materialize = building.materialize

    def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> Any:
        heads, size = query.shape[1], query.shape[3]

        def count(products: int) -> None:
            watch.attention_flops += 2 * products * seen * heads * size

        return KernelsOfFlex.apply(query, key, value, count), None

    def materialized(*args: Any, **options: Any) -> None:
        with fake, watch:
            materialize(*args, **options)

    def block_mask(mask: Any, rows: int, heads: Any, length: int, *_: Any, **__: Any) -> BlockMask:
        blocks = torch.empty((rows, 1, length // 128), dtype=torch.int32)
        return BlockMask.from_kv_blocks(
            blocks, torch.empty((*blocks.shape, length // 128), dtype=torch.int32)
        )

    patch.setattr(building, "materialize", materialized)
    patch.setattr(learning, "TrainerCheckpoints", lambda **_: None)
    patch.setattr(
        building,
        "policy_spec",
        lambda model, *, device, **rest: policy_spec(model, device="cuda", **rest),
    )
    patch.setattr(
        learning.MetricSums, "all_reduce", lambda *_: None
    )  # sends objects: bytes that FakeTensors lack
    patch.setattr(learning, "load_metrics", lambda *_: {})
    for module in (decoder, transformers_attention):
        patch.setattr(module, "create_attention_mask", block_mask)
    patch.setattr(FlexAttention, "_compiled_flex_attn", flex)
    patch.setattr(
        torch.nn.functional,
        "rms_norm",
        lambda values, shape, weight, eps: KernelOfNorm.apply(values, weight),
    )


@contextmanager
def process_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_of(config: RunConfig) -> RunPlan:
    return plan_run(config, device="cuda", available=list(range(needed_gpus(config))))


def config_of_family(name: str, **changes: object) -> RunConfig:
    """Return the 8B config with a model of this family, of 7B to 9B parameters, of which only config.json is there."""
    config = config_registry.rl_grpo_qwen3_8b()
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    large_config(name, **changes).save_pretrained(folder)
    config.model = ModelConfig(hf_assets_path=str(folder))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = [f"rl_grpo_qwen3_{size}" for size in ("0_6b", "8b", "32b", "32b_32")]
    parser.add_argument("configs", nargs="*", default=default)
    parser.add_argument(
        "--families",
        action="store_true",
        help="the 8B config with each family of transformers that the tests have, at 7B to 9B",
    )
    args = parser.parse_args()
    configs = {name: getattr(config_registry, name)() for name in args.configs}
    if args.families:
        configs = {name: config_of_family(name) for name in LARGE}
    print(
        "| config | GiB of a rank, traced | planned | operations of a microbatch, traced | planned |"
    )
    apart = []
    for name, config in configs.items():
        (task,) = config.tasks.values()
        plan, found = plan_of(config), traced(config, task.env.max_rollout_tokens)
        assert plan.balance is not None
        tokens = config.batcher.rows_per_microbatch * config.batcher.row_length
        seconds = plan.balance.train_s * tokens / plan.tokens_per_step
        ranks = config.trainer.ranks / config.trainer.parallelism.tensor_parallel_degree
        planned = seconds * ranks * DEVICES["H100"].flops * FLOPS_SHARE
        done = found.matrix_flops + found.attention_flops
        memory = plan.trainer_memory.tensors
        print(
            f"| `{name}` | {found.peak / GIB:.1f} | {memory / GIB:.1f} | {done:.3g} | {planned:.3g} |",
            flush=True,
        )
        if abs(memory / found.peak - 1) > MEMORY_SHARE:
            apart.append(name)
    if apart:
        sys.exit(f"planned memory is more than {MEMORY_SHARE:.0%} off: {', '.join(apart)}")


if __name__ == "__main__":
    set_up_process()
    main()
