"""Metrics that a loss returns beside its losses: ``<component>/own/<name>``, a mean over the component's tokens of the step."""

import torch

from torchtitan.experiments.rl.losses.metrics import MetricSums

OwnMetrics = dict[str, torch.Tensor]
"""A value [B, L] for each token, by the metric's name. What it is on tokens that are no member does not matter."""


def add_own_metrics(sums: MetricSums, component: str, own: OwnMetrics, member: torch.Tensor) -> None:
    """
    Raises:
        ValueError: a metric that is no value for each token; names it.
    """
    for name, values in own.items():
        if not isinstance(values, torch.Tensor) or values.shape != member.shape:
            kind = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise ValueError(f"metric {component}/own/{name} has {kind}: want a tensor of shape {tuple(member.shape)}")
        sums.add_mean(f"{component}/own/{name}", values.detach(), member)
