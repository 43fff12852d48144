"""Full activation checkpointing of compiled transformer blocks."""

from dataclasses import dataclass
from typing import Any

from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.compile import apply_compile


class CompiledFullAC(FullAC):
    """Recomputes each transformer block in the backward pass by calling the compiled block again.

    torchtitan checkpoints a block and then compiles both, which traces the recomputation into the
    backward graph. With tensor or expert parallelism that graph saves a `DeviceMesh` among its
    tensors, and torch 2.13 refuses it at the first forward pass. Compiled first and checkpointed
    outside, a block keeps its input alone, under every parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        compile_config: CompileConfig
        parallel_dims: ParallelDims

    def __init__(self, config: Config, dump_folder: str = ""):
        super().__init__(config, dump_folder)
        self._compile_config = config.compile_config
        self._parallel_dims = config.parallel_dims

    def apply(self, model: Any) -> None:  # noqa: ANN401 - torchtitan's
        """Compile each transformer block of `model`, then wrap it in a checkpoint."""
        apply_compile(model, compile_config=self._compile_config, parallel_dims=self._parallel_dims)
        super().apply(model)
