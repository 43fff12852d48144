"""The model families, and which one a folder or a flavor is of. A new family is a module like `qwen3.py` and a line here."""

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.family import ModelFamily
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.llama3 import LLAMA3
from torchtitan.experiments.rl.models.qwen3 import QWEN3

FAMILIES: dict[str, ModelFamily] = {
    "Qwen3ForCausalLM": QWEN3,
    "LlamaForCausalLM": LLAMA3,
}
"""By the name that config.json has in ``architectures``."""


def family_of_folder(hub: HubConfig) -> ModelFamily:
    """
    Raises:
        ConfigError: no family has this architecture.
    """
    if hub.architecture not in FAMILIES:
        cure = f"its architecture is {hub.architecture!r}; this library trains {', '.join(FAMILIES)}, or set model.flavor"
        raise hub.error(cure)
    return FAMILIES[hub.architecture]


def family_of_flavor(flavor: str, path: str) -> tuple[ModelFamily, str]:
    """A flavor's family, and its name there.

    Args:
        flavor: torchtitan's name of a configuration, as "8B", or with its family, as "llama3/8B".
        path: the hub folder. It says which family is meant where several have the flavor; it may be missing.

    Raises:
        ConfigError: no family has the flavor, or several have it and the folder does not tell which is meant.
    """
    known = {f"{family.name}/{name}": (family, name) for family in FAMILIES.values() for name in family.flavors}
    if flavor in known:
        return known[flavor]
    meant = {full: found for full, found in known.items() if found[1] == flavor}
    if not meant:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(known)}")
    if len(meant) > 1:
        try:
            architecture = HubConfig.read(path).architecture
        except ConfigError:  # a flavor can be planned with before its folder is there
            architecture = ""
        meant = {full: found for full, found in meant.items() if FAMILIES.get(architecture) is found[0]} or meant
    if len(meant) > 1:
        raise ConfigError("model.flavor", flavor, f"choose one of {', '.join(meant)}")
    return next(iter(meant.values()))
