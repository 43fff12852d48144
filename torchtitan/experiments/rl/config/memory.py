"""Bytes that a trainer rank holds, by a stated model of FSDP and tensor parallelism, and that each host's shared memory holds.
Worked out before a process starts."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.models.common import Decoder

BYTES = {"float32": 4, "bfloat16": 2}
CUDA_BYTES = 2 * 2**30
"""CUDA's and NCCL's own, and what the allocator can't use."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSizes:
    """Of a decoder: the numbers that memory follows from."""

    parameters: int
    layers: int
    dim: int
    vocabulary: int
    tied: bool
    query_width: int
    """Heads times head size."""
    key_width: int
    """Key heads times head size; the same for values."""
    head_width: int
    feed_forward_width: int

    @classmethod
    def of(cls, decoder: Decoder.Config, parameters: int) -> "ModelSizes":
        layer: Any = decoder.layers[0]  # torchtitan declares less than every decoder has
        attention = layer.attention
        return cls(
            parameters=parameters,
            layers=len(decoder.layers),
            dim=decoder.dim,
            vocabulary=decoder.vocab_size,
            tied=decoder.enable_weight_tying,
            query_width=attention.n_heads * attention.rope.dim,
            key_width=(attention.n_kv_heads or attention.n_heads) * attention.rope.dim,
            head_width=attention.rope.dim,
            feed_forward_width=layer.feed_forward.w1.out_features,
        )

    @property
    def vocabulary_parameters(self) -> int:
        """Of the embedding; the head has as many, or the same ones."""
        return self.vocabulary * self.dim

    @property
    def layer_parameters(self) -> int:
        return (self.parameters - (1 if self.tied else 2) * self.vocabulary_parameters) // self.layers

    def layer_values(self, tensor_parallel: int) -> float:
        """Values that the backward pass of a layer needs, a token and rank.

        Its input, two norms and the residual between them: ``4 dim``, a part of the tokens on each tensor-parallel rank.
        Queries and keys before their norm and after rotation; values and the attention's output. Three products of the
        feed-forward part and the activation: 4 of its width. Fused attention stores nothing quadratic.
        """
        attention = 3 * (self.query_width + self.key_width)
        return (4 * self.dim + attention + 4 * self.feed_forward_width) / tensor_parallel


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerMemory:
    """Bytes of one rank, by what they are."""

    state: float
    """Parameters, gradients and two Adam moments: this rank's shard. Gradients are reduced in every microbatch. And each
    layer's table of rotations, whole."""
    activations: float
    """What a microbatch's forward pass leaves for its backward pass. With checkpointing: each layer's input."""
    head: float
    """While the head computes: its compute copy; in its backward pass a gradient in float32, to which the product of a chunk is
    added, or in its forward pass three tensors of a chunk's logits, if these are more. And the last layer's compute copy."""
    layer: float
    """While a layer's backward pass computes: compute copies of it and the next one, its gradient, what a reduction adds up (at
    first the head's), what checkpointing computes again, and two gradients of the feed-forward part's width. A tied head's copy
    and gradient stay until the embedding's."""
    fixed: float

    @property
    def total(self) -> float:
        """The head and the layers compute one after the other."""
        return self.state + self.activations + max(self.head, self.layer) + self.fixed


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedGpu:
    """Bytes of a GPU that a trainer rank and an engine share."""

    trainer: TrainerMemory
    engine: float
    asleep: float | None
    """What is left of the engine while it sleeps. None: it does not sleep."""

    @property
    def training(self) -> float:
        """While the trainer steps."""
        return self.trainer.total + (self.engine if self.asleep is None else self.asleep)

    @property
    def generating(self) -> float:
        """While an engine that sleeps is awake: the trainer has given back what its step used."""
        return self.trainer.state + self.trainer.fixed + self.engine

    @property
    def peak(self) -> float:
        return max(self.training, self.generating)


def trainer_memory(
    sizes: ModelSizes,
    *,
    device: Literal["cpu", "cuda"],
    shards: int,
    tensor_parallel: int,
    dtype: str,
    compute_dtype: str,
    rows: int,
    row_length: int,
    chunk_tokens: int,
    activation_checkpoint: bool,
    offload: bool = False,
    reference: bool = False,
) -> TrainerMemory:
    """
    Args:
        shards: ranks that share a copy of the model by FSDP.
        chunk_tokens: as in the trainer's config; the head takes at most a quarter of a row at once.
        offload: the state is in the host's memory.
        reference: the trainer holds a reference model, which is part of the state.
    """
    compute, tokens = BYTES[compute_dtype], rows * row_length
    layer, head = sizes.layer_parameters / tensor_parallel, sizes.vocabulary_parameters / tensor_parallel
    logits = min(chunk_tokens, max(1, row_length // 4)) * sizes.vocabulary / tensor_parallel
    value = tokens * compute
    kept = (sizes.dim / tensor_parallel if activation_checkpoint else sizes.layer_values(tensor_parallel)) * value
    again = sizes.layer_values(tensor_parallel) * value if activation_checkpoint else 0
    backward = 4 * head + max((compute + 4) * logits, compute * (head + logits))
    reduced, stays = (0, 2 * compute * head) if sizes.tied else (4 * head, 0)
    return TrainerMemory(
        state=(0 if offload else (5 if reference else 4) * BYTES[dtype] * sizes.parameters / (shards * tensor_parallel))
        + 2 * 4 * sizes.layers * row_length * sizes.head_width,
        activations=sizes.layers * kept,
        head=compute * (head + layer) + max(3 * 4 * logits, backward) + 3 * sizes.dim * value,
        layer=stays
        + max(reduced + 2 * compute * layer, (3 * compute + 4) * layer)
        + again
        + 2 * sizes.feed_forward_width / tensor_parallel * value,
        fixed=CUDA_BYTES if device == "cuda" else 0,
    )


def shared_weights(
    *, nbytes: float, trainer_hosts: Sequence[int], copies: int, generator_hosts: Iterable[int]
) -> dict[int, float]:
    """Bytes of published weights that each host keeps in shared memory: two versions, in buffers that are used in turn.

    A trainer host keeps what its ranks publish: the shards of the first copy of the model. A generator host that has not all of
    that itself has a weight reader, which keeps the whole.

    Args:
        nbytes: of one version.
        trainer_hosts: of each rank, in order.
        copies: of the model, among the ranks.
        generator_hosts: of each replica.
    """
    publishing = trainer_hosts[: len(trainer_hosts) // copies]
    parts = Counter(publishing)
    held = {host: nbytes * ranks / len(publishing) for host, ranks in parts.items()}
    for host in {*generator_hosts}:
        if set(parts) != {host}:
            held[host] = held.get(host, 0) + nbytes
    return {host: 2 * size for host, size in sorted(held.items())}
