"""Costs of a model on a GPU: seconds of an engine's step and of a trainer's microbatch.

An engine's step costs ``step_s + sequence_s * sequences + context_s * tokens of their context``,
less what is not read of the experts, and a prompt ``prompt_s + prefill_token_s * tokens that are
not cached`` before it. A trainer's step costs ``step_s`` and, for the rank that has most to do,
``max(microbatch_s, token_s * tokens + pair_s * pairs of tokens that see each other)`` for each
microbatch.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.models.family import DecoderShape

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelSizes:
    """Sizes of a decoder, from which the memory that it takes follows."""

    parameters: int
    trained: int
    """Number of trained parameters: those of all adapters, or of the model without them."""
    by_muon: int = 0
    """Number of the trained parameters that Muon moves. It keeps one moment of each, AdamW two."""
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
    """Width of the feed-forward part that a token is computed with, summed over its experts."""
    rotations: int
    """Positions in a layer's table of rotations."""
    experts: int = 1
    chosen: int = 1
    """Number of experts that each token chooses."""

    @classmethod
    def of(
        cls, decoder: DecoderShape, parameters: int, trained: int, *, by_muon: int = 0
    ) -> "ModelSizes":
        return cls(
            parameters=parameters,
            trained=trained,
            by_muon=by_muon,
            layers=decoder.layers,
            dim=decoder.dim,
            vocabulary=decoder.vocab_size,
            tied=decoder.tied,
            query_width=decoder.heads * decoder.head_dim,
            key_width=decoder.kv_heads * decoder.head_dim,
            head_width=decoder.head_dim,
            feed_forward_width=decoder.feed_forward_width * decoder.chosen,
            rotations=decoder.rotations,
            experts=decoder.experts,
            chosen=decoder.chosen,
        )

    @property
    def moments(self) -> int:
        """Number of values that the optimizer keeps of the trained parameters."""
        return 2 * self.trained - self.by_muon

    @property
    def vocabulary_parameters(self) -> int:
        """Number of parameters of the embedding. The head has as many, or the same ones."""
        return self.vocabulary * self.dim

    @property
    def layer_parameters(self) -> int:
        return (
            self.parameters - (1 if self.tied else 2) * self.vocabulary_parameters
        ) // self.layers

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of a layer's experts; 0 in a dense layer."""
        return (
            0
            if self.experts == 1
            else 3 * self.dim * self.feed_forward_width // self.chosen * self.experts
        )

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token is computed with."""
        return (
            self.parameters
            - self.layers * self.expert_parameters * (self.experts - self.chosen) // self.experts
        )

    def layer_values(self, tensor_parallel: int) -> float:
        """Values that the backward pass of a layer needs, a token and rank.

        Its input, two norms and the residual between them: ``4 dim``, a part of the tokens on each
        tensor-parallel rank. Queries and keys before their norm and after rotation; values and the
        attention's output. Three products of the feed-forward part and the activation: 4 of its
        width. Fused attention stores nothing quadratic. Experts have a copy of their tokens, and
        what they make of it twice, once in float32.
        """
        attention = 3 * (self.query_width + self.key_width)
        copied = 0 if self.experts == 1 else 4 * self.chosen * self.dim
        return (4 * self.dim + attention + 4 * self.feed_forward_width + copied) / tensor_parallel


@dataclass(kw_only=True, slots=True, frozen=True)
class Gpu:
    """Published peaks of a GPU and of its host; this file's constants are the shares reached."""

    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes of memory a second."""
    gib: float
    nvlink: float
    """Bytes a second from GPU to GPU of a host, one way."""
    network: float
    """Bytes a second out of a host, one way, for each GPU."""


DEVICES = {
    # NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM. Networks: of the DGX with each, HDR
    # or NDR InfiniBand a GPU.
    "A100": Gpu(flops=312e12, bandwidth=2.039e12, gib=80, nvlink=300e9, network=25e9),
    "H100": Gpu(flops=989e12, bandwidth=3.35e12, gib=80, nvlink=450e9, network=50e9),
    "H200": Gpu(flops=989e12, bandwidth=4.8e12, gib=141, nvlink=450e9, network=50e9),
}
BALANCED_ON = "H100"
"""Kind of GPU that the plan's estimates are of."""


class GpuKind(NamedTuple):
    """Common kinds of GPU that have the same memory."""

    gb: int
    """GB in their names."""
    names: str
    gib: float
    """GiB that torch finds on them: the driver keeps some."""


GPU_KINDS = (
    GpuKind(24, "L4, A10", 22.0),
    GpuKind(24, "RTX 4090", 23.5),
    GpuKind(48, "L40S", 44.3),
    GpuKind(48, "RTX 6000 Ada", 47.2),
    GpuKind(80, "A100, H100", 79.1),
    GpuKind(141, "H200", 139.7),
    GpuKind(180, "B200", 178.3),
)
"""Common kinds of GPU, by their memory."""
GPUS_PER_HOST = 8
FLOPS_SHARE, BANDWIDTH_SHARE, NETWORK_SHARE = 0.4, 0.6, 0.7
"""Shares of a GPU's peaks that large matrices, decoding and collectives reach. They are assumed. An
H100 that trained Qwen3-0.6B, whose matrices are small, reached 0.33 while it was busy
(docs/gpu.md)."""
LAYER_PASS_S = 2.6e-3
"""Seconds in which a trainer's host launches one pass over a compiled layer, forward or backward,
however few tokens it has. Measured beside an H100 with torch 2.11 (docs/gpu.md): a microbatch of 28
layers took 0.146 s, and 0.222 s where full checkpointing adds a pass."""
ENGINE_STEP_S, SEQUENCE_S = 1e-3, 1e-5
"""Seconds on the host for an engine's step: to schedule it, and to sample and return one sequence's
token. They are estimates."""
COPY_BYTES_S = 20e9
"""Bytes a second between a host's memory and a GPU, or within a host's memory: PCIe 5 at a third of
its peak."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineRates:
    step_s: float
    sequence_s: float
    context_s: float
    prompt_s: float
    prefill_token_s: float
    cache_tokens: int
    """Keys and values that the engine has room for."""
    load_s: float
    """Seconds to load new weights, while nothing is sampled."""
    experts_s: float = 0.0
    """Seconds of ``step_s`` that reading all experts takes."""
    skipped: float = 0.0
    """Share of the experts that the token of a sequence leaves out: a step reads those that any
    sequence takes."""

    def decode_s(self, steps: int, sequences: int, context: int) -> float:
        """Return the seconds of decoding steps with the same sequences.

        The context of each sequence grows by a token a step.
        """
        return (
            steps * self._step(sequences, context)
            + self.context_s * sequences * steps * (steps - 1) / 2
        )

    def steps_in(self, seconds: float, sequences: int, context: int) -> int:
        """Return the fewest whole steps that take at least ``seconds``; at least 1."""
        first, growth = self._step(sequences, context), self.context_s * sequences
        steps = (
            int(seconds / first)
            if growth == 0
            else int(((first**2 + 2 * growth * seconds) ** 0.5 - first) / growth)
        )
        steps = max(0, steps - 1)
        while self.decode_s(steps, sequences, context) < seconds:
            steps += 1
        return max(1, steps)

    def _step(self, sequences: int, context: int) -> float:
        read = self.step_s - self.experts_s * self.skipped**sequences
        return read + self.sequence_s * sequences + self.context_s * context


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerRates:
    step_s: float
    microbatch_s: float
    token_s: float
    pair_s: float
    publish_s: float
    """Until training may go on."""
    checkpoint_s: float


def version_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """Return the bytes of a version in the engines' dtype.

    A version is the model, or the adapters that engines serve.
    """
    parameters = sizes.trained if config.served else sizes.parameters
    return parameters * config.generator.engine.torch_dtype.itemsize


def device_rates(
    config: RunConfig, sizes: ModelSizes, gpu: Gpu
) -> tuple[EngineRates, TrainerRates]:
    """Return the rates of an engine and of the trainer, on GPUs of one kind.

    An engine's step reads the weights and the keys and values of its sequences once, shared by its
    GPUs, and takes 2 operations an active parameter for each token.

    For each token the trainer computes 6 operations an active parameter of a layer, 8 of the head,
    which always computes its logits again, and 14 of attention's width for each pair of tokens.
    Full checkpointing takes 2 more of the layers and 4 more of attention; selective computes
    attention's way out and one product of the feed-forward part again. A frozen matrix, with
    adapters, has no gradient, and takes 2 less. A rank gathers the layers' weights twice and
    reduces their gradients once a microbatch, and its host launches two passes over each layer, or
    three; it computes meanwhile, and the slowest of these counts.
    """
    engine, trainer = config.generator.engine, config.trainer
    flops, degree = gpu.flops * FLOPS_SHARE, engine.tensor_parallel_degree
    bandwidth, itemsize = gpu.bandwidth * BANDWIDTH_SHARE * degree, engine.torch_dtype.itemsize
    weights, token_bytes = (
        sizes.parameters * itemsize,
        2 * sizes.key_width * sizes.layers * itemsize,
    )
    room = gpu.gib * getattr(engine, "gpu_memory_utilization", 0.9) - weights / GIB / degree
    cache_gib = getattr(engine, "kv_cache_gib", None) or room
    version, forward_s = (
        version_bytes(config, sizes),
        2 * sizes.active_parameters / (flops * degree),
    )
    parallelism, ranks, full = (
        trainer.parallelism,
        trainer.ranks,
        trainer.activation_checkpoint == "full",
    )
    head, layers = sizes.vocabulary_parameters, sizes.layer_parameters * sizes.layers
    active = layers - sizes.parameters + sizes.active_parameters
    selected = 2 * sizes.layers * sizes.dim * (sizes.query_width + sizes.feed_forward_width)
    again = {"none": 0, "selective": selected, "full": 2 * active}[trainer.activation_checkpoint]
    operations, passes = 6 * active + again + 8 * head, 3
    if trainer.lora is not None:
        operations += (8 if full else 6) * sizes.trained // len(config.adapters) - 2 * (
            active + head
        )
        passes = 2
    # Ranks that share a row's work: each has a part of it.
    together = ranks // parallelism.data_parallel_size(ranks)
    shards = parallelism.shards(ranks)
    link = (
        gpu.nvlink if shards * parallelism.tensor_parallel_degree <= GPUS_PER_HOST else gpu.network
    )
    gathered = (
        passes
        * layers
        * BYTES[trainer.mixed_precision_param]
        / parallelism.tensor_parallel_degree
        * (1 - 1 / shards)
    )
    return EngineRates(
        step_s=ENGINE_STEP_S + weights / bandwidth,
        sequence_s=SEQUENCE_S + forward_s,
        context_s=token_bytes / bandwidth,
        prompt_s=0.0,
        prefill_token_s=forward_s,
        cache_tokens=int(cache_gib * GIB * degree / token_bytes),
        load_s=version / degree / COPY_BYTES_S,
        experts_s=sizes.expert_parameters * sizes.layers * itemsize / bandwidth,
        skipped=1 - sizes.chosen / sizes.experts,
    ), TrainerRates(
        step_s=0.5,
        microbatch_s=max(
            gathered / (link * NETWORK_SHARE), LAYER_PASS_S * sizes.layers * (3 if full else 2)
        ),
        token_s=operations / flops / together,
        pair_s=(9 if full else 7) * 2 * sizes.query_width * sizes.layers / flops / together,
        publish_s=version / math.ceil(ranks / GPUS_PER_HOST) / COPY_BYTES_S,
        checkpoint_s=12 * sizes.trained / ranks / COPY_BYTES_S,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Balance:
    """Seconds of one optimizer step on each side, with every rollout as long as it may be."""

    train_s: float
    """Seconds that the trainer computes."""
    generate_s: float
    in_turn: bool
    """True if the two sides take turns; otherwise they work at the same time."""

    @property
    def step_s(self) -> float:
        return (
            self.train_s + self.generate_s if self.in_turn else max(self.train_s, self.generate_s)
        )

    def step_line(self) -> str:
        """Return the estimate of a step's seconds, for people."""
        how = "in turn" if self.in_turn else "at the same time"
        step, trainer, generators = (
            f"{seconds:,.{1 if seconds < 10 else 0}f} s"
            for seconds in (self.step_s, self.train_s, self.generate_s)
        )
        return (
            f"a step         about {step} on {BALANCED_ON}s, if every rollout were as long as it "
            f"may be: trainer {trainer}, "
            f"generators {generators}, {how} (modelled, not measured)"
        )

    def line(self) -> str:
        ratio = self.train_s / self.generate_s
        slower, faster = ("trainer", "generators") if ratio > 1 else ("generators", "trainer")
        side = "neither" if 0.8 < ratio < 1.25 else f"the {slower}"
        return (
            f"bottleneck     {side}: in a step the {slower} would take "
            f"{max(ratio, 1 / ratio):.1f} times as long as "
            f"the {faster} (modelled, not measured)"
        )


def balance(config: RunConfig, sizes: ModelSizes, rollouts: int) -> Balance:
    """Return the costs of a step on H100s.

    Every rollout is as long as the longest of any task, of which a token sees half on average.

    Args:
        rollouts: of one optimizer step.
    """
    engine, trainer = device_rates(config, sizes, DEVICES[BALANCED_ON])
    longest = max(config.tasks.values(), key=lambda task: task.env.max_rollout_tokens)
    tokens = longest.env.max_rollout_tokens
    sampled = min(tokens, longest.env.max_turns * longest.sampling.max_tokens)
    mine, prompt = math.ceil(rollouts / config.generator.replicas), tokens - sampled
    at_once = min(mine, getattr(config.generator.engine, "max_num_seqs", rollouts))
    decode = math.ceil(mine / at_once) * engine.decode_s(sampled, at_once, at_once * prompt)
    microbatch_tokens = config.batcher.row_length * config.batcher.rows_per_microbatch
    token_s = max(
        trainer.token_s + trainer.pair_s * tokens / 2, trainer.microbatch_s / microbatch_tokens
    )
    train = rollouts * tokens * token_s
    return Balance(
        train_s=train / config.trainer.parallelism.data_parallel_size(config.trainer.ranks),
        generate_s=decode + mine * prompt * engine.prefill_token_s,
        in_turn=config.provision.share_gpus or config.max_offpolicy_steps == 0,
    )
