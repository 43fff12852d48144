"""Attention over packed rows on CPU, where torchtitan has no kernel for it.

Documents of similar length are padded to one batch and attended in one call. Padding lies after a document's tokens, so the
causal mask alone keeps it from them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata


class PackedDocuments(NamedTuple):
    """Where the documents of a [B, L] batch lie, grouped by length."""

    gather: tuple[torch.Tensor, ...]
    """One int64 [documents, longest] a group: index into the flattened tokens; padding repeats the document's last token."""
    restore_T: torch.Tensor
    """int64 [B * L]: where each token's output lies in the concatenated, flattened groups."""

    @classmethod
    def of(cls, positions_BL: torch.Tensor) -> "PackedDocuments":
        starts_D = (positions_BL.flatten() == 0).nonzero().squeeze(-1)
        ends_D = torch.cat([starts_D[1:], starts_D.new_tensor([positions_BL.numel()])])
        lengths_D = ends_D - starts_D
        # Lengths within a factor of two share a batch: at most half of it is padding.
        groups_D = torch.log2(lengths_D.double()).ceil().long()
        gather, restore_T, base = [], torch.empty(positions_BL.numel(), dtype=torch.long), 0
        for group in groups_D.unique().tolist():
            starts, lengths = starts_D[groups_D == group], lengths_D[groups_D == group]
            offsets = torch.arange(int(lengths.max()))
            index = starts[:, None] + torch.minimum(offsets[None], lengths[:, None] - 1)
            gather.append(index)
            real = offsets[None] < lengths[:, None]
            restore_T[index[real]] = base + real.flatten().nonzero().squeeze(-1)
            base += index.numel()
        return cls(gather=tuple(gather), restore_T=restore_T)


class CPUPackedMetadata(VarlenMetadata):
    """torchtitan's metadata type with our grouping beside it, made once a batch and used by every layer."""

    documents: PackedDocuments


def packed_metadata(positions_BL: torch.Tensor) -> CPUPackedMetadata:
    empty = positions_BL.new_empty(0)
    metadata = CPUPackedMetadata(cu_seq_q=empty, cu_seq_k=empty, max_q=0, max_k=0)
    metadata.documents = PackedDocuments.of(positions_BL)
    return metadata


class CPUVarlenAttention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        """Causal attention of each document to itself. Shapes as in torchtitan: [B, L, heads, head_dim]."""
        assert isinstance(attention_masks, CPUPackedMetadata)
        q_TNH, k_TNH, v_TNH = (t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH))
        outputs = []
        for index in attention_masks.documents.gather:
            q, k, v = (t[index].transpose(1, 2) for t in (q_TNH, k_TNH, v_TNH))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[attention_masks.documents.restore_T].view_as(q_BLNH)
