"""Settings of the policy's training: plain data, apart from the actor."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.losses import LossConfig
from torchtitan.experiments.rl.training.parallelism import Parallelism
from torchtitan.experiments.rl.training.reference import ReferenceConfig

DecayRate = Annotated[float, Ge(0), Lt(1)]


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, as torchtitan's OptimizersContainer builds it."""

    lr: Annotated[float, Gt(0), Le(1)] = 1e-6
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    ranks: PositiveInt = 1
    """Processes of the mesh: the product of the degrees in ``parallelism``. By default each gets rows of its own (FSDP)."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulersContainer.Config = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0)
    )
    """Counted in optimizer steps of this run."""
    loss: LossConfig = field(default_factory=LossConfig)
    reference: ReferenceConfig | None = None
    """A copy of the policy that follows it, to compare with: one more set of parameters and one more forward pass a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, gradients and optimizer state."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass (FSDP mixed precision)."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the host's memory. CUDA only."""
    activation_checkpoint: bool = False
    """Keep only each transformer block's input, and compute the rest again in the backward pass."""
    compile: bool = False
    """torch.compile of each transformer block."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose full-vocabulary logits exist at once."""
    save_final_model: bool = True
    """Write the final policy as a hub folder, tokenizer included: <run folder>/policy/step-N."""
