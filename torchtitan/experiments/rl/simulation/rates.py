"""What things cost: seconds of an engine's step, of a trainer's microbatch, of a version's way, by device or as measured.

An engine's step costs ``step_s + sequence_s * sequences + context_s * tokens of their context``, and a prompt
``prompt_s + prefill_token_s * tokens that are not cached`` before it. A trainer's step costs ``step_s`` and, for the rank that
has most to do, ``max(microbatch_s, token_s * tokens + pair_s * pairs of tokens that see each other)`` for each microbatch.
"""

import math
from dataclasses import dataclass

from torchtitan.experiments.rl.config.plan import BYTES, GIB, ModelSizes
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.operations.supervision import READERS_AT_ONCE


@dataclass(kw_only=True, slots=True, frozen=True)
class Device:
    """Published peaks of a GPU and of the host it is in; the shares that are reached are in this file's constants."""

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
    # NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM. Networks: of the DGX with each, HDR or NDR InfiniBand a GPU.
    "A100": Device(flops=312e12, bandwidth=2.039e12, gib=80, nvlink=300e9, network=25e9),
    "H100": Device(flops=989e12, bandwidth=3.35e12, gib=80, nvlink=450e9, network=50e9),
    "H200": Device(flops=989e12, bandwidth=4.8e12, gib=141, nvlink=450e9, network=50e9),
}
GPUS_PER_HOST = 8
FLOPS_SHARE, BANDWIDTH_SHARE, NETWORK_SHARE = 0.4, 0.6, 0.7
"""Of the peaks, what large matrices, decoding and collectives reach: the first two as in config/plan.py, no GPU was asked."""
ENGINE_STEP_S, SEQUENCE_S = 1e-3, 1e-5
"""Of an engine's step, on its host: scheduling, and sampling and output of a sequence. An estimate."""
READER_BYTES_S = 1.5e9
"""A weight reader's, measured over TCP between two hosts of one machine (benchmarks/host_weights.py)."""
COPY_BYTES_S = 20e9
"""Between a host's memory and a GPU, or within a host's memory: PCIe 5 at a third of its peak."""
TURN_S = 0.77e-3
"""Renderer and all else of a turn, measured (docs/measured.md)."""
START_S, DEATH_SEEN_S = 180.0, 10.0
"""Until a process of a real model takes work, compiled; until Monarch reports the death of a process elsewhere."""


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
    """Of new weights, while nothing is sampled."""

    def decode_s(self, steps: int, sequences: int, context: int) -> float:
        """Of so many steps with the same sequences, whose context grows by a token each."""
        return steps * self._step(sequences, context) + self.context_s * sequences * steps * (steps - 1) / 2

    def steps_in(self, seconds: float, sequences: int, context: int) -> int:
        """The fewest whole steps that take at least ``seconds``; at least 1."""
        first, growth = self._step(sequences, context), self.context_s * sequences
        steps = int(seconds / first) if growth == 0 else int(((first**2 + 2 * growth * seconds) ** 0.5 - first) / growth)
        steps = max(0, steps - 1)
        while self.decode_s(steps, sequences, context) < seconds:
            steps += 1
        return max(1, steps)

    def _step(self, sequences: int, context: int) -> float:
        return self.step_s + self.sequence_s * sequences + self.context_s * context


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerRates:
    step_s: float
    microbatch_s: float
    token_s: float
    pair_s: float
    publish_s: float
    """Until training may go on."""
    checkpoint_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    engine: EngineRates
    trainer: TrainerRates
    fetch_s: float = 0.0
    """Until every host of generators has a version."""
    start_s: float = START_S
    turn_s: float = 0.0
    """Of the process that runs the rollouts, for each turn: rendering, parsing, messages. One Python thread does that."""


def device_rates(config: RunConfig, sizes: ModelSizes, device: Device) -> Rates:
    """Of a config on GPUs of one kind.

    For each token the trainer computes 6 operations a parameter of a layer, 8 of the head, with full checkpointing 2 more of
    the layers, and 14 (18) of attention's width for each pair of tokens. A rank gathers the layers' weights twice and reduces
    their gradients once a microbatch; it computes meanwhile, and the slower of both counts.
    """
    engine, trainer = config.generator.engine, config.trainer
    flops, degree = device.flops * FLOPS_SHARE, engine.tensor_parallel_degree
    bandwidth, itemsize = device.bandwidth * BANDWIDTH_SHARE * degree, engine.torch_dtype.itemsize
    weights, token_bytes = sizes.parameters * itemsize, 2 * sizes.key_width * sizes.layers * itemsize
    room = device.gib * GIB * degree * getattr(engine, "gpu_memory_utilization", 0.9) - weights
    given = getattr(engine, "kv_cache_gib", None)
    layers, full = sizes.layer_parameters * sizes.layers, trainer.activation_checkpoint == "full"
    parallelism, ranks = trainer.parallelism, trainer.ranks
    # Ranks that share a row's work: each has a part of it.
    together = ranks // parallelism.data_parallel_size(ranks)
    shards = parallelism.shards(ranks)
    link = device.nvlink if shards * parallelism.tensor_parallel_degree <= GPUS_PER_HOST else device.network
    gathered = 3 * layers * BYTES[trainer.mixed_precision_param] / parallelism.tensor_parallel_degree * (1 - 1 / shards)
    published = weights / max(1, -(-ranks // GPUS_PER_HOST))
    # From the hosts of the trainer to all hosts of generators, each of which others read from next.
    readers = -(-config.generator.replicas * degree // GPUS_PER_HOST) / max(1, ranks // GPUS_PER_HOST)
    rounds = math.ceil(math.log(readers + 1, READERS_AT_ONCE + 1))
    network = device.network * GPUS_PER_HOST * NETWORK_SHARE / min(READERS_AT_ONCE, max(1, readers))
    return Rates(
        engine=EngineRates(
            step_s=ENGINE_STEP_S + weights / bandwidth,
            sequence_s=SEQUENCE_S + 2 * sizes.parameters / (flops * degree),
            context_s=token_bytes / bandwidth,
            prompt_s=0.0,
            prefill_token_s=2 * sizes.parameters / (flops * degree),
            cache_tokens=int((room if given is None else given * GIB * degree) / token_bytes),
            load_s=weights / degree / COPY_BYTES_S,
        ),
        trainer=TrainerRates(
            step_s=0.5,
            microbatch_s=gathered / (link * NETWORK_SHARE),
            token_s=((8 if full else 6) * layers + 8 * sizes.vocabulary_parameters) / flops / together,
            pair_s=(9 if full else 7) * 2 * sizes.query_width * sizes.layers / flops / together,
            publish_s=published / COPY_BYTES_S,
            checkpoint_s=12 * sizes.parameters / ranks / COPY_BYTES_S,
        ),
        fetch_s=rounds * weights / min(READER_BYTES_S, network),
        turn_s=TURN_S,
    )
