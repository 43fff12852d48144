"""Builds the optimizer of the trained parameters.

adamw ──▶ AdamW    every parameter
muon ──┬▶ Muon     the layers' matrices
       └▶ AdamW    embedding, head, norms, biases, stacks of experts

torchtitan's container holds them, and the schedule gives all of them the same learning rate.
"""

import re

from torch import nn

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.experiments.rl.compat.torchtitan.optimizers import MuonContainer
from torchtitan.experiments.rl.models.policy import is_layer_matrix
from torchtitan.experiments.rl.training.config import OptimizerConfig


def build_optimizers(config: OptimizerConfig, model: nn.Module) -> OptimizersContainer:
    """Return the optimizers of a model's trained parameters, in torchtitan's container."""
    adamw = default_adamw(
        lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    if config.name == "adamw":
        return adamw.build(model_parts=[model])

    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    matrices = [name for name, value in trained.items() if is_layer_matrix(name, value)]
    muon = ParamGroupConfig(
        pattern="^(" + "|".join(map(re.escape, matrices)) + ")$",
        optimizer_name="Muon",
        optimizer_kwargs={
            "lr": config.lr,
            "momentum": config.momentum,
            "weight_decay": config.weight_decay,
            # The scale of Moonlight, arXiv:2502.16982: 0.2 sqrt(max(rows, columns)).
            "adjust_lr_fn": "match_rms_adamw",
        },
    )
    others = adamw.param_groups if len(matrices) < len(trained) else []
    return MuonContainer(
        OptimizersContainer.Config(param_groups=[muon, *others]), model_parts=[model]
    )
