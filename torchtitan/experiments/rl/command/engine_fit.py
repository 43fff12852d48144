"""Compares an engine's settings with the model that it is to serve, and with this host's cores."""

from typing import Any

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.engine import EngineConfig
from torchtitan.experiments.rl.models.hub import HubConfig

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names by which model families call the longest sequence in config.json."""
_VOCABULARY_BLOCK = 64
"""Engines fill the vocabulary up to a multiple of it before they split it."""


def check_engine_fits(
    engine: EngineConfig, hub: HubConfig, *, field: str, positions: int | None = None
) -> None:
    """Check that a model can have the engine's length and degree of parallelism.

    Args:
        field: config field of ``engine``.
        positions: longest sequence of the model, where more is known than config.json says.

    Raises:
        ConfigError: the engine's ``max_model_len`` or ``tensor_parallel_degree``, which the model
            can't have.
    """
    if positions is None:
        positions = next((value for name in _POSITIONS if (value := _size(hub, name))), None)
    if positions is not None and engine.max_model_len > positions:
        raise ConfigError(
            f"{field}.max_model_len",
            engine.max_model_len,
            f"the model has {positions} positions; choose at most that",
        )
    degree = engine.tensor_parallel_degree
    for what, count in _divided(hub, degree).items():
        if count % degree:
            cure = (
                f"the model's {what} can't be divided by it; choose a degree that divides {count}"
            )
            raise ConfigError(f"{field}.tensor_parallel_degree", degree, cure)


def check_served_fields(engine: EngineConfig, hub: HubConfig, *, field: str) -> None:
    """Check that the engine computes what a model's config.json says.

    Args:
        field: config field that names the hub folder.

    Raises:
        ConfigError: the engine ignores a field, and would compute another model than the trainer.
    """
    for name in engine.ignored_fields.get(hub.architecture, ()):
        if hub.get(name, False):
            cure = (
                f"its config.json has {name} = true, which the engine ignores for a "
                f"{hub.architecture}: it would compute another model than the trainer. Choose one "
                "without it"
            )
            raise ConfigError(field, hub.path, cure)


def check_cores(engine: EngineConfig, cores: int, *, field: str) -> None:
    """Check that each process of an engine has a core.

    Args:
        cores: number of cores of this host.

    Raises:
        ConfigError: the engine's ``tensor_parallel_degree``: processes that wait for each other on
            one core hardly go on.
    """
    if engine.tensor_parallel_degree > cores:
        cure = f"each part needs a CPU core, and there are {cores} here; choose at most {cores}"
        raise ConfigError(f"{field}.tensor_parallel_degree", engine.tensor_parallel_degree, cure)


def _divided(hub: HubConfig, degree: int) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, by name, if config.json has them."""
    heads = _size(hub, "num_attention_heads")
    kv_heads = _size(hub, "num_key_value_heads")
    vocabulary = _size(hub, "vocab_size")
    width = _size(hub, "moe_intermediate_size") or _size(
        hub, "intermediate_size"
    )  # a mixture's dense layers have another
    sizes = {f"{heads} attention heads": heads, f"intermediate size of {width}": width}
    # Fewer key-value heads than parts are copied: each part then has one.
    if kv_heads is not None and (kv_heads >= degree or degree % kv_heads):
        sizes[f"{kv_heads} key-value heads"] = kv_heads
    if vocabulary is not None:
        filled = -(-vocabulary // _VOCABULARY_BLOCK) * _VOCABULARY_BLOCK
        sizes[f"vocabulary of {vocabulary} (filled up to {filled})"] = filled
    return {what: count for what, count in sizes.items() if count is not None}


def _size(hub: HubConfig, name: str) -> int | None:
    text: Any = hub.get("text_config", {})  # of a model that reads images too
    for value in (hub.get(name), text.get(name) if isinstance(text, dict) else None):
        if type(value) is int and value > 0:
            return value
    return None
