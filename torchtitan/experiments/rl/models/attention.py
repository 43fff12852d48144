"""Who sees whom in a row of prefix trees, attention over such rows on CPU, where torchtitan has no kernel for it, and attention
of ranks that divide a row (``divide_attention``).

A row holds trees, each in depth-first order: a token, then all that descends from it. So a position (depth) of each token is
enough to tell the whole tree. Samples P A, P B and P B' that share P, of which the last two share more::

    tokens      p0 p1 p2  a3 a4   b3 b4 b5   c5
    positions    0  1  2   3  4    3  4  5    5
    parents      -  0  1   2  3    2  5  6    6       column of the token before it
    ends         9  9  9   5  5    9  9  8    9       column after its last descendant

A token sees itself and its ancestors: columns k up to its own, c, with c < ends[k]. Rows of whole samples are the case without
branches.

On CPU the rows are cut into blocks of query tokens. A trunk is what a tree begins with, up to its first branch: all of a sample
that shares nothing. It needs causal attention to itself. The rest of a tree is cut into blocks of at most BRANCH_TOKENS. The
keys of a block are the ancestors of its first token, and its own tokens: none of them has any other ancestor::

    tokens   p0 p1 p2 a3 a4 | b3 b4 b5 c5        trunk: p0 p1 p2 a3 a4
                                                 block: b3 b4 b5 c5, keys p0 p1 p2 + b3 b4 b5 c5 under a mask

Blocks of similar size are padded to one batch and attended in one call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module


def parent_columns(positions_BL: torch.Tensor) -> torch.Tensor:
    """int64 [B, L]: column of the token before each token in its sample. Meaningless where the position is 0.

    Depth-first, that is the last earlier column whose position is less by one.
    """
    length = positions_BL.shape[1]
    columns_L = torch.arange(length, device=positions_BL.device)
    keys_BL = positions_BL.long() * length + columns_L
    sorted_BL = keys_BL.sort().values
    before_BL = torch.searchsorted(sorted_BL, keys_BL - length) - 1
    return sorted_BL.gather(1, before_BL.clamp(min=0)) % length


def subtree_ends(positions_BL: torch.Tensor) -> torch.Tensor:
    """int64 [B, L]: column after the last descendant of each token, which is the next column that lies no deeper."""
    rows, length = positions_BL.shape
    # lowest[j] holds, for each column, the least position of the 2**j columns from there on; beyond a row lies the end.
    steps = max(length - 1, 1).bit_length()
    beyond = positions_BL.new_full((rows, 2**steps), -1)
    lowest = [torch.cat([positions_BL, beyond], 1)]
    for step in range(steps - 1):
        shifted = torch.cat([lowest[-1][:, 2**step :], beyond[:, : 2**step]], 1)
        lowest.append(torch.minimum(lowest[-1], shifted))
    ends_BL = torch.arange(1, length + 1, device=positions_BL.device).repeat(rows, 1)
    for step in reversed(range(steps)):
        deeper = lowest[step].gather(1, ends_BL) > positions_BL
        ends_BL = ends_BL + deeper * 2**step
    return ends_BL


def tree_mask(positions_BL: torch.Tensor) -> Callable[..., torch.Tensor]:
    """``mask_mod`` of flex attention: which key a query sees."""
    ends_BL = subtree_ends(positions_BL)

    def sees(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return (kv_idx <= q_idx) & (q_idx < ends_BL[b, kv_idx])

    return sees


BRANCH_TOKENS = 64
"""A block has one set of keys for all its tokens, so a long one computes more that the mask hides; short ones gather more keys.
On one core 32 to 128 differ by less than a tenth."""


class Branches(NamedTuple):
    """Blocks of similar size. Padding repeats a block's last token; padded keys are hidden."""

    queries: torch.Tensor
    """int64 [blocks, queries]: index into the flattened tokens."""
    keys: torch.Tensor
    """int64 [blocks, keys]."""
    mask: torch.Tensor
    """bool [blocks, 1, queries, keys]: True where the query sees the key."""

    @classmethod
    def of(
        cls, queries: torch.Tensor, keys: Sequence[np.ndarray], ends_T: torch.Tensor
    ) -> "Branches":
        """From the keys of each block, and for each token of the batch the end of its subtree."""
        lengths = torch.tensor([len(own) for own in keys])[:, None]
        longest = int(lengths.max())
        padded = torch.from_numpy(
            np.stack([np.pad(own, (0, longest - len(own)), "edge") for own in keys])
        )
        q, k = queries[:, :, None], padded[:, None]
        mask = (k <= q) & (q < ends_T[k]) & (torch.arange(longest) < lengths)[:, None]
        return cls(queries=queries, keys=padded, mask=mask[:, None])


class PackedDocuments(NamedTuple):
    """Where the blocks of a [B, L] batch lie, grouped by size."""

    gather: tuple[torch.Tensor, ...]
    """Trunks: one int64 [trunks, longest] a group, an index into the flattened tokens; padding repeats a trunk's last token."""
    branches: tuple[Branches, ...]
    restore_T: torch.Tensor
    """int64 [B * L]: where each token's output lies in the concatenated, flattened groups, trunks first."""

    @classmethod
    def of(cls, positions_BL: torch.Tensor) -> "PackedDocuments":
        positions_T = positions_BL.flatten()
        # A run is a stretch of tokens that follow each other in a sample; a trunk is the first run of a tree.
        starts_R = (
            (positions_T.diff(prepend=positions_T.new_tensor([-2])) != 1).nonzero().squeeze(-1)
        )
        ends_R = torch.cat([starts_R[1:], starts_R.new_tensor([positions_T.numel()])])
        roots_R = positions_T[starts_R] == 0
        starts_D, lengths_D = starts_R[roots_R], (ends_R - starts_R)[roots_R]
        gather, branches, places = [], [], []
        for group_D in _alike(lengths_D[:, None]):
            index, real = _tokens(starts_D[group_D], lengths_D[group_D])
            gather.append(index)
            places.append((index, real))
        if not roots_R.all():
            row_starts_B = torch.arange(0, positions_T.numel(), positions_BL.shape[1])
            ends_T = (subtree_ends(positions_BL) + row_starts_B[:, None]).flatten()
            blocks = _branch_blocks(positions_T.tolist(), starts_R.tolist(), ends_R.tolist())
            sizes = torch.tensor([(end - start, len(keys)) for start, end, keys in blocks])
            for group in _alike(sizes):
                starts, _, keys = zip(*(blocks[block] for block in group.tolist()), strict=True)
                queries, real = _tokens(torch.tensor(starts), sizes[group, 0])
                branches.append(Branches.of(queries, keys, ends_T))
                places.append((queries, real))
        restore_T, base = torch.empty(positions_T.numel(), dtype=torch.long), 0
        for index, real in places:
            restore_T[index[real]] = base + real.flatten().nonzero().squeeze(-1)
            base += index.numel()
        return cls(gather=tuple(gather), branches=tuple(branches), restore_T=restore_T)


def _alike(sizes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Groups of indices into int [blocks, n] sizes: within a factor of two, so that at most half of a side is padding."""
    _, group = torch.log2(sizes.double()).ceil().unique(dim=0, return_inverse=True)
    for number in range(int(group.max()) + 1):
        yield (group == number).nonzero().squeeze(-1)


def _tokens(starts_D: torch.Tensor, lengths_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of each block's tokens, padded with the last, and bool: which are no padding. Both [blocks, longest]."""
    offsets = torch.arange(int(lengths_D.max()))
    return starts_D[:, None] + torch.minimum(offsets, lengths_D[:, None] - 1), offsets < lengths_D[
        :, None
    ]


def _branch_blocks(
    positions: list[int], starts: list[int], ends: list[int]
) -> list[tuple[int, int, np.ndarray]]:
    """Start, end and keys of each block, from the position of each token, and start and end of each run."""
    blocks = []
    path = np.empty(len(positions), np.int64)  # the last token seen at each position
    roots = [run for run, start in enumerate(starts) if positions[start] == 0]
    for root, next_root in zip(roots, [*roots[1:], len(starts)], strict=True):
        first, last = ends[root], ends[next_root - 1]
        count = -(-(last - first) // BRANCH_TOKENS)
        cuts = [first + (last - first) * block // max(count, 1) for block in range(count + 1)]
        run = root
        for start, end in zip(cuts, cuts[1:], strict=False):
            while run < next_root and starts[run] < start:
                depth = positions[starts[run]]
                path[depth : depth + ends[run] - starts[run]] = np.arange(starts[run], ends[run])
                run += 1
            blocks.append(
                (start, end, np.concatenate([path[: positions[start]], np.arange(start, end)]))
            )
    return blocks


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

    def __init__(self, config: Config):
        # torchtitan's asks which GPU this process sees, and imports that one's flash attention.
        Module.__init__(self)
        self.window_size = config.window_size

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
        """Attention of each token to itself and its ancestors. Shapes as in torchtitan: [B, L, heads, head_dim]."""
        assert isinstance(attention_masks, CPUPackedMetadata)
        documents = attention_masks.documents
        q_TNH, k_TNH, v_TNH = (t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH))
        blocks = [(index, index, None) for index in documents.gather] + list(documents.branches)
        outputs = []
        for queries, keys, mask in blocks:
            q, k, v = (
                _take(t, index) for t, index in ((q_TNH, queries), (k_TNH, keys), (v_TNH, keys))
            )
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, documents.restore_T).view_as(q_BLNH)


def _take(t_TNH: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, tokens, head_dim]. As ``t_TNH[index]``, whose backward pass takes three times as long."""
    return t_TNH.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def own_part(length: int, context: DeviceMesh) -> slice:
    """This rank's columns of a row whose length the ranks of ``context`` divide."""
    own = length // context.size()
    return slice(context.get_local_rank() * own, (context.get_local_rank() + 1) * own)


def summed(values: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """Over the ranks. All of them go on alike with it, so the gradient of each is the whole."""
    # full_tensor's result is a view, and FSDP warns where its module returns one.
    return DTensor.from_local(values, context, [Partial()]).full_tensor().clone()


def divide_attention(model: Any, context: DeviceMesh) -> None:
    """Context parallelism by heads: each rank of ``context`` has a part of a row's tokens, and attention a part of the heads.

    Between attentions a rank has a part of the tokens, with all heads; in attention all tokens, with a part of the heads. Two
    ranks, two heads, a row of four tokens::

        rank 0     t0 t1 x h0 h1     all-to-all     t0 t1 t2 t3 x h0     attention, all-to-all back
        rank 1     t2 t3 x h0 h1                    t0 t1 t2 t3 x h1

    So attention sees whole rows, and packed samples and prefix trees need nothing new. The ranks have the same rows, and each
    computes the log-probabilities of those tokens whose predecessor is its own. Called before the model is wrapped.
    """
    for block in model.layers.values():
        inner = block.attention.inner_attention
        inner.forward = partial(_by_heads, inner.forward, context.get_group())


def _by_heads(
    attend: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """[B, part of L, heads, head_dim] as ``attend`` makes it of whole rows."""
    q, k, v = (_Exchange.apply(values, group, 2, 1) for values in (q, k, v))
    return _Exchange.apply(attend(q, k, v, **options), group, 1, 2)


class _Exchange(torch.autograd.Function):
    """Divide one dimension among the ranks, and put another one together from their parts.

    DTensor's own has every rank gather the whole on gloo, and warns of it.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, divide: int, join: int
    ) -> torch.Tensor:
        ctx.group, ctx.divide, ctx.join = group, divide, join
        sent = torch.stack(values.chunk(dist.get_world_size(group), divide))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group, ctx.join, ctx.divide), None, None, None
