"""Whether a torchtitan flavor is the model of a hub folder."""

from typing import Any

from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.models.families import FAMILIES
from torchtitan.experiments.rl.models.family import ModelFamily
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.models.common import Decoder


def check_flavor(flavor: str, family: ModelFamily, decoder: Decoder.Config, path: str) -> None:
    """Compare a flavor with config.json of the folder. The trainer computes with the flavor, the generators with config.json.

    Args:
        decoder: the flavor's model config.
        path: the hub folder; one without a config.json is not compared.

    Raises:
        ConfigError: they are of different models, or config.json can't be read.
    """
    try:
        hub = HubConfig.read(path)
    except MissingError:  # a flavor can be planned with before its folder is there
        return
    cure = "choose the flavor of this folder, or None to read config.json"
    other = FAMILIES.get(hub.architecture)
    if other is not None and other is not family:
        raise ConfigError("model.flavor", flavor, f"{path} holds a {hub.architecture}; {cure}")
    for name, size in _sizes(decoder).items():
        value = hub.rope.get(name) if name == "rope_theta" else hub.get(name)
        if value is not None and value != size:
            raise ConfigError("model.flavor", flavor, f"it has {name} = {size}, and config.json of {path} has {value}; {cure}")


def _sizes(decoder: Decoder.Config) -> dict[str, Any]:
    """Sizes of a model by their names in config.json; left out: those that this kind of model does not have."""
    layer: Any = decoder.layers[0]  # torchtitan declares less than every decoder has
    attention, feed_forward = layer.attention, getattr(layer, "feed_forward", None)
    sizes = {
        "hidden_size": decoder.dim,
        "vocab_size": decoder.vocab_size,
        "num_hidden_layers": len(decoder.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.rope.dim,
        "intermediate_size": None if feed_forward is None else feed_forward.w1.out_features,
        "rope_theta": attention.rope.theta,
        "tie_word_embeddings": getattr(decoder, "enable_weight_tying", False),
    }
    return {name: size for name, size in sizes.items() if size is not None}
