"""Settings of the policy's training: plain data, apart from the actor."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import ParallelismConfig
from torchtitan.experiments.rl.bounds import (
    Changeable,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProcessCount,
)
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import LossConfig
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.models.common import Decoder

DecayRate = Annotated[float, Ge(0), Lt(1)]


@dataclass(kw_only=True, slots=True)
class Parallelism:
    """Degrees of a mesh. Their product is ``trainer.ranks``; torchtitan shards the model over it.

    Eight ranks as 2 shards of 4 tensor-parallel ranks::

        data-parallel rank   0  0  0  0   1  1  1  1      different rows
        tensor rank          0  1  2  3   0  1  2  3      the same rows, different heads, columns and words
    """

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the model, each on different rows (HSDP where a copy is sharded too)."""
    data_parallel_shard_degree: PositiveInt | None = None
    """Ranks that share a copy's parameters, gradients and optimizer state, each on different rows (FSDP). None: as many as
    the other degrees leave."""
    tensor_parallel_degree: ProcessCount = 1
    """Ranks that share each layer's matrices and the vocabulary, on the same rows. Between layers each holds a part of the
    tokens (sequence parallelism). Within one host: they exchange activations in every layer."""
    context_parallel_degree: PositiveInt = 1
    """Ranks that divide each row along its length, for rows whose activations one rank can't hold. In attention they divide the
    heads, so it divides the model's key and value heads. Not with ``tensor_parallel_degree`` yet."""
    expert_parallel_degree: PositiveInt = 1
    """Ranks that share out the experts of each layer and send each other the tokens: of those that share a copy, so it takes no
    further ranks. It divides the model's experts."""

    def shards(self, ranks: int) -> int:
        """Ranks that share a copy's parameters by FSDP."""
        others = (
            self.data_parallel_replicate_degree
            * self.tensor_parallel_degree
            * self.context_parallel_degree
        )
        return self.data_parallel_shard_degree or ranks // others

    def data_parallel_size(self, ranks: int) -> int:
        """Shares that a step's rows are divided into."""
        return self.data_parallel_replicate_degree * self.shards(ranks)

    def validate(self, *, field: str, ranks: int) -> None:
        """
        Raises:
            ConfigError: the product of the degrees is not ``ranks``, or a degree that is not supported.
        """
        fixed = {
            "data_parallel_replicate_degree": self.data_parallel_replicate_degree,
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "context_parallel_degree": self.context_parallel_degree,
        }
        for name, degree in fixed.items():
            if ranks % degree:
                raise ConfigError(f"{field}.{name}", degree, f"must divide trainer.ranks = {ranks}")
        if self.tensor_parallel_degree > 1 < self.context_parallel_degree:
            cure = f"set it to 1, or {field}.tensor_parallel_degree: the two are not tried together"
            raise ConfigError(
                f"{field}.context_parallel_degree", self.context_parallel_degree, cure
            )
        product = (
            self.data_parallel_size(ranks)
            * self.tensor_parallel_degree
            * self.context_parallel_degree
        )
        if product != ranks:
            name = (
                "tensor_parallel_degree"
                if self.data_parallel_shard_degree is None
                else "data_parallel_shard_degree"
            )
            cure = f"the product of the degrees is {product} and trainer.ranks = {ranks}: make them equal"
            raise ConfigError(f"{field}.{name}", getattr(self, name), cure)
        sharing = ranks // self.data_parallel_replicate_degree
        if sharing % self.expert_parallel_degree:
            cure = f"must divide the {sharing} ranks that share a copy of the model"
            raise ConfigError(f"{field}.expert_parallel_degree", self.expert_parallel_degree, cure)

    def check_model(self, decoder: Decoder.Config, *, field: str, ranks: int) -> None:
        """
        Raises:
            ConfigError: the heads of the model, or its experts, can't be shared out evenly.
        """
        which = (
            "tensor_parallel_degree"
            if self.context_parallel_degree == 1
            else "context_parallel_degree"
        )
        degree, attention = getattr(self, which), decoder.first_attention
        for name in ("n_heads", "n_kv_heads"):
            heads = getattr(attention, name, None)
            if heads is not None and heads % degree:
                what = "attention heads" if name == "n_heads" else "key and value heads"
                raise ConfigError(
                    f"{field}.{which}", degree, f"must divide the model's {heads} {what}"
                )
        moe = decoder.layers[0].moe
        experts, degree = 1 if moe is None else moe.num_experts, self.expert_parallel_degree
        if experts % degree:
            cure = (
                "the model is no mixture of experts: set it to 1"
                if moe is None
                else f"must divide its {experts} experts"
            )
            raise ConfigError(f"{field}.expert_parallel_degree", degree, cure)
        sharing = (
            ranks
            // self.data_parallel_replicate_degree
            // (self.tensor_parallel_degree if degree == 1 else 1)
        )
        if (
            moe is not None and sharing <= experts and experts % sharing
        ):  # more ranks share out each expert's rows
            cure = f"{sharing} ranks share out the model's {experts} experts: choose a number that divides these"
            raise ConfigError("trainer.ranks", ranks, cure)

    def for_torchtitan(self) -> ParallelismConfig:
        return ParallelismConfig(
            data_parallel_replicate_degree=self.data_parallel_replicate_degree,
            # torchtitan's own context parallelism knows no prefix trees: to it, ranks that divide a row only share a copy.
            data_parallel_shard_degree=(self.data_parallel_shard_degree or 0)
            * self.context_parallel_degree
            or -1,
            tensor_parallel_degree=self.tensor_parallel_degree,
            expert_parallel_degree=self.expert_parallel_degree,
            # The default backend fails with torch 2.13 and more than one rank.
            spmd_backend="partial_dtensor",
        )


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
class Compile:
    """torch.compile of each transformer block, and of what follows the head's product.

    Rows are padded to a few shapes, which are compiled before the first step. For GPUs only: a CPU's
    attention would be compiled again in each step.
    """

    float8: Literal["off", "rowwise", "rowwise_with_gw_hp"] = "off"
    """Recipe of torchao by which the products of the layers' matrices are computed in 8-bit floats,
    through torchtitan's converter; rowwise_with_gw_hp leaves the weights' gradients as they are.
    Parameters keep their dtype. On GPUs of capability 8.9 and above; uncompiled it would be slower
    than without."""
    async_tensor_parallel: bool = False
    """True to exchange activations between tensor-parallel ranks while their products are computed.
    Runs refuse it: it takes processes that see every GPU of their host, and a trainer's sees its
    own."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    ranks: Changeable[ProcessCount] = 1
    """Processes of the mesh: the product of the degrees in ``parallelism``. By default each gets rows of its own (FSDP)."""
    parallelism: Changeable[Parallelism] = field(default_factory=Parallelism)
    optimizer: Changeable[OptimizerConfig] = field(default_factory=OptimizerConfig)
    lr_scheduler: Changeable[LRSchedulersContainer.Config] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0)
    )
    """Counted in optimizer steps of this run."""
    loss: LossConfig = field(default_factory=LossConfig)
    lora: LoRA.Config | None = None
    """Train adapters of the layers' matrices, and leave the model's own weights as they are. docs/lora.md."""
    router_replay: Literal["off", "ids"] = "off"
    """ids: a mixture's tokens are computed by the experts that computed them in the generator. docs/mixtures.md."""
    reference: ReferenceConfig | None = None
    """A copy of the policy that follows it, to compare with: one more set of parameters and one more forward pass a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of parameters, gradients and optimizer state."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass (FSDP mixed precision)."""
    enable_cpu_offload: Changeable[bool] = False
    """Keep parameters, gradients and optimizer state in the host's memory. CUDA only."""
    activation_checkpoint: Changeable[Literal["none", "selective", "full"]] = "none"
    """full: keep only each transformer block's input, and compute the rest again in the backward
    pass, by the compiled block where ``compile`` is set. selective: of its matrix products keep every
    second, and attention; the rest is computed again (torchtitan's SelectiveAC)."""
    compile: Changeable[Compile | None] = None
    """Compilation of the model, for GPUs. None: the model computes eagerly."""
    logprob_chunk_tokens: Changeable[PositiveInt] = 1024
    """Tokens whose full-vocabulary logits exist at once."""
    save_final_model: Changeable[bool] = True
    """Write the final policy as a hub folder, tokenizer included: <run folder>/policy/step-N."""
