"""Mixtures of experts: torchtitan's layer, made to compute what transformers and the engine compute, to take the experts that
the engine took, and to tell its load."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.family import recast
from torchtitan.experiments.rl.types import TrainingBatch
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter


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
        return super().forward(
            x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
        )

    def counts(self) -> torch.Tensor:
        """float64 [E + 2]: the load of each expert; all that was sent, and what experts have received of it."""
        received = self.inner_experts.received
        assert self.load_E is not None and self.sent is not None and received is not None, (
            "count_load comes first"
        )
        return torch.cat([self.load_E, torch.stack([self.sent, received])])


class RouterGate(Linear):
    """Scores each token's experts as the engine does: the product in the run's precision, and all after it in float32.

    torchtitan computes a router's gate under autocast to float32, which a GPU applies and a CPU
    ignores. vLLM and transformers compute the product in the model's dtype and its softmax in
    float32. Rounding differently, trainer and engine would choose different experts where two
    scores are close.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return float32 (float64 of float64) scores [B, L, experts] before the softmax."""
        with torch.autocast(device_type=x_BLD.device.type, enabled=False):
            scores_BLE = super().forward(x_BLD)
        return scores_BLE.to(torch.promote_types(scores_BLE.dtype, torch.float32))


class Router(TokenChoiceTopKRouter):
    """Takes the experts that it is told to, where it is, with its own scores of them: so these have their gradient."""

    routes_BLK: torch.Tensor | None = None
    """int16: the experts of each token in the rows of the next pass; -1 where the router chooses. None: it chooses all."""
    agreed_BLK: torch.Tensor | None = None
    """int8, of the last pass, and what this rank has of it: 1 where it would have chosen the same, 0 where not, -1 where it was
    not told."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of the chosen experts, the experts, and the scores of all."""
        chosen_BLK, own_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.routes_BLK is None:
            return chosen_BLK, own_BLK, scores_BLE
        told: Any = self.routes_BLK.long()
        if isinstance(scores_BLE, DTensor):
            mesh = scores_BLE.device_mesh
            whole = DTensor.from_local(told, mesh, [Replicate()] * mesh.ndim, run_check=False)
            told = whole.redistribute(placements=scores_BLE.placements)
        ids_BLK = torch.where(told >= 0, told, own_BLK)
        agreed = torch.where(told >= 0, (told[..., None] == own_BLK[..., None, :]).any(-1), -1)
        self.agreed_BLK = (agreed.to_local() if isinstance(agreed, DTensor) else agreed).char()
        chosen_BLK = scores_BLE.gather(dim=-1, index=ids_BLK)
        if self.route_norm:
            chosen_BLK = chosen_BLK / (chosen_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen_BLK * self.route_scale, ids_BLK, scores_BLE


def policy_experts(moe: MoE.Config) -> MoE.Config:
    """The layer as it is trained here.

    torchtitan adds a bias to the router's scores, which balances the load and is no part of a hub folder: the engine would
    choose other experts. It has none here.
    """
    own = recast(moe.routed_experts.inner_experts, Experts.Config)
    counted = recast(moe.routed_experts, CountedExperts.Config, inner_experts=own)
    router = recast(moe.router, Router.Config, gate=recast(moe.router.gate, RouterGate.Config))
    return replace(moe, load_balance_coeff=None, router=router, routed_experts=counted)


def mixtures_of(model: Any) -> dict[str, Any]:
    """By the number of the layer."""
    return {
        number: layer.moe
        for number, layer in model.layers.named_children()
        if getattr(layer, "moe_enabled", False)
    }


def tell_rows(
    model: Any,
    real_BL: torch.Tensor | None,
    routes: torch.Tensor | None,
    *,
    missing: int = 0,
    part: slice = slice(None),
) -> None:
    """Before a pass over this part of the columns of rows.

    Args:
        real_BL: bool: which tokens are no padding. None: all.
        routes: as ``Router`` takes them, [B, L, layers, K].
        missing: tokens that the rows have at their end beside these.
    """
    if routes is not None:
        routes = F.pad(routes, (0, 0, 0, 0, 0, missing), value=-1)[:, part]
    if real_BL is not None:
        real_BL = F.pad(real_BL, (0, missing))[:, part]
    for number, moe in mixtures_of(model).items():
        moe.routed_experts.real_BL = real_BL
        moe.router.routes_BLK = None if routes is None else routes[:, :, int(number)]


def routes_of(batch: TrainingBatch) -> torch.Tensor | None:
    """int16 [B, L, layers, K] of the rows that the model computes, -1 where a token has none. None: the batch has none."""
    if not batch.routes.numel():
        return None
    routes, absent = batch.routes, torch.iinfo(batch.routes.dtype).max
    if batch.trees is not None:
        routes = batch.trees.values_to_trees(routes, batch.task_ids >= 0, absent)
    return torch.where(routes == absent, -1, routes.short())


def recorded(batch: TrainingBatch) -> torch.Tensor:
    """bool [B, L]: tokens that the batch has routes of."""
    return (batch.routes != torch.iinfo(batch.routes.dtype).max).flatten(2).any(-1)


def check_routes(batch: TrainingBatch, model: Any) -> None:
    """
    Raises:
        RunError: the batch's routes are of another model. Ask it of a batch on the CPU.
    """
    routes, routers = batch.routes.long(), [moe.router for moe in mixtures_of(model).values()]
    if not routes.numel():
        return
    router, known = routers[0], routes[recorded(batch)]
    largest = int(known.max()) if known.numel() else 0
    if routes.shape[2:] != (len(routers), router.top_k) or largest >= router.num_experts:
        raise RunError(
            f"a generator took experts up to {largest}, in [layers, k] = {[*routes.shape[2:]]}, and the trainer's model has "
            f"{router.num_experts} in {[len(routers), router.top_k]}: give both the same model"
        )


def count_agreement(model: Any) -> None:
    """Of the pass that has ended, where it has gradients and was told routes."""
    routers = [moe.router for moe in mixtures_of(model).values()]
    if (
        model.agreement is None
        or not torch.is_grad_enabled()
        or not routers
        or routers[0].routes_BLK is None
    ):
        return
    agreed = torch.stack([router.agreed_BLK for router in routers])
    counts = [(agreed == 1).sum(), (agreed >= 0).sum()]
    counts += [(agreed == 1).all(-1).all(0).sum(), (agreed >= 0).all(-1).all(0).sum()]
    model.agreement = model.agreement + torch.stack(counts)


def count_load(model: Any, device: torch.device) -> None:
    """Start to count the load of the model's experts, and the agreement of its routers, from 0."""
    model.agreement = torch.zeros(4, dtype=torch.float64, device=device)
    for moe in mixtures_of(model).values():
        experts = moe.routed_experts
        experts.load_E = torch.zeros(
            experts.inner_experts.num_experts, dtype=torch.float64, device=device
        )
        # Two tensors: a compiled block asks whether its inputs are one, and would compile again when they part.
        experts.sent = torch.zeros((), dtype=torch.float64, device=device)
        experts.inner_experts.received = torch.zeros((), dtype=torch.float64, device=device)


def load_metrics(model: Any) -> dict[str, float]:
    """Of all ranks, since ``count_load``; {} of a dense model. Collective.

    ``load_max``: tokens of a layer's busiest expert, as a multiple of what each would have if all had the same. ``unused``: the
    share of its experts that no token chose. ``dropped``: the share of all choices that no expert computed. Where routes were
    replayed, ``agreement``: the share of these choices that the router would have made too; ``tokens_agree``: the share of
    tokens of which it would have made all, in all layers.
    """
    own = mixtures_of(model)
    if not own:
        return {}
    counts = torch.stack([moe.routed_experts.counts() for moe in own.values()])
    dist.all_reduce(counts)
    dist.all_reduce(model.agreement)
    found, loads, (sent, received) = (
        dict[str, float](),
        counts[:, :-2].cpu(),
        counts[:, -2:].sum(0).tolist(),
    )
    for number, load in zip(own, loads, strict=True):
        found[f"experts/layer_{number}/load_max"] = float(load.max() / load.mean())
        found[f"experts/layer_{number}/unused"] = float((load == 0).double().mean())
    same, told, same_tokens, tokens = model.agreement.tolist()
    if tokens:
        found |= {"experts/agreement": same / told, "experts/tokens_agree": same_tokens / tokens}
    return found | {"experts/dropped": 1 - received / sent}
