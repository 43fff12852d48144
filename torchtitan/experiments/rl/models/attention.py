"""Attention over rows of prefix trees, also on CPU and on ranks that divide a row.

A row holds trees, each in depth-first order: a token, then everything that descends from it. The
position (depth) of each token is therefore enough to tell the whole tree. Here samples P A, P B and
P B' share P, and the last two share more::

    tokens      p0 p1 p2  a3 a4   b3 b4 b5   c5
    positions    0  1  2   3  4    3  4  5    5
    parents      -  0  1   2  3    2  5  6    6       column of the token before it
    ends         9  9  9   5  5    9  9  8    9       column after its last descendant

A token sees itself and its ancestors: the token in column c sees the columns k <= c with
c < ends[k]. A row of whole samples is the case without branches.

torchtitan has no attention kernel for CPU, so `CPUVarlenAttention` cuts the rows into blocks of
query tokens. A trunk is the beginning of a tree, up to its first branch; a sample that shares
nothing is a trunk alone. A trunk needs causal attention to itself. The rest of a tree is cut into
blocks of at most BRANCH_TOKENS. The keys of a block are the ancestors of its first token and the
block's own tokens: no token of the block has any other ancestor::

    tokens   p0 p1 p2 a3 a4 | b3 b4 b5 c5      trunk: p0 p1 p2 a3 a4
                                               block: b3 b4 b5 c5
                                                      keys p0 p1 p2 + b3 b4 b5 c5 under a mask

Blocks of similar size are padded to one batch and attended to in one call.
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
    """Return the column of the token before each token in its sample, int64 [B, L].

    In depth-first order, that is the last earlier column whose position is less by one. The value
    is meaningless where the position is 0.
    """
    length = positions_BL.shape[1]
    columns_L = torch.arange(length, device=positions_BL.device)
    keys_BL = positions_BL.long() * length + columns_L
    sorted_BL = keys_BL.sort().values
    before_BL = torch.searchsorted(sorted_BL, keys_BL - length) - 1
    return sorted_BL.gather(1, before_BL.clamp(min=0)) % length


def subtree_ends(positions_BL: torch.Tensor) -> torch.Tensor:
    """Return the column after the last descendant of each token, int64 [B, L].

    It is the next column that lies no deeper than the token.
    """
    rows, length = positions_BL.shape
    # lowest[j] holds, for each column, the least position among the 2**j columns from there on.
    # Beyond the end of a row every position is -1.
    steps = max(length - 1, 1).bit_length()
    beyond = positions_BL.new_full((rows, 2**steps), -1)
    lowest = [torch.cat([positions_BL, beyond], 1)]
    for step in range(steps - 1):
        shifted = torch.cat([lowest[-1][:, 2**step :], beyond[:, : 2**step]], 1)
        lowest.append(torch.minimum(lowest[-1], shifted))

    # Binary search: jump over 2**step columns wherever all of them lie deeper.
    ends_BL = torch.arange(1, length + 1, device=positions_BL.device).repeat(rows, 1)
    for step in reversed(range(steps)):
        deeper = lowest[step].gather(1, ends_BL) > positions_BL
        ends_BL = ends_BL + deeper * 2**step
    return ends_BL


def tree_mask(positions_BL: torch.Tensor, window: int | None = None) -> Callable[..., torch.Tensor]:
    """Return the ``mask_mod`` of flex attention that shows each query itself and its ancestors.

    Args:
        positions_BL: place of each token in its sample.
        window: number of tokens that a query sees at most, itself included. None for all.
    """
    ends_BL = subtree_ends(positions_BL)

    def sees(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        return (kv_idx <= q_idx) & (q_idx < ends_BL[b, kv_idx])

    if window is None:
        return sees

    def sees_in_window(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        distance = positions_BL[b, q_idx] - positions_BL[b, kv_idx]
        return sees(b, h, q_idx, kv_idx) & (distance < window)

    return sees_in_window


_LARGE_BLOCKS_BYTES = 160 * 2**10
"""Shared memory that a GPU needs for torch's own choice of flex attention's blocks, where heads
have more than 128 numbers of 16 bits. On capability 8.0 these take 152,576 bytes."""

LARGEST_HEADS = 256
"""Size of heads up to which a GPU has the shared memory for flex attention's kernels."""

SMALL_BLOCKS = {
    "fwd_BLOCK_M": 32,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 32,
    "bwd_BLOCK_M2": 32,
    "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1,
}
"""Options of flex attention with which heads of 256 take 87,040 bytes of shared memory forward and
65,536 backward. Forward they are torch's own choice for capability 12.0. Backward, blocks of 64
take 114,688 bytes; those of 32 by 64 take 98,304, and spill eight times as many registers."""


def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a block of a GPU may have; None if it is no GPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch declares less than it has
    return int(properties.shared_memory_per_block_optin)


def needs_small_blocks(head_dim: int, available: int | None) -> bool:
    """Return whether torch's own choice of flex attention's blocks would not fit a GPU.

    torch chooses by capability, and gives GPUs of 8.6 and 8.9 the blocks of an A100, which has more
    shared memory; those for 12.0 do not fit backward. ``python -m tests.flex_kernels`` compiles the
    kernels for each GPU.

    Args:
        head_dim: size of a query's and a key's heads, in numbers of 16 bits.
        available: the GPU's `shared_memory`.
    """
    return head_dim > 128 and available is not None and available < _LARGE_BLOCKS_BYTES


BRANCH_TOKENS = 64
"""Maximum number of query tokens in a block of branches.

A block has one set of keys for all its tokens. A long block computes more scores that the mask then
hides; short blocks gather more keys. On one core, 32 to 128 differ by less than a tenth."""


class Branches(NamedTuple):
    """Blocks of branches of similar size, padded to one batch.

    Padding repeats the last token of a block. The mask hides padded keys.
    """

    queries: torch.Tensor
    """Query tokens of each block, int64 [blocks, queries]: indices into the flattened rows."""
    keys: torch.Tensor
    """Key tokens of each block, int64 [blocks, keys]: indices into the flattened rows."""
    mask: torch.Tensor
    """Visibility, bool [blocks, 1, queries, keys]: True where the query sees the key."""

    @classmethod
    def of(
        cls, queries: torch.Tensor, keys: Sequence[np.ndarray], ends_T: torch.Tensor
    ) -> "Branches":
        """Pad the blocks' keys and build their mask.

        Args:
            queries: int64 [blocks, queries].
            keys: the keys of each block, int64 [keys of the block].
            ends_T: int64 [B * L], the end of each token's subtree as an index into the flattened
                rows.
        """
        lengths = torch.tensor([len(block_keys) for block_keys in keys])[:, None]
        longest = int(lengths.max())
        padded = torch.from_numpy(
            np.stack(
                [np.pad(block_keys, (0, longest - len(block_keys)), "edge") for block_keys in keys]
            )
        )
        q = queries[:, :, None]
        k = padded[:, None]
        is_ancestor = (k <= q) & (q < ends_T[k])
        is_real = (torch.arange(longest) < lengths)[:, None]
        return cls(queries=queries, keys=padded, mask=(is_ancestor & is_real)[:, None])


class BranchBlock(NamedTuple):
    """A stretch of query tokens off the trunk of their tree, and the tokens that they may see."""

    start: int
    """Index of the first query token in the flattened rows."""
    stop: int
    """Index after the last query token."""
    keys: np.ndarray
    """Ancestors of the first query token, then the query tokens, int64 [keys]: indices into the
    flattened rows."""


class PackedDocuments(NamedTuple):
    """The blocks of a [B, L] batch, grouped by size. T is B * L, the number of flattened tokens."""

    gather: tuple[torch.Tensor, ...]
    """Trunks, one int64 [trunks, longest] a group: indices into the flattened rows. Padding repeats
    the last token of a trunk."""
    branches: tuple[Branches, ...]
    """Blocks of branches, one record a group."""
    restore_T: torch.Tensor
    """Place of each token's output among the concatenated, flattened groups, trunks first. int64
    [T]."""
    positions_T: torch.Tensor
    """Place of each token in its sample."""

    def blocks(
        self, window: int | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield queries, keys and mask of each group, trunks first.

        A mask is bool, broadcast to [blocks, heads, queries, keys]; None stands for causal
        attention of the keys to themselves.

        Args:
            window: number of tokens that a query sees at most, itself included. None for all.
        """
        for index in self.gather:
            length = index.shape[1]
            mask = None
            if window is not None and window < length:
                columns = torch.arange(length)
                distance = columns[:, None] - columns
                mask = (distance >= 0) & (distance < window)
            yield index, index, mask
        for queries, keys, mask in self.branches:
            if window is not None:
                q = self.positions_T[queries][:, None, :, None]
                k = self.positions_T[keys][:, None, None]
                mask = mask & (q - k < window)
            yield queries, keys, mask

    @classmethod
    def of(cls, positions_BL: torch.Tensor) -> "PackedDocuments":
        """Cut the rows into trunks and branches, and group these by size."""
        positions_T = positions_BL.flatten()
        # A run is a stretch of tokens that follow each other in a sample; a trunk is the first run
        # of a tree.
        is_start_T = positions_T.diff(prepend=positions_T.new_tensor([-2])) != 1
        starts_R = is_start_T.nonzero().squeeze(-1)
        ends_R = torch.cat([starts_R[1:], starts_R.new_tensor([positions_T.numel()])])
        is_trunk_R = positions_T[starts_R] == 0

        gather = []
        branches = []
        groups = []
        starts_D = starts_R[is_trunk_R]
        lengths_D = (ends_R - starts_R)[is_trunk_R]
        for group_D in _groups_of_similar_size(lengths_D[:, None]):
            index, is_real = _token_indices(starts_D[group_D], lengths_D[group_D])
            gather.append(index)
            groups.append((index, is_real))

        if not is_trunk_R.all():
            row_starts_B = torch.arange(0, positions_T.numel(), positions_BL.shape[1])
            ends_T = (subtree_ends(positions_BL) + row_starts_B[:, None]).flatten()
            blocks = _branch_blocks(positions_T.tolist(), starts_R.tolist(), ends_R.tolist())
            sizes = torch.tensor([(block.stop - block.start, len(block.keys)) for block in blocks])
            for group in _groups_of_similar_size(sizes):
                members = [blocks[number] for number in group.tolist()]
                starts = torch.tensor([block.start for block in members])
                queries, is_real = _token_indices(starts, sizes[group, 0])
                branches.append(Branches.of(queries, [block.keys for block in members], ends_T))
                groups.append((queries, is_real))

        return cls(
            gather=tuple(gather),
            branches=tuple(branches),
            restore_T=_indices_in_groups(groups, positions_T.numel()),
            positions_T=positions_T,
        )


def _indices_in_groups(
    groups: list[tuple[torch.Tensor, torch.Tensor]], tokens: int
) -> torch.Tensor:
    """Return the index of each token among the concatenated, flattened groups, int64 [tokens].

    Args:
        groups: for each group, the indices of its tokens and which of them are no padding, both
            [blocks, longest].
        tokens: number of tokens in the batch.
    """
    indices_T = torch.empty(tokens, dtype=torch.long)
    base = 0
    for index, is_real in groups:
        indices_T[index[is_real]] = base + is_real.flatten().nonzero().squeeze(-1)
        base += index.numel()
    return indices_T


def _groups_of_similar_size(sizes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the indices of blocks whose sizes differ by less than a factor of two.

    At most half of each side of a padded batch is padding then.

    Args:
        sizes: int [blocks, n], n sizes of each block.
    """
    _, group = torch.log2(sizes.double()).ceil().unique(dim=0, return_inverse=True)
    for number in range(int(group.max()) + 1):
        yield (group == number).nonzero().squeeze(-1)


def _token_indices(
    starts_D: torch.Tensor, lengths_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of each block's tokens, and which of these are no padding.

    Returns:
        indices, int64 [blocks, longest], padded with the block's last token; and bool [blocks,
        longest].
    """
    offsets = torch.arange(int(lengths_D.max()))
    lengths_D1 = lengths_D[:, None]
    indices = starts_D[:, None] + torch.minimum(offsets, lengths_D1 - 1)
    return indices, offsets < lengths_D1


def _branch_blocks(positions: list[int], starts: list[int], ends: list[int]) -> list[BranchBlock]:
    """Cut everything but the trunks into blocks of nearly equal size, tree by tree.

    Args:
        positions: position of each token of the flattened rows.
        starts: index of the first token of each run.
        ends: index after the last token of each run.
    """
    blocks = []
    # The last token seen at each position: its first n entries are the ancestors of a token of
    # position n.
    path = np.empty(len(positions), np.int64)
    roots = [run for run, start in enumerate(starts) if positions[start] == 0]
    for root, next_root in zip(roots, [*roots[1:], len(starts)], strict=True):
        first = ends[root]
        last = ends[next_root - 1]
        count = -(-(last - first) // BRANCH_TOKENS)
        cuts = [first + (last - first) * block // max(count, 1) for block in range(count + 1)]
        run = root
        for start, stop in zip(cuts, cuts[1:], strict=False):
            while run < next_root and starts[run] < start:
                depth = positions[starts[run]]
                path[depth : depth + ends[run] - starts[run]] = np.arange(starts[run], ends[run])
                run += 1
            keys = np.concatenate([path[: positions[start]], np.arange(start, stop)])
            blocks.append(BranchBlock(start=start, stop=stop, keys=keys))
    return blocks


class CPUPackedMetadata(VarlenMetadata):
    """torchtitan's metadata of packed rows, and beside it our blocks.

    It is made once a batch, and every layer uses it.
    """

    documents: PackedDocuments


def packed_metadata(positions_BL: torch.Tensor) -> CPUPackedMetadata:
    """Return the metadata that `CPUVarlenAttention` takes for rows with these positions."""
    empty = positions_BL.new_empty(0)
    metadata = CPUPackedMetadata(cu_seq_q=empty, cu_seq_k=empty, max_q=0, max_k=0)
    metadata.documents = PackedDocuments.of(positions_BL)
    return metadata


class CPUVarlenAttention(VarlenAttention):
    """torchtitan's attention over packed rows, computed on CPU block by block."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config):
        # VarlenAttention's own __init__ asks which GPU this process sees, and imports the flash
        # attention of that GPU.
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
        """Attend from each token to itself and its ancestors.

        Queries, keys, values and the result are [B, L, heads, head_dim], as in torchtitan.
        """
        assert isinstance(attention_masks, CPUPackedMetadata)
        attend = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
        return attend_blocks(attend, q_BLNH, k_BLNH, v_BLNH, attention_masks.documents)


def attend_blocks(
    attend: Callable[..., torch.Tensor],
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    documents: PackedDocuments,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from each token to itself and its ancestors, block by block.

    Queries, keys and values are [B, L, heads, head_dim]; values may have another size of head, and
    the result has theirs.

    Args:
        attend: computes a batch of blocks, each [blocks, heads, tokens, head_dim], as
            ``F.scaled_dot_product_attention`` does, of which it takes ``attn_mask`` and
            ``is_causal``.
        documents: the blocks of the rows.
        window: number of tokens that a query sees at most, itself included. None for all.
    """
    q_TNH, k_TNH, v_TNH = (t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH))
    outputs = []
    for queries, keys, mask in documents.blocks(window):
        out = attend(
            _take(q_TNH, queries),
            _take(k_TNH, keys),
            _take(v_TNH, keys),
            attn_mask=mask,
            is_causal=mask is None,
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    restored_TNH = torch.cat(outputs).index_select(0, documents.restore_T)
    return restored_TNH.unflatten(0, q_BLNH.shape[:2])


def _take(t_TNH: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the tokens at ``index`` [blocks, tokens] as [blocks, heads, tokens, head_dim].

    ``t_TNH[index]`` would give the same values, but its backward pass takes three times as long.
    """
    return t_TNH.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def rank_columns(length: int, context: DeviceMesh) -> slice:
    """Return the columns that this rank computes of a row that the ranks of ``context`` divide."""
    share = length // context.size()
    return slice(context.get_local_rank() * share, (context.get_local_rank() + 1) * share)


def sum_over_ranks(values: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """Return the sum of the ranks' values. All ranks must compute the same loss from it.

    Each rank's gradient is then the gradient of the sum, and need not be reduced.
    """
    # The result of full_tensor is a view, and FSDP warns where its module returns a view.
    return DTensor.from_local(values, context, [Partial()]).full_tensor().clone()


def divide_attention(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
    context: DeviceMesh,
) -> None:
    """Have the ranks of ``context`` divide each row by tokens, and its attention by heads.

    Between attentions a rank has some of the tokens, with all heads; in attention it has all
    tokens, with some of the heads. With two ranks, two heads and a row of four tokens::

        rank 0     t0 t1 x h0 h1     all-to-all     t0 t1 t2 t3 x h0     attention, all-to-all back
        rank 1     t2 t3 x h0 h1                    t0 t1 t2 t3 x h1

    Attention therefore sees whole rows, and packed samples and prefix trees need nothing new. All
    ranks have the same rows; each computes the log-probabilities of the tokens whose predecessor it
    holds. Call this before the model is wrapped.
    """
    for block in model.layers.values():
        inner = block.attention.inner_attention
        inner.forward = partial(_attend_by_heads, inner.forward, context.get_group())


def _attend_by_heads(
    attend: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **options: Any,  # noqa: ANN401 - those of the attention
) -> torch.Tensor:
    """Call ``attend`` on whole rows with this rank's heads.

    Queries, keys, values and the result are this rank's tokens, [B, L / ranks, heads, head_dim].
    """
    q, k, v = (Exchange.apply(values, group, 2, 1) for values in (q, k, v))
    return Exchange.apply(attend(q, k, v, **options), group, 1, 2)


class Exchange(torch.autograd.Function):
    """All-to-all that divides one dimension among the ranks and joins their shares of another.

    DTensor's own has every rank gather the whole tensor on gloo, and warns of it.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - autograd's
        values: torch.Tensor,
        group: dist.ProcessGroup,
        divide: int,
        join: int,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.divide = divide
        ctx.join = join
        sent = torch.stack(values.chunk(dist.get_world_size(group), divide))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: ANN401 - autograd's
        return Exchange.apply(grad, ctx.group, ctx.join, ctx.divide), None, None, None
