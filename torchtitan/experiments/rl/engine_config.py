"""Settings of a vLLM engine. Apart from the engine, because configs of algorithms name them too (frozen/models.py)."""

from dataclasses import dataclass
from typing import Literal

WeightUpdate = Literal["keep", "recompute", "drain"]
"""Explained where it is set: ``Generator.Config.weight_update``."""


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
