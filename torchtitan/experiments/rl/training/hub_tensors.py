"""A model's parameters by their hub names, made a part at a time."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


class HubTensors(Mapping[str, torch.Tensor]):
    """Sharded parameters are DTensors; a tied head is its embedding and not named again.

    A part is the embedding, a layer, the last norm or the head. torchtitan gathers the fused queries, keys and values of what
    it converts: of one layer here, where a whole state dict holds those of all layers at once. Every rank reads it in order.
    """

    def __init__(self, model: Any, to_hub: Callable[[dict[str, Any]], dict[str, Any]]):
        layers = {f"layers.{name}.": layer for name, layer in model.layers.named_children()}
        others = {f"{name}.": child for name, child in model.named_children() if name != "layers"}
        self._parts = {"tok_embeddings.": others.pop("tok_embeddings."), **layers, **others}
        self._to_hub = to_hub
        self._part_of = {name: prefix for prefix in self._parts for name in self._convert(prefix)}
        self._current, self._tensors = "", dict[str, torch.Tensor]()

    def fresh(self) -> "HubTensors":
        """The same, with the parameters' values as they will be when it is read."""
        self._current, self._tensors = "", {}
        return self

    def _convert(self, prefix: str) -> dict[str, torch.Tensor]:
        return self._to_hub(self._parts[prefix].state_dict(prefix=prefix))

    def __getitem__(self, name: str) -> torch.Tensor:
        if (prefix := self._part_of[name]) != self._current:
            self._current, self._tensors = "", {}  # before the next part is there
            self._current, self._tensors = prefix, self._convert(prefix)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)
