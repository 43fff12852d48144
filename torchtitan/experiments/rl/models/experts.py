"""Mixtures of experts: torchtitan's layer, made to compute what transformers and the engine compute, and to tell its load."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts


class Experts(GroupedExperts):
    """Computes in the dtype of its tokens. torchtitan's casts them, and all weights, to bfloat16."""

    received: torch.Tensor | None = None
    """float64 []: tokens so far, each as often as it has experts. None: they are not counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """[R, dim]: tokens in the order of their experts, each by its own."""
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        if self.received is not None and torch.is_grad_enabled():
            self.received = self.received + ends_E[-1]

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if x.dtype != torch.float64:
                return F.grouped_mm(x, local.transpose(-2, -1), offs=ends_E)
            groups = x.split(num_tokens_per_expert_E.tolist())  # there is no kernel for it
            return torch.cat([own @ one.T for own, one in zip(groups, local, strict=True)])

        hidden_RF = F.silu(product(x_RD, self.w1_EFD)) * product(x_RD, self.w3_EFD)
        return product(hidden_RF, self.w2_EDF)


class CountedExperts(RoutedExperts):
    """Counts the tokens that it is given in passes with gradients."""

    load_E: torch.Tensor | None = None
    """float64 [E]: tokens of samples, padding left out. Sequence-parallel ranks count theirs with its padding."""
    sent: torch.Tensor | None = None
    """float64 []: all tokens, each as often as it has experts."""
    real_BL: torch.Tensor | None = None
    """Which tokens are no padding, in the rows of the next pass."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        if self.load_E is not None and self.sent is not None and torch.is_grad_enabled():
            ids, load = topk_expert_ids_BLK, num_local_tokens_per_expert_E.double()
            if self.real_BL is not None and self.real_BL.shape == ids.shape[:2]:
                counted = self.real_BL[..., None].expand_as(ids).double()
                load = torch.zeros_like(load).scatter_add_(0, ids.flatten(), counted.flatten())
            self.load_E, self.sent = self.load_E + load, self.sent + ids.numel()
        return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)

    def counts(self) -> torch.Tensor:
        """float64 [E + 2]: the load of each expert; all that was sent, and what experts have received of it."""
        received = self.inner_experts.received
        assert self.load_E is not None and self.sent is not None and received is not None, "count_load comes first"
        return torch.cat([self.load_E, torch.stack([self.sent, received])])


def policy_experts(moe: MoE.Config) -> MoE.Config:
    """The layer as it is trained here.

    torchtitan adds a bias to the router's scores, which balances the load and is no part of a hub folder: the engine would
    choose other experts. It has none here.
    """
    routed, inner = moe.routed_experts, moe.routed_experts.inner_experts
    own = Experts.Config(**{field.name: getattr(inner, field.name) for field in fields(inner)})
    counted = {field.name: getattr(routed, field.name) for field in fields(routed)} | {"inner_experts": own}
    return replace(moe, load_balance_coeff=None, routed_experts=CountedExperts.Config(**counted))


def experts_of(model: Any) -> dict[str, CountedExperts]:
    """By the number of the layer."""
    layers = model.layers.named_children()
    return {number: layer.moe.routed_experts for number, layer in layers if getattr(layer, "moe_enabled", False)}


def tell_padding(model: Any, positions_BL: torch.Tensor, part: slice) -> None:
    """Before a pass over this part of the rows' columns. A token of padding is a sample of one token; others have more."""
    for experts in experts_of(model).values():
        experts.real_BL = ((positions_BL > 0) | (F.pad(positions_BL[:, 1:], (0, 1)) > 0))[:, part]


def count_load(model: Any, device: torch.device) -> None:
    """From now on."""
    for experts in experts_of(model).values():
        experts.load_E = torch.zeros(experts.inner_experts.num_experts, dtype=torch.float64, device=device)
        experts.sent = experts.inner_experts.received = torch.zeros((), dtype=torch.float64, device=device)


def load_metrics(model: Any) -> dict[str, float]:
    """Of all ranks, since ``count_load``; {} of a dense model. Collective.

    ``load_max``: tokens of a layer's busiest expert, as a multiple of what each would have if all had the same. ``unused``: the
    share of its experts that no token chose. ``dropped``: the share of all choices that no expert computed.
    """
    own = experts_of(model)
    if not own:
        return {}
    counts = torch.stack([one.counts() for one in own.values()])
    dist.all_reduce(counts)
    found, loads, (sent, received) = dict[str, float](), counts[:, :-2].cpu(), counts[:, -2:].sum(0).tolist()
    for number, load in zip(own, loads, strict=True):
        found[f"experts/layer_{number}/load_max"] = float(load.max() / load.mean())
        found[f"experts/layer_{number}/unused"] = float((load == 0).double().mean())
    return found | {"experts/dropped": 1 - received / sent}
