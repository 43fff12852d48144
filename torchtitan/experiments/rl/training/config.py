"""Config of the policy's training: plain data, which imports no actor.

TrainerConfig ──▶ Parallelism     how many ranks share what
                  OptimizerConfig
                  LossConfig, LoRA.Config, ReferenceConfig (in their own rooms)
"""

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
from torchtitan.experiments.rl.models.family import DecoderShape
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.training.reference import ReferenceConfig

DecayRate = Annotated[float, Ge(0), Lt(1)]
"""Share that a moving average keeps of its last value."""


@dataclass(kw_only=True, slots=True)
class Parallelism:
    """Degrees of a mesh, whose product is ``trainer.ranks``. torchtitan shards the model over it.

    Eight ranks as 2 shards of 4 tensor-parallel ranks::

        data-parallel rank   0  0  0  0   1  1  1  1      other rows
        tensor rank          0  1  2  3   0  1  2  3      the same rows; other heads, columns, words
    """

    data_parallel_replicate_degree: PositiveInt = 1
    """Number of copies of the model, each on other rows (HSDP if a copy is sharded too)."""
    data_parallel_shard_degree: PositiveInt | None = None
    """Number of ranks that share a copy's parameters, gradients and optimizer state, each on other
    rows (FSDP). None takes as many as the other degrees leave."""
    tensor_parallel_degree: ProcessCount = 1
    """Number of ranks that share each layer's matrices and the vocabulary, on the same rows.

    Between layers each holds some of the tokens (sequence parallelism). They exchange activations
    in every layer, and so are on one host."""
    context_parallel_degree: PositiveInt = 1
    """Number of ranks that divide each row along its length, for rows whose activations one rank
    can't hold.

    In attention they divide the heads, so the degree divides the model's key and value heads. It
    can't be combined with ``tensor_parallel_degree`` yet."""
    expert_parallel_degree: PositiveInt = 1
    """Number of ranks that divide the experts of each layer, and send each other the tokens.

    They are among the ranks that share a copy, so the degree takes no further ranks. It divides the
    model's experts."""

    def shards(self, ranks: int) -> int:
        """Return the number of ranks that share a copy's parameters by FSDP."""
        others = (
            self.data_parallel_replicate_degree
            * self.tensor_parallel_degree
            * self.context_parallel_degree
        )
        return self.data_parallel_shard_degree or ranks // others

    def data_parallel_size(self, ranks: int) -> int:
        """Return the number of shares that a step's rows are divided into."""
        return self.data_parallel_replicate_degree * self.shards(ranks)

    def validate(self, *, field: str, ranks: int) -> None:
        """Raise if the degrees do not fit the number of ranks.

        Args:
            field: name of this config; errors name it.
            ranks: number of processes of the trainer.

        Raises:
            ConfigError: the product of the degrees is not ``ranks``, or degrees are combined that
                can't be.
        """
        for name in (
            "data_parallel_replicate_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
        ):
            degree = getattr(self, name)
            if ranks % degree:
                raise ConfigError(f"{field}.{name}", degree, f"must divide trainer.ranks = {ranks}")
        if self.tensor_parallel_degree > 1 and self.context_parallel_degree > 1:
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
            name = "data_parallel_shard_degree"
            if self.data_parallel_shard_degree is None:
                name = "tensor_parallel_degree"
            cure = (
                f"the product of the degrees is {product} and trainer.ranks = {ranks}: make them "
                "equal"
            )
            raise ConfigError(f"{field}.{name}", getattr(self, name), cure)
        ranks_of_copy = ranks // self.data_parallel_replicate_degree
        if ranks_of_copy % self.expert_parallel_degree:
            cure = f"must divide the {ranks_of_copy} ranks that share a copy of the model"
            raise ConfigError(f"{field}.expert_parallel_degree", self.expert_parallel_degree, cure)

    def check_model(self, decoder: DecoderShape, *, field: str, ranks: int) -> None:
        """Raise if the ranks can't divide the model's heads and experts evenly.

        Args:
            decoder: the model's config.
            field: name of this config; errors name it.
            ranks: number of processes of the trainer.

        Raises:
            ConfigError: a degree does not divide the heads or the experts, or experts are to be
                divided and the model has none.
        """
        self._check_heads(decoder, field=field)
        self._check_experts(decoder, field=field, ranks=ranks)

    def _check_heads(self, decoder: DecoderShape, *, field: str) -> None:
        """Raise if the ranks that divide the heads can't do so evenly."""
        name = "tensor_parallel_degree"
        if self.context_parallel_degree > 1:
            name = "context_parallel_degree"
        degree = getattr(self, name)
        kinds = {"attention heads": decoder.heads, "key and value heads": decoder.kv_heads}
        for kind, heads in kinds.items():
            if heads % degree:
                cure = f"must divide the model's {heads} {kind}"
                raise ConfigError(f"{field}.{name}", degree, cure)

    def _check_experts(self, decoder: DecoderShape, *, field: str, ranks: int) -> None:
        """Raise if the ranks that divide the experts can't do so evenly."""
        experts = decoder.experts
        degree = self.expert_parallel_degree
        if experts == 1:
            if degree > 1:
                cure = "the model is no mixture of experts: set it to 1"
                raise ConfigError(f"{field}.expert_parallel_degree", degree, cure)
            return
        if experts % degree:
            cure = f"must divide its {experts} experts"
            raise ConfigError(f"{field}.expert_parallel_degree", degree, cure)
        sharing = ranks // self.data_parallel_replicate_degree
        if degree == 1:
            sharing //= self.tensor_parallel_degree
        # More ranks than experts divide the rows of each expert, and any number can.
        if sharing <= experts and experts % sharing:
            cure = (
                f"{sharing} ranks share out the model's {experts} experts: choose a number that "
                "divides these"
            )
            raise ConfigError("trainer.ranks", ranks, cure)

    def for_torchtitan(self) -> ParallelismConfig:
        """Return torchtitan's config of these degrees.

        torchtitan's own context parallelism knows no prefix trees. To torchtitan, the ranks that
        divide a row only share a copy.
        """
        shard_degree = -1  # torchtitan's word for the ranks that the other degrees leave
        if self.data_parallel_shard_degree is not None:
            shard_degree = self.data_parallel_shard_degree * self.context_parallel_degree
        return ParallelismConfig(
            data_parallel_replicate_degree=self.data_parallel_replicate_degree,
            data_parallel_shard_degree=shard_degree,
            tensor_parallel_degree=self.tensor_parallel_degree,
            expert_parallel_degree=self.expert_parallel_degree,
            # The default backend fails with torch 2.13 and more than one rank.
            spmd_backend="partial_dtensor",
        )


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, or Muon for the layers' matrices, as torchtitan's OptimizersContainer builds them."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the layers' matrices, adapters among them.

    muon orthogonalizes the momentum of a matrix (torch.optim.Muon), and scales it to the size of an
    update of AdamW, so that both take the same ``lr``. AdamW goes on to move the other parameters:
    embedding, head, norms, biases, and the experts of a mixture, which are stacks of matrices."""
    lr: Annotated[float, Gt(0), Le(1)] = 1e-6
    momentum: DecayRate = 0.95
    """Share of the last momentum that Muon keeps."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_norm: PositiveFloat = 1.0
    """Global norm to which gradients are clipped."""


@dataclass(kw_only=True, slots=True)
class Compile:
    """torch.compile of each transformer block, and of what follows the head's product.

    Rows are padded to a few shapes, which are compiled before the first step. For GPUs only: a
    CPU's attention would be compiled again in each step.
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
    """How the policy is trained."""

    ranks: Changeable[ProcessCount] = 1
    """Number of processes of the mesh, which is the product of the degrees in ``parallelism``.

    By default each gets other rows (FSDP)."""
    parallelism: Changeable[Parallelism] = field(default_factory=Parallelism)
    optimizer: Changeable[OptimizerConfig] = field(default_factory=OptimizerConfig)
    lr_scheduler: Changeable[LRSchedulersContainer.Config] = field(
        default_factory=lambda: LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.0)
    )
    """Schedule of the learning rate, in optimizer steps of this run."""
    loss: LossConfig = field(default_factory=LossConfig)
    lora: LoRA.Config | None = None
    """Adapters of the layers' matrices, which are trained in place of the model's own weights. See
    docs/lora.md."""
    router_replay: Literal["off", "ids"] = "off"
    """Experts that compute a mixture's tokens. See docs/mixtures.md.

    off: those that the trainer's router chooses.
    ids: those that computed the token in the generator."""
    reference: ReferenceConfig | None = None
    """Copy of the policy that follows it, to compare the policy with. It costs one more set of
    parameters, and one more forward pass a step."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters, gradients and optimizer state."""
    mixed_precision_param: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward pass (FSDP mixed precision)."""
    enable_cpu_offload: Changeable[bool] = False
    """True to keep parameters, gradients and optimizer state in the host's memory. CUDA only."""
    activation_checkpoint: Changeable[Literal["none", "selective", "full"]] = "none"
    """Activations that are computed again in the backward pass instead of kept.

    full: all but each transformer block's input; the compiled block computes them if ``compile`` is
    set.
    selective: all but every second matrix product and attention (torchtitan's SelectiveAC)."""
    compile: Changeable[Compile | None] = None
    """Compilation of the model, for GPUs. None computes the model eagerly."""
    logprob_chunk_tokens: Changeable[PositiveInt] = 1024
    """Number of tokens whose full-vocabulary logits exist at once."""
    save_final_model: Changeable[bool] = True
    """True to write the final policy as a hub folder with its tokenizer: <run
    folder>/policy/step-N."""
