"""The models of torchtitan 0.3.0: hidden states, and hub names of weights that ranks share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.models.common.attention import AttentionMasksType, FusedQKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter


class HiddenStateDecoder(Decoder):
    """Mixin that gives a torchtitan decoder a forward pass without the output head.

    ``Decoder._skip_lm_head`` is private: torchtitan sets it itself, for its chunked loss. There is
    no public way to the hidden states that works for every decoder.
    """

    _skip_lm_head = True

    def hidden_states(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention_masks: AttentionMasksType | None,
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [B, L, dim].

        Arguments are those of torchtitan's ``Decoder.forward``.
        """
        return super().forward(tokens, positions, attention_masks)


class ShardedLlama3Adapter(Llama3StateDictAdapter):
    """Llama3StateDictAdapter for any number of ranks.

    ``_permute`` and ``_reverse_permute`` are private. They view a query or key weight as [heads,
    ...]. On a weight that ranks share (torch 2.13) the view raises if the ranks do not divide the
    heads, and with fewer heads than ranks it mixes rows up without an error. Such a weight is
    gathered before the view, and sharded again after it.
    """

    def _permute(self, w: torch.Tensor, heads: int, *sizes: int) -> torch.Tensor:
        return _on_whole_heads(super()._permute, w, heads, *sizes)

    def _reverse_permute(self, w: torch.Tensor, heads: int, *sizes: int) -> torch.Tensor:
        return _on_whole_heads(super()._reverse_permute, w, heads, *sizes)


def _on_whole_heads(
    permute: Callable[..., Any], weight: torch.Tensor, heads: int, *sizes: int
) -> torch.Tensor:
    """Permute a weight so that no head is divided over ranks, and keep its placements."""
    if not isinstance(weight, DTensor):
        return permute(weight, heads, *sizes)
    mesh = weight.device_mesh
    placements = weight.placements
    shards = math.prod(
        mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )
    if heads % shards == 0:
        return permute(weight, heads, *sizes)
    whole = weight.redistribute(placements=[Replicate()] * mesh.ndim)
    return permute(whole, heads, *sizes).redistribute(placements=placements)


def split_of_fused(
    module: nn.Module, state: dict[str, torch.Tensor], *, prefix: str
) -> dict[str, torch.Tensor]:
    """Return ``state`` with a fused query, key and value taken apart as in the module's state dict.

    ``FusedQKVLinear._split_qkv_on_save`` is private: torchtitan calls it when it makes a whole
    state dict.

    Args:
        module: module that the tensors are of.
        state: tensors by name.
        prefix: beginning of the names, up to the module's own.
    """
    if isinstance(module, FusedQKVLinear):
        module._split_qkv_on_save(module, state, prefix, {})
    return state
