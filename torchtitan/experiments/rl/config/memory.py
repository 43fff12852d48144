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
        Queries and keys before and after norm and rotation: 3 of each; values and the attention's output. Three products of the
        feed-forward part and the activation: 4 of its width. Fused attention stores nothing quadratic.
        """
        attention = 3 * (self.query_width + self.key_width) + self.key_width + self.query_width
        return (4 * self.dim + attention + 4 * self.feed_forward_width) / tensor_parallel


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerMemory:
    """Bytes of one rank, by what they are."""

    state: float
    """Parameters, gradients and two Adam moments: this rank's shard. Gradients are reduced in every microbatch."""
    gathered: float
    """Compute copies of the layer at work and the next one, a layer's gradient and what its reduction adds up."""
    vocabulary: float
    """The head's compute copy, which stays through the step; its gradient, once in the compute dtype and twice in float32 (as
    the head adds it up, and for its reduction); a chunk of logits and two tensors like it."""
    activations: float
    """Of a microbatch. With checkpointing one layer's, and each layer's input."""
    fixed: float

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.vocabulary + self.activations + self.fixed


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
    input_values, layer_values = sizes.dim / tensor_parallel, sizes.layer_values(tensor_parallel)
    values = sizes.layers * input_values + layer_values if activation_checkpoint else sizes.layers * layer_values
    chunk = min(chunk_tokens, max(1, row_length // 4))
    return TrainerMemory(
        state=0 if offload else (5 if reference else 4) * BYTES[dtype] * sizes.parameters / (shards * tensor_parallel),
        gathered=(3 * compute + 4) * sizes.layer_parameters / tensor_parallel,
        vocabulary=((2 * compute + 8) * sizes.vocabulary_parameters + 3 * 4 * chunk * sizes.vocabulary) / tensor_parallel,
        activations=values * tokens * compute,
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
