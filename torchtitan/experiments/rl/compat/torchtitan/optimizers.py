"""Muon of torch 2.13.0 for weights that ranks share, in torchtitan 0.3.0's container of optimizers.

    momentum, a shard a rank ──▶ gathered ──▶ orthogonalized on each rank ──▶ its shard is added

``torch.optim.Muon`` computes its matrix products on the shards. On two ranks and more they end in a
sum of shards and a whole tensor, which DTensor refuses, or in other roundings on each number of
ranks. torchtitan's own ``DistMuon`` is for CUDA alone, and takes no tensor parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from torchtitan.components.optimizer import OptimizersContainer


class ShardedMuon(torch.optim.Muon):
    """Muon whose update is the same for any number of ranks, and torch's own on a rank alone.

    ``torch.optim._muon`` is private. torch has no public function of the two halves of a step, the
    iteration and the scale of its result.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step. Collective.

        Ranks hold whole matrices one at a time, and each computes the iteration of all of them.
        """
        assert closure is None, "torchtitan's container hands on no closures"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = momentum
        if group["nesterov"]:
            update = gradient.lerp(momentum, group["momentum"])
        direction = _orthogonalized(update, group)
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-rate)


def _orthogonalized(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Orthogonalize a matrix, which may be sharded as its parameter is."""
    whole = update.bfloat16()  # as the iteration computes: so ranks gather half as many bytes
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    direction = _zeropower_via_newtonschulz(
        whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    if isinstance(update, DTensor):
        return distribute_tensor(
            direction, update.device_mesh, update.placements, src_data_rank=None
        )
    return direction


class MuonContainer(OptimizersContainer[Optimizer]):
    """torchtitan's container of optimizers, which also builds the one that is named "Muon".

    ``OptimizersContainer._resolve_optimizer_factory`` is private. torchtitan has no public way to
    add an optimizer.
    """

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name == "Muon":
            return ShardedMuon
        return OptimizersContainer._resolve_optimizer_factory(name)
