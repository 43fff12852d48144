"""Context parallelism by heads: ranks divide each row along its length, and attention by its heads.

Between attentions a rank has a part of the tokens, with all heads; in attention all tokens, with a part of the heads. Two
ranks, two heads, a row of four tokens::

    rank 0     t0 t1 x h0 h1     all-to-all     t0 t1 t2 t3 x h0     attention, all-to-all back
    rank 1     t2 t3 x h0 h1                    t0 t1 t2 t3 x h1

So attention sees whole rows, and packed samples and prefix trees need nothing new. The ranks have the same rows, and each
computes the log-probabilities of those tokens whose predecessor is its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial


def own_part(length: int, context: DeviceMesh) -> slice:
    """This rank's columns of a row whose length the ranks of ``context`` divide."""
    own = length // context.size()
    return slice(context.get_local_rank() * own, (context.get_local_rank() + 1) * own)


def summed(values: torch.Tensor, context: DeviceMesh) -> torch.Tensor:
    """Over the ranks. All of them go on alike with it, so the gradient of each is the whole."""
    # full_tensor's result is a view, and FSDP warns where its module returns one.
    return DTensor.from_local(values, context, [Partial()]).full_tensor().clone()


def divide_attention(model: Any, context: DeviceMesh) -> None:
    """Have each rank of ``context`` compute its part of the heads, of whole rows. Before the model is wrapped."""
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
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup, divide: int, join: int) -> torch.Tensor:
        ctx.group, ctx.divide, ctx.join = group, divide, join
        sent = torch.stack(values.chunk(dist.get_world_size(group), divide))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, ctx.group, ctx.join, ctx.divide), None, None, None
