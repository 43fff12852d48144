"""Settings of a vLLM engine. Apart from the engine, because configs of algorithms name them too (generation/references.py)."""

from dataclasses import dataclass, field
from typing import Literal

WeightUpdate = Literal["keep", "recompute", "drain"]
"""Explained where it is set: ``GeneratorConfig.weight_update``."""


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The engine's own settings; what vLLM calls them is said where the names differ."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = 2048
    """Longest prompt + completion, in tokens."""
    max_num_seqs: int = 256
    """Sequences in one engine step."""
    tensor_parallel_degree: int = 1
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights and KV cache. CUDA only."""
    cpu_kv_cache_gib: int = 1
    """KV cache on CPU, in GiB."""
    cuda_graphs: bool = True
    """False sets enforce_eager. CPU is always eager."""
    enable_prefix_caching: bool = True


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    """Independent engines. Requests go to the least loaded; a conversation stays where its prefix is cached."""
    weight_update: WeightUpdate = "keep"
    """What becomes of completions under way when a new version arrives. Whatever has no token yet starts under the new one,
    every token carries the version it was sampled with, and no prompt is answered from another version's cache.

    keep: they go on at once, on the keys and values they have. Nothing stops and nothing is computed twice; a later token's
    log-probability is that of the new weights given a prefix which older ones have read.
    recompute: their keys and values are computed anew, prompt and tokens so far: every token's log-probability is exactly
    that of its version. An update costs a prefill of all that is under way.
    drain: they end first, while the others wait: a completion has one version, and a turn of a conversation too. An update
    waits for the longest completion."""
