"""Shared memory of flex attention's kernels, compiled for GPUs that are not here.

    python -m tests.flex_kernels [--capability 8.6 ...] [--head-dim 256 ...] [--dtype float32] [--torchs-own]

Prints a line for each kernel, and exits with 1 where one needs more shared memory than a block of that GPU may have: a run would
end in "No valid triton configs. OutOfResources" when it compiles its first layer.

    MaskedRows.attend ──▶ Dynamo and AOTAutograd, on meta tensors ──▶ Inductor's template ──▶ Triton and ptxas, for a capability

1. The kernels are those of a compiled layer, forward and backward: the call, the mask and the choice of blocks are the library's own.
2. Nothing runs, so this shows neither speeds nor values.
3. Triton is the installed one. The pins of CPU and GPU have different versions: `PYTHONPATH` may name a folder with another.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import decomposition, select_algorithm
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.nn.attention import flex_attention
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests.fakes.gpus import SHARED_MEMORY
from torchtitan.experiments.rl.models.attention import tree_mask
from torchtitan.experiments.rl.models.transformers_attention import MaskedRows, Scores

CAPABILITIES = {f"{major}.{minor}": limit for (major, minor), limit in SHARED_MEMORY.items()}
"""Bytes of shared memory by capability, written as NVIDIA does."""
HEAD_DIMS = (64, 96, 128, 256)
ROW_LENGTH = 1024
WINDOW = 100


class Gpu:
    """Stand-in for a GPU, as Inductor and Triton ask for one. They compile for it, and can run nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, capability: str):
        major, minor = map(int, capability.split("."))
        properties = SimpleNamespace(
            major=major,
            minor=minor,
            multi_processor_count=80,
            regs_per_multiprocessor=65_536,
            max_threads_per_multi_processor=1536,
            warp_size=32,
        )
        self._target = GPUTarget("cuda", 10 * major + minor, 32)
        answers = {
            "get_device_properties": lambda device=None: properties,
            "get_compute_capability": lambda device=None: self._target.arch,
        }
        for name, answer in answers.items():
            patch.setattr(CudaInterface, name, staticmethod(answer))
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        # The device would have to be there: attention is traced on meta tensors.
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        DeviceProperties.create.cache_clear()
        driver.set_active(self)

    def get_current_target(self) -> GPUTarget:
        """Return what Triton compiles for."""
        return self._target

    def get_current_device(self) -> int:
        return 0


def kernel_bytes(
    gpu_bytes: int | None, head_dim: int, scores: Scores, dtype: torch.dtype
) -> Iterator[tuple[str, int]]:
    """Yield the blocks of the forward and the backward kernel, and their bytes of shared memory.

    Args:
        gpu_bytes: shared memory by which the library chooses blocks; None for torch's own choice.
        scores: what a layer does to its scores.
    """
    found: list[tuple[str, int]] = []

    def compile_first(choices: list[Any]) -> list[Any]:
        request = choices[0].bmreq
        module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
        autotuner = getattr(module, request.kernel_name)
        kernel = autotuner._precompile_config(autotuner.configs[0]).kernel
        options = dict(
            item.split("=") for item in choices[0].description.split(", ") if "=" in item
        )
        blocks = [int(options[name]) for name in sorted(options) if name.startswith("BLOCK_")]
        stages = f"{request.num_stages} stages, {request.num_warps} warps"
        found.append(("x".join(map(str, blocks)) + f", {stages}", kernel.shared))
        return choices[:1]

    positions_BL = torch.arange(ROW_LENGTH, device="meta").expand(1, ROW_LENGTH)
    mask = flex_attention.create_block_mask(
        tree_mask(positions_BL, scores.window), 1, None, ROW_LENGTH, ROW_LENGTH, device="meta"
    )
    rows = MaskedRows(masks={scores.window: mask}, context=None, shared_memory=gpu_bytes)

    def made(heads: int) -> torch.Tensor:
        shape = (1, heads, ROW_LENGTH, head_dim)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    torch._dynamo.reset()
    select_algorithm.add_preprocessing_fn(compile_first)
    backend = aot_autograd(
        fw_compiler=_lower, bw_compiler=_lower, decompositions=decomposition.select_decomp_table
    )
    attend = torch.compile(rows.attend, fullgraph=True, backend=backend)
    try:
        attend(made(4), made(2), made(2), scores).sum().backward()
    finally:
        select_algorithm.clear_preprocessing_fns()
    yield from found


def _lower(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Have Inductor choose the kernels of a graph as if its tensors were a GPU's.

    What it returns in place of compiled code gives back empty tensors.
    """
    mode = detect_fake_mode(inputs)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = [None if node is None else node.meta["val"] for node in output.args[0]]
    for graph in module.modules():
        for node in getattr(graph, "graph", SimpleNamespace(nodes=())).nodes:
            if "val" in node.meta:
                node.meta["val"] = _on_gpu(node.meta["val"], mode)
            if "device" in node.kwargs:
                node.kwargs = node.kwargs | {"device": torch.device("cuda", 0)}
    placed = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    lowering = GraphLowering(module, example_inputs=placed)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode):
        lowering.run(*placed)

    def run(*_: torch.Tensor) -> list[Any]:
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for value in results
        ]

    return run


def _on_gpu(value: Any, mode: Any) -> Any:
    """Return a fake tensor of the GPU in place of one on the meta device."""
    if isinstance(value, tuple | list):
        return type(value)(_on_gpu(item, mode) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def main() -> int:
    """Print a line for each kernel. Return 1 if one does not fit its GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", nargs="+", choices=CAPABILITIES, default=[*CAPABILITIES])
    parser.add_argument("--head-dim", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--scores",
        nargs="+",
        choices=("plain", "special"),
        default=["plain", "special"],
        help="special: with a cap, a window and another scale",
    )
    parser.add_argument("--torchs-own", action="store_true", help="the blocks that torch chooses")
    arguments = parser.parse_args()
    import triton

    fit = True
    print(f"torch {torch.__version__}, triton {triton.__version__}, {arguments.dtype}", flush=True)
    cases = itertools.product(arguments.capability, arguments.head_dim, arguments.scores)
    for capability, head_dim, name in cases:
        limit = CAPABILITIES[capability]
        special = name == "special"
        scores = Scores(
            scaling=0.1 if special else None,
            window=WINDOW if special else None,
            softcap=50.0 if special else None,
            sinks_N=None,
        )
        with pytest.MonkeyPatch.context() as patch:
            Gpu(patch, capability)
            own = None if arguments.torchs_own else limit
            kernels = kernel_bytes(own, head_dim, scores, getattr(torch, arguments.dtype))
            for kernel, (blocks, needed) in zip(("forward", "backward"), kernels, strict=True):
                fits = needed <= limit
                fit &= fits
                print(
                    f"{capability:>4}  heads of {head_dim:<3}  {name:7}  {kernel:8}  {blocks:35}"
                    f"  {needed:>7,} of {limit:>7,}  {'fits' if fits else 'does not fit'}",
                    flush=True,
                )
    return 0 if fit else 1


if __name__ == "__main__":
    sys.exit(main())
