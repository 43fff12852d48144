"""Mixtures of experts: torchtitan's layer with the engine's arithmetic, routes and load counts.

torchtitan's layer is made to

- compute what transformers and the engine compute (`Experts`, `RouterGate`),
- take the experts that the engine took for a sampled token (`ReplayRouter`),
- count the load of its experts (`CountedExperts`).

Before each pass, ``tell_rows`` tells every layer which tokens are real and which experts to take.

Letters of shapes: E experts, K experts chosen for a token, R tokens sorted by their experts, F size
of an expert's hidden layer.
"""

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
    """Experts that compute in the dtype of their tokens.

    torchtitan's cast the tokens and all weights to bfloat16.
    """

    received: torch.Tensor | None = None
    """Number of tokens so far, each counted once for each of its experts. float64 []; None while
    tokens are not counted."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Compute each token by its expert, [R, dim]. Tokens are given in the order of experts."""
        ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        if self.received is not None and torch.is_grad_enabled():
            self.received = self.received + ends_E[-1]

        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if x.dtype != torch.float64:
                return F.grouped_mm(x, local.transpose(-2, -1), offs=ends_E)
            # There is no grouped kernel for float64.
            groups = x.split(num_tokens_per_expert_E.tolist())
            return torch.cat(
                [tokens @ matrix.T for tokens, matrix in zip(groups, local, strict=True)]
            )

        hidden_RF = F.silu(product(x_RD, self.w1_EFD)) * product(x_RD, self.w3_EFD)
        return product(hidden_RF, self.w2_EDF)


class CountedExperts(RoutedExperts):
    """Experts that count the tokens they are given in passes with gradients."""

    load_E: torch.Tensor | None = None
    """Number of tokens sent to each expert, padding left out. float64 [E].

    Sequence-parallel ranks count their tokens with the padding."""
    sent: torch.Tensor | None = None
    """Number of all tokens, padding included, each counted once for each of its experts. float64
    []."""
    real_BL: torch.Tensor | None = None
    """Mask of the next pass: True for tokens that are no padding. None counts all tokens."""

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
            ids_BLK = topk_expert_ids_BLK
            load_E = num_local_tokens_per_expert_E.double()
            if self.real_BL is not None and self.real_BL.shape == ids_BLK.shape[:2]:
                counted_BLK = self.real_BL[..., None].expand_as(ids_BLK).double()
                load_E = torch.zeros_like(load_E).scatter_add_(
                    0, ids_BLK.flatten(), counted_BLK.flatten()
                )
            self.load_E = self.load_E + load_E
            self.sent = self.sent + ids_BLK.numel()
        return super().forward(
            x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
        )

    def counts(self) -> torch.Tensor:
        """Return the load of each expert, then the tokens sent, then those received.

        Returns:
            float64 [E + 2].
        """
        received = self.inner_experts.received
        assert self.load_E is not None and self.sent is not None and received is not None, (
            "count_load comes first"
        )
        return torch.cat([self.load_E, torch.stack([self.sent, received])])


class RouterGate(Linear):
    """Gate that scores each token's experts as the engine does.

    The product is computed in the run's precision, and everything after it in float32.

    torchtitan computes a router's gate under autocast to float32, which a GPU applies and a CPU
    ignores. vLLM and transformers compute the product in the model's dtype and its softmax in
    float32. Rounding differently, trainer and engine would choose different experts where two
    scores are close.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, L, E] before the softmax, float32 (float64 for float64 input)."""
        with torch.autocast(device_type=x_BLD.device.type, enabled=False):
            scores_BLE = super().forward(x_BLD)
        return scores_BLE.to(torch.promote_types(scores_BLE.dtype, torch.float32))


class ReplayRouter(TokenChoiceTopKRouter):
    """Router that takes the experts it is told to, and chooses where it is told none.

    It weighs a replayed expert by its own score, so the score has its gradient.
    """

    routes_BLK: torch.Tensor | None = None
    """Experts of each token in the next pass, int16; -1 where the router chooses. None if it
    chooses for all tokens."""
    agreed_BLK: torch.Tensor | None = None
    """Agreement of the last pass in this rank's tokens, int8: 1 where the router would have chosen
    the same expert, 0 where another, -1 where it was told none."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scores of the experts taken, their ids, and the scores of all experts.

        Returns:
            scores [B, L, K], ids [B, L, K] and scores [B, L, E].
        """
        scores_BLK, choice_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if self.routes_BLK is None:
            return scores_BLK, choice_BLK, scores_BLE
        routes_BLK: Any = self.routes_BLK.long()
        if isinstance(scores_BLE, DTensor):
            mesh = scores_BLE.device_mesh
            whole = DTensor.from_local(routes_BLK, mesh, [Replicate()] * mesh.ndim, run_check=False)
            routes_BLK = whole.redistribute(placements=scores_BLE.placements)
        ids_BLK = torch.where(routes_BLK >= 0, routes_BLK, choice_BLK)

        is_chosen_BLK = (routes_BLK[..., None] == choice_BLK[..., None, :]).any(-1)
        agreed = torch.where(routes_BLK >= 0, is_chosen_BLK, -1)
        self.agreed_BLK = (agreed.to_local() if isinstance(agreed, DTensor) else agreed).char()

        scores_BLK = scores_BLE.gather(dim=-1, index=ids_BLK)
        if self.route_norm:
            scores_BLK = scores_BLK / (scores_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return scores_BLK * self.route_scale, ids_BLK, scores_BLE


def policy_experts(moe: MoE.Config) -> MoE.Config:
    """Return the config of a mixture layer as it is trained here.

    torchtitan adds a bias to the router's scores to balance the load. The bias is no part of a hub
    folder, so the engine would choose other experts; the returned layer has none.
    """
    inner = recast(moe.routed_experts.inner_experts, Experts.Config)
    counted = recast(moe.routed_experts, CountedExperts.Config, inner_experts=inner)
    router = recast(
        moe.router, ReplayRouter.Config, gate=recast(moe.router.gate, RouterGate.Config)
    )
    return replace(moe, load_balance_coeff=None, router=router, routed_experts=counted)


def mixtures_of(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
) -> dict[str, Any]:
    """Return the model's mixture layers by the number of their block."""
    return {
        number: layer.moe
        for number, layer in model.layers.named_children()
        if getattr(layer, "moe_enabled", False)
    }


def tell_rows(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
    real_BL: torch.Tensor | None,
    routes: torch.Tensor | None,
    *,
    padding: int = 0,
    columns: slice = slice(None),
) -> None:
    """Tell each mixture layer the tokens of the next pass. Call it before every pass.

    Args:
        model: the decoder.
        real_BL: bool, True for tokens that are no padding. None if all are real.
        routes: int16 [B, L, layers, K], experts of each token in each layer, as `ReplayRouter`
            takes them. None if the routers choose.
        padding: number of tokens that the pass adds to the end of each row.
        columns: columns of the padded rows that the pass computes.
    """
    if routes is not None:
        routes = F.pad(routes, (0, 0, 0, 0, 0, padding), value=-1)[:, columns]
    if real_BL is not None:
        real_BL = F.pad(real_BL, (0, padding))[:, columns]
    for number, moe in mixtures_of(model).items():
        moe.routed_experts.real_BL = real_BL
        moe.router.routes_BLK = None if routes is None else routes[:, :, int(number)]


def routes_of(batch: TrainingBatch) -> torch.Tensor | None:
    """Return the experts of each token in the rows that the model computes.

    Returns:
        int16 [B, L, layers, K], -1 where a token has no route. None if the batch has no routes.
    """
    if not batch.routes.numel():
        return None
    routes = batch.routes
    absent = torch.iinfo(routes.dtype).max
    if batch.trees is not None:
        routes = batch.trees.values_to_trees(routes, batch.task_ids >= 0, absent)
    return torch.where(routes == absent, -1, routes.short())


def recorded(batch: TrainingBatch) -> torch.Tensor:
    """Return which tokens the batch has routes of, bool [B, L]."""
    return (batch.routes != torch.iinfo(batch.routes.dtype).max).flatten(2).any(-1)


def check_routes(
    batch: TrainingBatch,
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
) -> None:
    """Raise if the batch's routes come from another model. Call it while the batch is on the CPU.

    Raises:
        RunError: the routes name more experts, other layers or another number of experts a token
            than the model has.
    """
    if not batch.routes.numel():
        return
    routes = batch.routes.long()
    routers = [moe.router for moe in mixtures_of(model).values()]
    router = routers[0]
    known = routes[recorded(batch)]
    largest = int(known.max()) if known.numel() else 0
    if routes.shape[2:] != (len(routers), router.top_k) or largest >= router.num_experts:
        raise RunError(
            f"a generator took experts up to {largest}, in [layers, k] = {[*routes.shape[2:]]}, "
            f"and the trainer's model has {router.num_experts} in "
            f"{[len(routers), router.top_k]}: give both the same model"
        )


def count_agreement(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
) -> None:
    """Add the pass that has just ended to ``model.agreement``.

    A pass counts if it has gradients, was told routes, and comes after ``count_load``.
    """
    if model.agreement is None or not torch.is_grad_enabled():
        return
    routers = [moe.router for moe in mixtures_of(model).values()]
    if not routers or routers[0].routes_BLK is None:
        return
    agreed = torch.stack([router.agreed_BLK for router in routers])
    counts = [
        (agreed == 1).sum(),
        (agreed >= 0).sum(),
        (agreed == 1).all(-1).all(0).sum(),
        (agreed >= 0).all(-1).all(0).sum(),
    ]
    model.agreement = model.agreement + torch.stack(counts)


def count_load(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
    device: torch.device,
) -> None:
    """Start to count the load of the model's experts and the agreement of its routers, from 0."""
    model.agreement = torch.zeros(4, dtype=torch.float64, device=device)
    for moe in mixtures_of(model).values():
        experts = moe.routed_experts
        experts.load_E = torch.zeros(
            experts.inner_experts.num_experts, dtype=torch.float64, device=device
        )
        # Two tensors: a compiled block is guarded on whether its inputs are the same tensor, and
        # would compile again once they differ.
        experts.sent = torch.zeros((), dtype=torch.float64, device=device)
        experts.inner_experts.received = torch.zeros((), dtype=torch.float64, device=device)


def load_metrics(
    model: Any,  # noqa: ANN401 - torchtitan declares less than every decoder has
) -> dict[str, float]:
    """Return metrics of the experts' load on all ranks since ``count_load``. Collective.

    A dense model has none. A mixture has, under ``experts/``:

    - ``layer_N/load_max``: tokens of the layer's busiest expert, as a multiple of what each expert
      would have if all had the same.
    - ``layer_N/unused``: share of the layer's experts that no token chose.
    - ``dropped``: share of all choices that no expert computed.
    - ``agreement``, where routes were replayed: share of the replayed choices that the router would
      have made too.
    - ``tokens_agree``, where routes were replayed: share of the tokens for which the router would
      have made all choices, in all layers.
    """
    mixtures = mixtures_of(model)
    if not mixtures:
        return {}
    counts = torch.stack([moe.routed_experts.counts() for moe in mixtures.values()])
    dist.all_reduce(counts)
    dist.all_reduce(model.agreement)

    metrics: dict[str, float] = {}
    for number, load_E in zip(mixtures, counts[:, :-2].cpu(), strict=True):
        metrics[f"experts/layer_{number}/load_max"] = float(load_E.max() / load_E.mean())
        metrics[f"experts/layer_{number}/unused"] = float((load_E == 0).double().mean())
    agreed_choices, choices, agreed_tokens, tokens = model.agreement.tolist()
    if tokens:
        metrics["experts/agreement"] = agreed_choices / choices
        metrics["experts/tokens_agree"] = agreed_tokens / tokens
    sent, received = counts[:, -2:].sum(0).tolist()
    metrics["experts/dropped"] = 1 - received / sent
    return metrics
