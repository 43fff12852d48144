"""What the positions of a row say about its prefix trees.

A row holds trees, each in depth-first order: a token, then all that descends from it. So a position (depth) of each token is
enough to tell the whole tree. Samples P A, P B and P B' that share P, of which the last two share more::

    tokens      p0 p1 p2  a3 a4   b3 b4 b5   c5
    positions    0  1  2   3  4    3  4  5    5
    parents      -  0  1   2  3    2  5  6    6       column of the token before it
    ends         9  9  9   5  5    9  9  8    9       column after its last descendant

A token sees itself and its ancestors: columns k up to its own, c, with c < ends[k]. Rows of whole samples are the case without
branches.
"""

from collections.abc import Callable

import torch


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

    def sees(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return (kv_idx <= q_idx) & (q_idx < ends_BL[b, kv_idx])

    return sees
