"""The record of a model family. Each family is a module beside this one; `families.py` lists them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelFamily:
    name: str
    """torchtitan's. A flavor may be written as ``name/flavor``."""
    policy_config: type[Decoder.Config]
    """Builds a LogprobDecoder: torchtitan's decoder with the log-probability forward pass."""
    model_of: Callable[[HubConfig], Decoder.Config]
    """torchtitan's model config of a hub folder.

    Raises:
        ConfigError: config.json lacks a field, or has a value that torchtitan's model does not support.
    """
    flavors: Collection[str]
    """torchtitan's named configurations."""
    spec_of_flavor: Callable[..., ModelSpec]
    """``(flavor, attn_backend=...)``."""
    parallelize: Callable[..., Any]
    state_dict_adapter: type[StateDictAdapter]
    """Between hub names and layout, and torchtitan's."""
