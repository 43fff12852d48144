"""Context parallelism by heads: ranks divide each row along its length, and attention by its heads.

Between attentions a rank has a part of the tokens, with all heads; in attention all tokens, with a part of the heads. Two
ranks, two heads, a row of four tokens::

    rank 0     t0 t1 x h0 h1     all-to-all     t0 t1 t2 t3 x h0     attention, all-to-all back
    rank 1     t2 t3 x h0 h1                    t0 t1 t2 t3 x h1

So attention sees whole rows, and packed samples and prefix trees need nothing new. The ranks have the same rows, and each
computes the log-probabilities of those tokens whose predecessor is its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Context:
    """This rank's place among those that divide a row."""

    group: dist.ProcessGroup
    same_rows: dist.ProcessGroup
    """Ranks that compute the same rows: tensor-parallel ones too."""
    other_rows: dist.ProcessGroup
    """One rank of each such group."""

    @classmethod
    def of(cls, context: int, tensor: int) -> "Context":
        """Tensor-parallel ranks are next to each other, then those of a context. Collective."""
        world, block = dist.get_world_size(), context * tensor
        blocks = [range(first, first + block) for first in range(0, world, block)]
        return cls(
            group=_own([list(ranks[place::tensor]) for ranks in blocks for place in range(tensor)]),
            same_rows=_own([list(ranks) for ranks in blocks]),
            other_rows=_own([list(range(place, world, block)) for place in range(block)]),
        )

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def part(self, length: int) -> slice:
        """This rank's columns of a row whose length the ranks divide."""
        own = length // self.size
        return slice(dist.get_rank(self.group) * own, (dist.get_rank(self.group) + 1) * own)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over the ranks. All of them go on alike with it, so the gradient of each is the whole."""
        return _Sum.apply(values, self.group)

    def divide_attention(self, model: Any) -> None:
        """Before tensor parallelism wraps it: each rank then divides its own heads."""
        for block in model.layers.values():
            inner = block.attention.inner_attention
            inner.forward = partial(_by_heads, inner.forward, self.group)


def _own(groups: list[list[int]]) -> dist.ProcessGroup:
    """Make all of these groups, as every rank has to; return this rank's."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for ranks, group in zip(groups, made, strict=True) if dist.get_rank() in ranks)


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
    """Divide one dimension among the ranks, and put another one together from their parts."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, divide: int, join: int) -> torch.Tensor:
        ctx.group, ctx.divide, ctx.join = group, divide, join
        sent = torch.stack(values.chunk(dist.get_world_size(group), divide))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group, ctx.join, ctx.divide), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None
