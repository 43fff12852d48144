"""Attention of transformers' modules over rows of prefix trees.

transformers has each attention module call a function of its ``AttentionInterface``, by name. Ours
is registered as `ATTENTION`. It gets the module's queries, keys and values and all that is special
about its attention: scale, sliding window, cap of the scores, sinks. What it must know of the rows
comes as the keyword argument ``rows``, which transformers hands on from the model to each layer.
Where a layer hands no keyword arguments on to its attention, the rows come as the mask, which every
layer hands on (`hand_on_as_mask`).

transformers makes no masks for a function that it has no mask for, so the rows alone decide what a
token sees: itself and its ancestors (`attention.py`), within the layer's window.

A second function, `PROBE`, computes nothing and notes how each layer attends. A model whose layers
ask for something that `attend` does not do is refused by what the notes say.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from transformers import AttentionInterface

from torchtitan.experiments.rl.models.attention import (
    SMALL_BLOCKS,
    Exchange,
    PackedDocuments,
    attend_blocks,
    needs_small_blocks,
    shared_memory,
    tree_mask,
)
from torchtitan.models.common.attention import FlexAttention, create_attention_mask

ATTENTION = "prefix_trees"
"""Name of `attend` among transformers' attention functions."""
PROBE = "probe_of_prefix_trees"
"""Name of `probe` among transformers' attention functions."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Settings by which a layer turns products of queries and keys into weights."""

    scaling: float | None
    """Factor of the scores; None for 1 / sqrt(head_dim)."""
    window: int | None
    """Number of tokens that a query sees at most, itself included; None for all."""
    softcap: float | None
    """Bound of the scores, which tanh approaches; None for no bound."""
    sinks_N: torch.Tensor | None
    """Score of each head that takes part in the softmax and has no value; None for no sinks."""


class AttentionRows(Protocol):
    """Batch of rows, by which every layer's attention decides what a token sees."""

    @property
    def context(self) -> dist.ProcessGroup | None:
        """Ranks that divide each row. None if rows are whole."""
        ...

    def attend(
        self, q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Attend from each token to itself and its ancestors.

        Queries, keys and values are [B, heads, L, head_dim]; keys and values may have fewer heads,
        and values another size of head.

        Returns:
            [B, L, heads, head_dim of values].
        """
        ...


@dataclass(frozen=True, slots=True)
class RowsInBlocks:
    """Rows whose attention is computed block by block, which is what a CPU does best."""

    documents: PackedDocuments
    context: dist.ProcessGroup | None

    @classmethod
    def of(cls, positions_BL: torch.Tensor, context: dist.ProcessGroup | None) -> "RowsInBlocks":
        """Prepare rows by the place of each token in its sample."""
        return cls(documents=PackedDocuments.of(positions_BL), context=context)

    def attend(
        self, q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        q_BLNH, k_BLNH, v_BLNH = (t.transpose(1, 2) for t in (q_BNLH, k_BNLH, v_BNLH))
        if scores.softcap is None and scores.sinks_N is None:
            attend_to: Callable[..., torch.Tensor] = partial(
                F.scaled_dot_product_attention, scale=scores.scaling, enable_gqa=True
            )
        else:
            attend_to = partial(_attend_with_scores, scores)
        return attend_blocks(
            attend_to, q_BLNH, k_BLNH, v_BLNH, self.documents, window=scores.window
        )


def _attend_with_scores(
    scores: Scores,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Attend as ``F.scaled_dot_product_attention`` does, with cap and sinks."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    scaling = q.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = q @ k.transpose(2, 3) * scaling
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    if is_causal:
        attn_mask = torch.ones(products.shape[-2:], dtype=torch.bool).tril()
    assert attn_mask is not None, "what is not causal has a mask"
    products = products.masked_fill(~attn_mask, -torch.inf)
    if scores.sinks_N is None:
        return products.softmax(-1) @ v
    sinks = scores.sinks_N.view(1, -1, 1, 1).expand(*products.shape[:3], 1)
    return torch.cat([products, sinks], -1).softmax(-1)[..., :-1] @ v


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows whose attention is flex attention's, on GPUs."""

    masks: dict[int | None, BlockMask]
    """Mask of the rows by the window of a layer."""
    context: dist.ProcessGroup | None
    shared_memory: int | None
    """Bytes of shared memory that a block of the GPU may have; None if it is no GPU."""

    @classmethod
    def of(
        cls,
        positions_BL: torch.Tensor,
        context: dist.ProcessGroup | None,
        windows: Collection[int | None],
    ) -> "MaskedRows":
        """Prepare rows by the place of each token in its sample.

        Args:
            positions_BL: the places.
            context: ranks that divide each row.
            windows: windows of the model's layers; None for a layer that sees everything.
        """
        count, length = positions_BL.shape
        masks = {
            window: create_attention_mask(
                tree_mask(positions_BL, window),
                count,
                None,
                length,
                length,
                device=positions_BL.device,
            )
            for window in windows
        }
        available = shared_memory(positions_BL.device)
        return cls(masks=masks, context=context, shared_memory=available)

    def attend(
        self, q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        sinks_N = scores.sinks_N
        small_blocks = needs_small_blocks(q_BNLH.shape[-1], self.shared_memory)
        out_BNLH, aux = FlexAttention.compiled_flex_attn(
            q_BNLH,
            k_BNLH,
            v_BNLH,
            score_mod=None if scores.softcap is None else _cap(scores.softcap),
            block_mask=self.masks[scores.window],
            scale=scores.scaling,
            enable_gqa=q_BNLH.shape[1] != k_BNLH.shape[1],
            return_aux=AuxRequest(lse=sinks_N is not None),
            kernel_options=dict(SMALL_BLOCKS) if small_blocks else {},
        )
        if sinks_N is not None:
            # A sink adds exp(sink) to the denominator exp(lse) of the softmax.
            share_BNL = torch.sigmoid(aux.lse.float() - sinks_N.float()[:, None])
            out_BNLH = (out_BNLH.float() * share_BNL[..., None]).to(out_BNLH.dtype)
        return out_BNLH.transpose(1, 2)


def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    """Return the ``score_mod`` of flex attention that bounds scores."""

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def attend(  # noqa: PLR0913 - transformers' signature, like the next
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionRows | None,
    *,
    rows: AttentionRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attend from each token to itself and its ancestors, for a module of transformers.

    Args:
        module: attention module of transformers, of one layer.
        query, key, value: [B, heads, L, head_dim], rotated. Keys may have fewer heads.
        attention_mask: the batch, if the layers hand on no keyword arguments. No mask is made for
            this function.
        rows: the batch, if they do.
        scaling, sliding_window, softcap, s_aux: fields of `Scores` by transformers' names.
        options: other arguments of the module. `probe` has refused those that would matter.

    Returns:
        [B, L, heads, head_dim], and None in place of the weights.
    """
    rows = attention_mask if rows is None else rows
    assert rows is not None, "`probe` has seen the rows arrive"
    if rows.context is not None:
        query, key, value = (Exchange.apply(t, rows.context, 1, 2) for t in (query, key, value))
        if s_aux is not None:
            s_aux = s_aux.chunk(rows.context.size())[rows.context.rank()]
    scores = Scores(scaling=scaling, window=sliding_window, softcap=softcap, sinks_N=s_aux)
    out_BLNH = rows.attend(query, key, value, scores)
    if rows.context is not None:
        out_BLNH = Exchange.apply(out_BLNH, rows.context, 1, 2)
    return out_BLNH, None


def hand_on_as_mask(layers: Iterable[nn.Module]) -> None:
    """Have layers that hand on no keyword arguments hand the rows on as their attention mask."""
    for layer in layers:
        layer.register_forward_pre_hook(_with_rows_as_mask, with_kwargs=True)


def _with_rows_as_mask(
    layer: nn.Module,  # noqa: ARG001 - torch's signature
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return a layer's arguments with the rows in place of the mask, of which there is none."""
    return args, kwargs | {"attention_mask": kwargs.get("rows")}


# ---- what a model's layers ask for


@dataclass(slots=True)
class AttentionNotes:
    """Record of how a model's layers attend. A pass with `probe` is given it as its ``rows``."""

    modules: list[nn.Module] = field(default_factory=list)
    """Attention modules in the order of their calls."""
    windows: set[int | None] = field(default_factory=set)
    """Windows of the layers."""
    heads: set[int] = field(default_factory=set)
    """Numbers of query heads of the layers."""
    kv_heads: set[int] = field(default_factory=set)
    """Numbers of key heads of the layers."""
    head_dims: set[int] = field(default_factory=set)
    """Sizes of a query's and a key's heads."""
    fault: str = ""
    """Request of a layer that `attend` can't meet; "" if there is none."""


class RowsNotHandedOn(Exception):  # noqa: N818 - the caller tries another way
    """A model's layers hand on no keyword arguments to the attention function."""


_WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "cache_position",
    "past_key_values",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
}
"""Arguments that models hand on to every attention function, and that concern none here."""


def probe(  # noqa: PLR0913
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | AttentionNotes | None,
    *,
    rows: AttentionNotes | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    scaling: float | None = None,  # noqa: ARG001 - this and the next two are what `attend` takes
    softcap: float | None = None,  # noqa: ARG001
    s_aux: torch.Tensor | None = None,  # noqa: ARG001
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Note how a layer attends, and return an output of the right shape.

    Raises:
        RowsNotHandedOn: the model's layers do not hand on the ``rows``.
    """
    if isinstance(attention_mask, AttentionNotes):
        rows = attention_mask
        attention_mask = None
    if rows is None:
        raise RowsNotHandedOn
    rows.modules.append(module)
    rows.windows.add(sliding_window)
    rows.heads.add(query.shape[1])
    rows.kv_heads.add(key.shape[1])
    rows.head_dims.add(query.shape[3])
    is_causal = options.pop("is_causal", getattr(module, "is_causal", True))
    unknown = [
        name for name, value in options.items() if name not in _WITHOUT_EFFECT and value is not None
    ]
    if attention_mask is not None:
        rows.fault = "its layers make a mask of their own"
    elif is_causal is False:
        rows.fault = "its layers see what comes after a token"
    elif dropout:
        rows.fault = "its layers drop some attention out, which no field of config.json turns off"
    elif unknown:
        rows.fault = f"its layers attend by {unknown[0]}, which is not known here"
    batch, heads, length, _ = query.shape
    return value.new_empty(batch, length, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PROBE, probe)
