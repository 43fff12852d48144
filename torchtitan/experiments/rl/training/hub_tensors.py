"""The policy's weights by the names of a hub folder, as they are published to the generators."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torchtitan.experiments.rl.models.lora import Adapters
from torchtitan.experiments.rl.weights.snapshot import stack_name


class HubTensors:
    """A model's parameters by hub name, its experts as stacks (`weights/snapshot.py`).

    Sharded parameters are DTensors: of a stack a rank holds some experts, or rows of each. A tied
    head is the same tensor as the embedding, and has no name of its own.

    The tensors are made one piece of the model at a time: the embedding, a layer, the last norm,
    the head. To convert fused queries, keys and values, torchtitan gathers them whole on each rank.
    Piece by piece a rank holds one layer's; from a whole state dict it would hold all layers'.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
        to_hub: Callable[[dict[str, Any]], dict[str, Any]],
        adapters: Adapters | None = None,
    ):
        """Divide the model into pieces.

        Args:
            to_hub: converts a piece of torchtitan's state dict to hub names.
            adapters: adapters that are added to the weights; None to give the weights as they are.
        """
        self._pieces: dict[str, nn.Module] = model.pieces()
        """Pieces of the model, by the prefix of their names in its state dict."""
        self._to_hub = to_hub
        self._adapters = adapters
        self._stack_names: dict[str, str] = {}
        """Published name of each stack of experts, by torchtitan's name."""

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its name. Collective: every rank reads all.

        A tensor holds its values until the next one is asked for.
        """
        for prefix, piece in self._pieces.items():
            with nullcontext() if self._adapters is None else self._adapters.merged(piece):
                yield from self._items_of(prefix, piece)

    def _items_of(self, prefix: str, piece: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of one piece. What was gathered for them is freed after the last."""
        state = piece.state_dict(prefix=prefix)
        weights = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
        stacks = {name: tensor for name, tensor in weights.items() if tensor.ndim == 3}
        others = {name: tensor for name, tensor in weights.items() if tensor.ndim != 3}
        yield from self._to_hub(others).items()
        for name, stack in stacks.items():
            yield self._published_name(name, stack), stack

    def _published_name(self, name: str, stack: torch.Tensor) -> str:
        if name not in self._stack_names:
            experts = self._to_hub({name: torch.empty(stack.shape, device="meta")})
            self._stack_names[name] = stack_name(next(iter(experts)))
        return self._stack_names[name]
