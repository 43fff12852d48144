"""A device in place of a GPU: its tensors lie on the CPU, and each read of them is counted."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ATEN = torch.ops.aten
DEVICE = torch.device("meta")
"""Device that the CPU plays: the only other one that torch has everywhere."""


class Device(TorchDispatchMode):
    """Mode in which tensors may be made on the device.

    ``reads`` counts how often the program waited for a value of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device that has these values."""
        return OnDevice(values, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute on the CPU.

        What is made of tensors of the device, or is asked for there, is a tensor of the device.
        """
        target = kwargs.get("device")
        sources = [arg for arg in args if isinstance(arg, OnDevice)]
        if func is ATEN.copy_.default and not isinstance(args[0], OnDevice):  # to the CPU's memory
            waits = not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking")
            self.reads += bool(sources) and waits
            return args[0].copy_(args[1].held if sources else args[1])
        leaves = target is not None and torch.device(target).type == "cpu"
        self.reads += bool(sources) and (leaves or func is ATEN._local_scalar_dense.default)
        if target is not None:
            kwargs = kwargs | {"device": "cpu"}
        inner = tree_map_only(OnDevice, lambda tensor: tensor.held, (args, kwargs))
        out = func(*inner[0], **inner[1])
        if func._schema.is_mutable:
            return args[0]
        stays = bool(lists_of(args)) if target is None else torch.device(target) == DEVICE
        return tree_map_only(torch.Tensor, self.place, out) if stays else out


def lists_of(args: Any) -> list["OnDevice"]:
    """Return the tensors of the device among arguments, those in lists included."""
    found: list[OnDevice] = []
    tree_map_only(OnDevice, found.append, args)
    return found


class OnDevice(torch.Tensor):
    """Tensor of the device.

    Threads that are not inside the mode reach its values through this class too, and no other way.
    """

    held: torch.Tensor
    device_of: Device

    @staticmethod
    def __new__(cls, values: torch.Tensor, device_of: Device) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.held = values
        made.device_of = device_of
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it as a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return lists_of((args, kwargs))[0].device_of.run(func, args, kwargs or {})
