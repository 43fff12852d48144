"""transformers 5.19.0: fills buffers that no checkpoint holds; copies a model with stand-ins.

Neither can be done by a public function.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def fill_buffers(decoder: PreTrainedModel, device: torch.device | None) -> None:
    """Give a decoder the buffers that no checkpoint holds, such as rotary frequencies.

    ``_init_weights`` is private, and is transformers' only way to compute them anew. They are
    float32 at least, whatever the parameters are, as transformers has them. Parameters keep what
    they have.

    Args:
        device: device of the buffers; None for the one that they are on.

    Raises:
        RuntimeError: transformers does not fill a buffer.
    """
    for name, module in decoder.named_modules():
        keys = sorted(module._non_persistent_buffers_set)
        if not keys:
            continue
        for key in keys:
            buffer = module.get_buffer(key)
            if not buffer.is_floating_point():
                raise RuntimeError(f"{name}.{key} is a buffer of {buffer.dtype}")
            dtype = torch.promote_types(buffer.dtype, torch.float32)
            empty = torch.empty_like(buffer, dtype=dtype, device=device)
            module.register_buffer(key, empty, persistent=False)
        for parameter in module.parameters(recurse=False):
            vars(parameter)["_is_hf_initialized"] = True  # transformers leaves such a one alone
        decoder._init_weights(module)
        for key in keys:
            if module.get_buffer(key)._version == 0:  # nothing was written to it
                raise RuntimeError(f"transformers does not fill {name}.{key}")


def with_modules(model: PreTrainedModel, /, **modules: nn.Module) -> Any:  # noqa: ANN401 - as the model
    """Return a copy of a model that has other modules by these names, and shares the rest."""
    changed = copy.copy(model)
    vars(changed)["_modules"] = model._modules | modules
    return changed
