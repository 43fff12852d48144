"""torchtitan 0.3.0 without its models.

Every process of a run imports this module, and importing the models takes seconds.
"""

import sys

import torch

import torchtitan.tools.utils as tools


def built_class(config: object) -> type:
    """Return the class that a ``Configurable.Config`` builds; the config's type if it builds none.

    ``Configurable.Config._owner`` is private: torchtitan reads it in ``build``, and has no public
    name for it.
    """
    return getattr(config, "_owner", None) or type(config)


def use_cpu_without_accelerator() -> None:
    """Make torchtitan run on the CPU if torch finds no accelerator.

    torchtitan falls back to "cuda". Its modules copy ``tools.utils.device_type`` and
    ``device_module`` when they are imported, so every existing copy is changed too: the order of
    imports then does not matter.
    """
    if torch.accelerator.is_available():
        return
    replaced = {
        "device_type": (tools.device_type, "cpu"),
        "device_module": (tools.device_module, torch.cpu),
    }
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan."):
            continue
        for attribute, (old, new) in replaced.items():
            if vars(module).get(attribute) is old:
                setattr(module, attribute, new)
