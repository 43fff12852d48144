"""The plan of a run: counts, processes and memory, which follow from the config."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.models.decoder import RowShapes
from torchtitan.experiments.rl.models.policy import is_of_transformers
from torchtitan.experiments.rl.plan.costs import (
    BYTES,
    GIB,
    GPU_KINDS,
    Balance,
    ModelSizes,
    version_bytes,
)
from torchtitan.experiments.rl.plan.placement import (
    Placement,
    engine_processes,
    hosted_processes,
    ranges,
)
from torchtitan.experiments.rl.process.host import Device

CUDA_BYTES = 2**30
"""Memory that CUDA and NCCL take of a process's GPU besides its tensors. It is assumed."""
CACHED_BYTES = 4.5 * 2**30
"""Memory that torch's allocator keeps beside the tensors of a trainer's peak. On an H100 with room
to spare it was 3.9 to 4.1 GiB (docs/gpu.md)."""
BOUNDED_CACHE_BYTES = 2 * 2**30
"""The same of a trainer that leaves an engine its share of the GPU: its allocator is bounded, and
has segments that grow, of which it gives unused pages back. It is assumed, with room for a plan
that is a tenth too low."""
ENGINE_BYTES = 2 * 2**30
"""Memory that an engine takes of a GPU beside weights, keys and values, at least. It is assumed."""
PROCESS_GIB = 0.5
"""Memory of a process before it holds anything: torch and its libraries."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerMemory:
    """Bytes of one rank, by what they are."""

    state: float
    """Parameters, gradients and optimizer's moments: this rank's shard. Gradients are reduced in
    every microbatch. And each layer's table of rotations, whole."""
    activations: float
    """Bytes that a microbatch's forward pass leaves for its backward pass. With checkpointing it is
    each layer's input."""
    head: float
    """Bytes while the head computes. In its forward pass these are its compute copy and, unless it
    is tied, the buffer it was gathered in, and three tensors of a chunk's logits. In its backward
    pass, if that is more, they are its compute copy and the last layer's, and a gradient in
    float32, to which the product of a chunk is added."""
    layer: float
    """Bytes while a layer's backward pass computes: compute copies of the layer and the next one,
    the layer's gradient, what a reduction adds up (at first the head's), what checkpointing
    computes again, and two gradients of the feed-forward part's width. A tied head's copy and
    gradient stay until the embedding's."""
    fixed: float
    """Bytes that are CUDA's and NCCL's own."""
    cached: float
    """Bytes that torch's allocator keeps beside the tensors, for the next ones."""
    published: float = 0
    """Bytes of the rank's share of one version, in the engines' dtype. 0 unless versions stay on
    the devices."""

    @property
    def total(self) -> float:
        """Bytes at most, while a step computes."""
        return self.tensors + self.fixed + self.cached

    @property
    def tensors(self) -> float:
        """Bytes of all tensors at their peak: the head and the layers compute in turn."""
        return self.state + self.published + self.activations + max(self.head, self.layer)

    @property
    def idle(self) -> float:
        """Bytes between two steps, when what a step used is given back."""
        return self.state + self.fixed + self.published


@dataclass(kw_only=True, slots=True, frozen=True)
class SharedGpu:
    """Bytes of a GPU that a trainer rank and an engine share."""

    trainer: TrainerMemory
    engine: float
    asleep: float | None
    """Bytes that the engine keeps while it sleeps; None if it does not sleep."""

    @property
    def left(self) -> float:
        """Bytes that the trainer's allocator leaves of the GPU: the engine's, and CUDA's own."""
        return (self.engine if self.asleep is None else self.asleep) + self.trainer.fixed

    @property
    def peak(self) -> float:
        """Larger sum of the two: while the trainer steps, and while the engine is awake."""
        return max(
            self.trainer.total + (self.engine if self.asleep is None else self.asleep),
            self.trainer.idle + self.engine,
        )

    def line(self) -> str:
        trainer, engine, peak = (
            f"{size / GIB:.1f}" for size in (self.trainer.total, self.engine, self.peak)
        )
        if self.asleep is None:
            return f"trainer {trainer} + engine {engine} = {peak} GiB a GPU, both all the time"
        return (
            f"{peak} GiB a GPU: trainer {trainer} + engine asleep {self.asleep / GIB:.1f} in a "
            "step, "
            f"trainer {self.trainer.idle / GIB:.1f} + engine {engine} while it generates"
        )


def trainer_memory(sizes: ModelSizes, config: RunConfig, *, device: Device) -> TrainerMemory:
    trainer, row_length = config.trainer, config.batcher.row_length
    tensor_parallel = trainer.parallelism.tensor_parallel_degree
    divided = trainer.parallelism.context_parallel_degree
    shards = trainer.parallelism.shards(trainer.ranks) * tensor_parallel * divided
    frozen = trainer.lora is not None
    held = (
        0
        if trainer.enable_cpu_offload
        else sizes.parameters
        + (1 if trainer.reference is None else 2) * sizes.trained
        + sizes.moments
    )
    compute, tokens = (
        BYTES[trainer.mixed_precision_param],
        config.batcher.rows_per_microbatch * row_length,
    )
    # Expert-parallel ranks gather whole experts, but not all of them.
    experts = sizes.expert_parameters / max(
        tensor_parallel, trainer.parallelism.expert_parallel_degree
    )
    layer = (sizes.layer_parameters - sizes.expert_parameters) / tensor_parallel + experts
    head = sizes.vocabulary_parameters / tensor_parallel
    # The head takes at most a quarter of a row at once.
    logits = (
        min(trainer.logprob_chunk_tokens, max(1, row_length // 4))
        * sizes.vocabulary
        / tensor_parallel
    )
    value = tokens * compute / divided
    values = sizes.layer_values(tensor_parallel)
    # What selective checkpointing keeps beside the input: the products of queries, keys and values,
    # of one of the two that go into the feed-forward part, and of the one that comes out of it; and
    # attention's output.
    selected = (
        2 * sizes.dim + 2 * sizes.query_width + 2 * sizes.key_width + sizes.feed_forward_width
    ) / tensor_parallel
    kept = {"none": values, "selective": selected, "full": sizes.dim / tensor_parallel}[
        trainer.activation_checkpoint
    ] * value
    again = values * value if trainer.activation_checkpoint != "none" else 0
    forward = compute * (head + (layer if sizes.tied else head)) + 3 * 4 * logits
    backward = (
        compute * (head + layer)
        + (0 if frozen else 4 * head)
        + max((compute + 4) * logits, compute * (head + logits))
    )
    reduced, stays = (0, 2 * compute * head) if sizes.tied else (4 * head, 0)
    gradient = compute + 4
    if frozen:
        reduced, stays, gradient = 0, compute * head if sizes.tied else 0, 0
    return TrainerMemory(
        state=held * BYTES[trainer.dtype] / shards
        + 2 * 4 * sizes.layers * sizes.rotations * sizes.head_width,
        activations=sizes.layers * kept,
        head=max(forward, backward) + 3 * sizes.dim * value,
        layer=stays
        + max(reduced + 2 * compute * layer, (2 * compute + gradient) * layer)
        + again
        + 2 * sizes.feed_forward_width / tensor_parallel * value,
        fixed=CUDA_BYTES if device == "cuda" else 0,
        cached=_cached_bytes(config) if device == "cuda" else 0,
    )


def _cached_bytes(config: RunConfig) -> float:
    """Return what the allocator of a trainer rank keeps beside tensors, at most."""
    bounded = config.provision.share_gpus and config.generator.weights == "host"
    return BOUNDED_CACHE_BYTES if bounded else CACHED_BYTES


def versions_on_hosts(
    config: RunConfig, sizes: ModelSizes, placement: Placement, *, on_devices: bool
) -> dict[int, float]:
    """Return the bytes of published weights in each host's shared memory, by the host's number.

    Args:
        on_devices: True if versions stay on the trainer's devices instead.
    """
    return shared_weights(
        nbytes=0 if on_devices else version_bytes(config, sizes),
        trainer_hosts=[place.host for place in placement.trainer],
        copies=config.trainer.parallelism.data_parallel_replicate_degree,
        generator_hosts=[place.host for place in placement.generators],
    )


def shared_weights(
    *, nbytes: float, trainer_hosts: Sequence[int], copies: int, generator_hosts: Iterable[int]
) -> dict[int, float]:
    """Return the bytes of published weights that each host keeps in shared memory.

    They are two versions, in buffers that are used in turn.

    A trainer host keeps what its ranks publish: the shards of the first copy of the model. A
    generator host has a weight reader for the parts that it has not itself.

    Args:
        nbytes: of one version.
        trainer_hosts: of each rank, in order.
        copies: of the model, among the ranks.
        generator_hosts: of each replica.
    """
    publishing = trainer_hosts[: len(trainer_hosts) // copies]
    parts = Counter(publishing)
    held = {host: nbytes * ranks / len(publishing) for host, ranks in parts.items()}
    held |= dict.fromkeys(generator_hosts, nbytes)
    return {host: 2 * size for host, size in sorted(held.items())}


@dataclass(kw_only=True, slots=True, frozen=True)
class HostMemory:
    """Bytes that a run on GPUs takes of one host's memory, without pages of files."""

    checkpoint: float
    """Copy of the state of the host's trainer ranks, from which checkpoints are written."""
    versions: float
    """Two versions of the published weights."""
    offloaded: float
    """State of the host's trainer ranks, where it is not on their GPUs (``enable_cpu_offload``)."""
    processes: float
    """The run's processes themselves, at PROCESS_GIB each."""

    @property
    def total(self) -> float:
        return self.checkpoint + self.versions + self.offloaded + self.processes

    def __str__(self) -> str:
        parts = {
            "a checkpoint's copy": self.checkpoint,
            "two versions of the weights": self.versions,
            "offloaded state": self.offloaded,
            "processes": self.processes,
        }
        held = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        return f"{self.total / GIB:.2f} GiB ({held})"


def host_memory(plan: "RunPlan", placement: Placement) -> dict[int, HostMemory]:
    """Return the memory that a run on GPUs takes of each host, by the host's number.

    Every rank copies its own shard for a checkpoint, also where ranks hold the same one.
    """
    trainer, parts = plan.config.trainer, Counter[int]()
    for place in (*placement.trainer, *placement.rollout_workers):
        parts[place.host] += 1
    for place in itertools.chain(placement.generators, *placement.hosted):
        parts[place.host] += max(1, len(place.devices))  # a process for each GPU of an engine
    parts[0] += 1  # the command's own
    ranks = Counter(place.host for place in placement.trainer)
    versions = versions_on_hosts(
        plan.config, plan.sizes, placement, on_devices=plan.weights_on_devices
    )
    # Parameters, gradients and moments; a reference's parameters where there is one.
    values = plan.sizes.parameters + plan.saved_values
    copies = trainer.parallelism.data_parallel_replicate_degree
    offloaded = values * BYTES[trainer.dtype] * copies if trainer.enable_cpu_offload else 0
    return {
        host: HostMemory(
            checkpoint=plan.copied_gib * GIB * ranks[host] / trainer.ranks,
            versions=versions.get(host, 0),
            offloaded=offloaded * ranks[host] / trainer.ranks,
            processes=PROCESS_GIB * GIB * count,
        )
        for host, count in sorted(parts.items())
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class RunPlan:
    """Sizes and placement of a run, worked out from its config. ``lines`` is the dry run's text."""

    config: RunConfig
    device: Device
    sizes: ModelSizes
    rollouts_per_step: int
    open_rollouts: int
    """Maximum number of rollouts that no generator's version was made from yet."""
    tokens_per_step: int
    """Maximum number of tokens of a step, with every rollout at max_rollout_tokens."""
    hosts: int
    placement: Placement
    """Placement of the processes, from what is known before the hosts are there."""
    trainer_memory: TrainerMemory
    """Memory of one trainer rank."""
    shared_gpu: SharedGpu | None
    """Memory of a GPU that has both a trainer rank and an engine; None if no GPU has both."""
    balance: Balance | None
    """Seconds of each side; None if the cost model has no numbers for the device."""
    generator_gib: float
    """Per process: weights and KV cache (CPU), or the share of the GPU it will claim (CUDA, as a
    part of one)."""
    weights_on_devices: bool
    """Whether engines read versions from the trainer's devices."""
    shared_weights: dict[int, float]
    """Bytes of published weights in each host's shared memory, by the host's number."""

    @property
    def data_parallel_size(self) -> int:
        """Shares that a step's rows are divided into."""
        return self.config.trainer.parallelism.data_parallel_size(self.config.trainer.ranks)

    @property
    def microbatches_per_rank(self) -> int:
        """At most, of one step."""
        batcher = self.config.batcher
        return math.ceil(
            self.tokens_per_step
            / (batcher.row_length * batcher.rows_per_microbatch * self.data_parallel_size)
        )

    @property
    def saved_values(self) -> int:
        """Values in a checkpoint: trained parameters, moments, and a reference's parameters."""
        copies = 1 if self.config.trainer.reference is None else 2
        return copies * self.sizes.trained + self.sizes.moments

    @property
    def checkpoint_gib(self) -> float:
        """Size of a checkpoint on the disk."""
        return self.saved_values * BYTES[self.config.trainer.dtype] / GIB

    @property
    def copied_gib(self) -> float:
        """Memory of all hosts that a checkpoint is copied into.

        Each rank copies its shard, also one that another rank holds too.
        """
        return self.checkpoint_gib * self.config.trainer.parallelism.data_parallel_replicate_degree

    @property
    def trainer_gib(self) -> float:
        """Memory of one trainer rank, in GiB."""
        return self.trainer_memory.total / GIB

    @property
    def gpu_gib(self) -> float:
        """Memory of a trainer's GPU in GiB, with the engine that shares it."""
        return self.trainer_gib if self.shared_gpu is None else self.shared_gpu.peak / GIB

    @property
    def engine_gpu_gib(self) -> float:
        """Least memory of a generator's GPU: weights, one rollout's keys and values, CUDA's own."""
        engine, sizes = self.config.generator.engine, self.sizes
        if (claimed := engine.gpu_gib(parameters=sizes.parameters)) is not None:
            return claimed
        values = sizes.parameters + 2 * sizes.key_width * sizes.layers * engine.max_model_len
        held = values * engine.torch_dtype.itemsize / engine.tensor_parallel_degree + ENGINE_BYTES
        return held / GIB / self.generator_gib

    def gpu_line(self) -> str:
        """Return which GPUs are large enough, for people."""
        needed = max(self.gpu_gib, self.engine_gpu_gib)
        taken = (
            f"a trainer rank takes about {self.gpu_gib:.1f} GiB, a generator process at least "
            f"{self.engine_gpu_gib:.1f}"
        )
        if self.shared_gpu is not None:
            taken = f"a trainer rank and an engine take about {needed:.1f} GiB"
        fits = f"none of {GPU_KINDS[-1].gb} GB fits: name more (--gpus)"
        for kind in reversed(GPU_KINDS):
            if kind.gib >= needed:
                fits = f"of {kind.gb} GB ({kind.names}: {kind.gib:.1f} GiB) or more"
        return f"GPUs           {fits}: {taken}"

    @property
    def processes(self) -> int:
        """Without the one that the command runs in."""
        return (
            self.config.trainer.ranks
            + engine_processes(self.config)
            + hosted_processes(self.config)
        )

    @property
    def disk_gib(self) -> float:
        """Room on the disk for the checkpoints that stay, the next one and the policy.

        The policy is written twice if the best checkpoint's is too.
        """
        checkpoint = self.config.checkpoint
        best = checkpoint.keep_best is not None
        policy = self.sizes.parameters * BYTES[self.config.trainer.dtype] / GIB
        return (checkpoint.keep + best + 1) * self.checkpoint_gib + (1 + best) * policy

    def lines(self) -> list[str]:
        config, trainer, sizes, memory = (
            self.config,
            self.config.trainer,
            self.sizes,
            self.trainer_memory,
        )
        on_gpus, ranks, sharing = (
            self.device == "cuda",
            trainer.ranks,
            trainer.ranks // self.data_parallel_size,
        )
        parameters = f"{sizes.parameters / 1e6:,.1f}M parameters"
        if sizes.experts > 1:
            parameters += f", {sizes.active_parameters / 1e6:,.1f}M active"
        if trainer.lora is not None:
            adapters = f"adapters of rank {trainer.lora.rank}: {sizes.trained / 1e6:,.2f}M"
            parameters += f"; {adapters}, learning rate {trainer.optimizer.lr:g}"
        degrees = f"{ranks} trainer rank(s)"
        if sharing > 1:
            parts = (
                "tensor-parallel"
                if sharing == trainer.parallelism.tensor_parallel_degree
                else "parts of a row"
            )
            degrees += f" ({self.data_parallel_size} data-parallel x {sharing} {parts})"
        generators = (
            f"{config.generator.replicas} generator(s) of "
            f"{config.generator.engine.tensor_parallel_degree}"
        )
        if hosted := hosted_processes(config):
            generators += f", {hosted} for hosted models"
        at_work = "the head at work" if memory.head > memory.layer else "a layer at work"
        parts_of_memory = {
            "state": memory.state,
            "activations": memory.activations,
            at_work: max(memory.head, memory.layer),
            "the allocator's cache": memory.cached,
            "CUDA": memory.fixed,
            "published": memory.published,
        }
        held = ", ".join(
            f"{name} {size / GIB:.2f}" for name, size in parts_of_memory.items() if size
        )
        generator = f"{self.generator_gib:.2f} GiB a generator process"
        if on_gpus:
            generator = f"each generator process takes {self.generator_gib:.0%} of its GPU's memory"
        lines = [
            f"model          {parameters}{self._modules()}",
            f"steps          {config.steps}, each on {self.rollouts_per_step} rollouts",
            f"off-policy     at most {config.max_offpolicy_steps} versions; "
            f"{self.open_rollouts} rollouts open at most",
            (
                f"batch          at most {self.tokens_per_step:,} tokens a step, "
                f"{self.microbatches_per_rank} microbatches a rank"
            ),
            (
                f"processes      {self.processes} on {'GPUs' if on_gpus else 'CPU cores'}: "
                f"{degrees}, {generators}"
            ),
            f"memory         about {self.trainer_gib:.2f} GiB a trainer rank ({held}), {generator}",
            "versions       one of the weights, on the trainer's own devices: "
            f"{memory.published / GIB:.2f} GiB a rank"
            if self.weights_on_devices
            else f"shared memory  two versions of the weights: {self._shared_weights()}",
            f"disk           about {self.disk_gib:.2f} GiB: {self._kept_checkpoints()} "
            f"of {self.checkpoint_gib:.2f} "
            "GiB are kept, another while it is written, and the policy",
        ]
        if on_gpus:
            lines.append(self.gpu_line())
            lines.append(f"host memory    {self._host_memory()}")
            if self.shared_gpu is not None:
                lines.append(f"shared GPUs    {self.shared_gpu.line()}")
            shapes = RowShapes.of(
                config.batcher.rows_per_microbatch, config.batcher.row_length
            ).shapes
            shown = ", ".join(f"{rows} x {length}" for rows, length in shapes)
            lines.append(f"shapes         of a microbatch, in rows x tokens: {shown}")
        if self.balance is not None:
            lines.append(self.balance.step_line())
            lines += [self.balance.line()] if self.shared_gpu is None else []
        return lines

    def _kept_checkpoints(self) -> str:
        """Return how many checkpoints stay, in words."""
        checkpoint = self.config.checkpoint
        kept = f"{checkpoint.keep} checkpoints"
        if checkpoint.keep_best is not None:
            kept += f" and the best by {checkpoint.keep_best}"
        return kept

    def _modules(self) -> str:
        """Return whose modules the trainer computes with, unless they are torchtitan's."""
        return ", trained by transformers' modules" if is_of_transformers(self.config.model) else ""

    def _shared_weights(self) -> str:
        return ", ".join(
            _by_host({host: f"{size / GIB:.2f} GiB" for host, size in self.shared_weights.items()})
        )

    def _host_memory(self) -> str:
        return "; ".join(
            _by_host({host: str(size) for host, size in host_memory(self, self.placement).items()})
        )


def _by_host(texts: Mapping[int, str]) -> list[str]:
    """Return each text once, with the hosts that it is true of."""
    hosts: dict[str, list[int]] = {}
    for host, text in texts.items():
        hosts.setdefault(text, []).append(host)
    return [
        f"{text} on {'hosts' if len(on) > 1 else 'host'} {ranges(on)}" for text, on in hosts.items()
    ]
