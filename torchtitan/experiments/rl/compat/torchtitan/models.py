"""The models of torchtitan 0.3.0."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.models.common.attention import AttentionMasksType, FusedQKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter


class HiddenStateDecoder(Decoder):
    """Mixin for a torchtitan decoder: ``hidden_states`` is its forward pass without the output head.

    ``Decoder._skip_lm_head`` is private: torchtitan sets it itself, for its chunked loss. There is no public way to the hidden
    states that works for every decoder.
    """

    _skip_lm_head = True

    def hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: AttentionMasksType | None,
    ) -> torch.Tensor:
        """[B, L, dim], after the last norm. Arguments as of torchtitan's ``Decoder.forward``."""
        return super().forward(tokens, positions, attention_masks)


class ShardedLlama3Adapter(Llama3StateDictAdapter):
    """Llama3StateDictAdapter for any number of ranks.

    ``_permute`` and ``_reverse_permute`` are private. They view a query or key weight as [heads, ...]. On a weight that ranks
    share (torch 2.13), that raises where the ranks do not divide the heads, and with fewer heads than ranks it mixes rows up
    without an error. Such a weight is gathered before, and sharded again after.
    """

    def _permute(self, w: torch.Tensor, *args: Any) -> torch.Tensor:
        return _on_whole_heads(super()._permute, w, *args)

    def _reverse_permute(self, w: torch.Tensor, *args: Any) -> torch.Tensor:
        return _on_whole_heads(super()._reverse_permute, w, *args)


def _on_whole_heads(
    permute: Callable[..., Any], weight: torch.Tensor, heads: int, *sizes: int
) -> torch.Tensor:
    if not isinstance(weight, DTensor):
        return permute(weight, heads, *sizes)
    mesh, placements = weight.device_mesh, weight.placements
    shards = math.prod(
        mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )
    if heads % shards == 0:
        return permute(weight, heads, *sizes)
    whole = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    return permute(whole, heads, *sizes).redistribute(placements=placements)


def split_of_fused(
    module: Any, state: dict[str, torch.Tensor], *, prefix: str
) -> dict[str, torch.Tensor]:
    """``state`` of a module, with a fused query, key and value taken apart as in its state dict.

    ``FusedQKVLinear._split_qkv_on_save`` is private: torchtitan calls it when a whole state dict is made.
    """
    if isinstance(module, FusedQKVLinear):
        module._split_qkv_on_save(module, state, prefix, {})
    return state
