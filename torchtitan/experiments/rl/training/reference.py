"""A copy of the policy that follows it, to compare the policy with. Each rank of the trainer holds its shards of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import NonNegativeFloat, PositiveInt
from torchtitan.experiments.rl.models.lora import forget_gathered, trained_state


@dataclass(kw_only=True, slots=True)
class ReferenceConfig(Configurable.Config):
    """A reference that begins as the policy's first weights and is saved with each checkpoint."""

    kind: Literal["ema", "lagged"] = "ema"
    """ema: after each step, reference = decay·reference + (1 - decay)·policy. lagged: a copy of the policy every ``every``
    steps; in between it stays."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Of ``ema``. 0 is the policy of the step before the last update, that is: the current one."""
    every: PositiveInt = 50
    """Steps between two copies of ``lagged``. More than the run has: its first weights, for good."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the distance to the reference in the loss, on tokens that feed rl. 0: it is only measured."""


class Reference(Stateful):
    """One more set of what is trained: with LoRA, of adapters. Every method but those of its state is collective where the
    model's forward pass is."""

    def __init__(self, config: ReferenceConfig, model: nn.Module):
        self._config, self._model, self._parameters = config, model, trained_state(model)
        self._held = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        self._version = torch.zeros((), dtype=torch.int64)

    @property
    def version(self) -> int:
        """Of ``lagged``: the policy version it is. Of ``ema``: the newest that it has taken in."""
        return int(self._version)

    @torch.no_grad()
    def restart(self) -> None:
        """Become the policy, as version 0."""
        for name, parameter in self._parameters.items():
            self._held[name].copy_(parameter)
        self._version.zero_()

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """The policy has become ``version``: take it in, or copy it if it is time."""
        ema = self._config.kind == "ema"
        if not ema and version % self._config.every:
            return
        for name, parameter in self._parameters.items():
            self._held[name].lerp_(parameter, 1 - self._config.decay if ema else 1.0)
        self._version.fill_(version)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, without gradients, the model computes with the reference's weights. The policy's come back bit for bit."""
        with torch.no_grad():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def _swap(self) -> None:
        forget_gathered(self._model)
        for name, parameter in self._parameters.items():
            policy = parameter.detach().clone()
            parameter.copy_(self._held[name])
            self._held[name].copy_(policy)

    def state_dict(self) -> dict[str, Any]:
        return {**self._held, "version": self._version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state_dict[name])
