"""Config of the generators."""

from dataclasses import dataclass, field
from typing import Literal

from torchtitan.experiments.rl.bounds import Changeable, PositiveInt, ProcessCount
from torchtitan.experiments.rl.generation.engine import EngineConfig
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig

WeightUpdate = Literal["keep", "recompute", "drain"]
"""Modes of ``GeneratorConfig.weight_update``."""


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """The engines that sample from the policy, and how they get new weights."""

    engine: EngineConfig = field(default_factory=VLLMEngineConfig)
    """Config of the engine, whose type says which engine it is."""
    replicas: Changeable[ProcessCount] = 1
    """Number of independent engines.

    Requests go to the least loaded one; a conversation stays where its prefix is cached."""
    verify_every: Changeable[PositiveInt] = 1
    """Interval, in versions, at which every byte in the engine is compared with what was published.

    The versions compared are the multiples of it. The canary is scored with each version."""
    weights: Changeable[Literal["host", "device", "auto"]] = "host"
    """Memory in which a version waits for the engines.

    host: the host's shared memory, which engines of this and of other hosts read.
    device: each trainer rank keeps its share on its own device, and engines of the same host copy
    from there, on GPUs by CUDA IPC. It takes a GPU's memory, and no GPU has run it.
    auto: device if the run is on GPUs of one host that share memory, else host."""
    weight_update: WeightUpdate = "keep"
    """Effect of a new version on running requests, which are those that have tokens.

    In every mode a request without a token starts under the new version, each token carries the
    version that sampled it, and no prompt reads another version's cache.

    keep: running requests go on at once, with the keys and values they have. Nothing stops and
    nothing is computed twice. A later token's log-probability is that of the new weights, given
    keys and values that older weights computed.
    recompute: the engine computes their keys and values again, prompt and tokens so far. Every
    token's log-probability is exactly that of its version. An update costs a prefill of all running
    requests.
    drain: they finish first, and all other requests wait. A completion has one version. An update
    waits for the longest completion."""
