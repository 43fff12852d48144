"""A copy of the policy that follows it, to compare the policy with.

Each rank of the trainer holds its shards of the copy.
"""

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
    """Way in which the reference follows. "ema": after each step, reference = decay·reference +
    (1 - decay)·policy. "lagged": it becomes a copy of the policy every ``every`` steps."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Share of itself that an "ema" reference keeps at each step. With 0 it is the current
    policy."""
    every: PositiveInt = 50
    """Number of steps between two copies of a "lagged" reference. If the run has fewer, the
    reference keeps the policy's first weights."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the distance to the reference in the loss, on tokens that feed rl. With 0 the
    distance is only measured."""


class Reference(Stateful):
    """Second set of the parameters that are trained; with LoRA, of an adapter's.

    Each rank changes its own shards, so every rank makes the same calls.
    """

    def __init__(self, config: ReferenceConfig, model: nn.Module):
        self._config = config
        self._model = model
        self._parameters = trained_state(model)
        self._held = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }
        """Reference's values of the parameters."""
        self._version = torch.zeros((), dtype=torch.int64)

    @property
    def version(self) -> int:
        """Policy version that a "lagged" reference is, or the newest that an "ema" has taken in.

        With several adapters it is the number of the adapter's own steps.
        """
        return int(self._version)

    @torch.no_grad()
    def restart(self) -> None:
        """Become the policy, as version 0."""
        for name, parameter in self._parameters.items():
            self._held[name].copy_(parameter)
        self._version.zero_()

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Take the policy in, or copy it if it is time. The policy has become ``version``."""
        if self._config.kind == "lagged" and version % self._config.every:
            return
        share = 1 - self._config.decay if self._config.kind == "ema" else 1.0
        for name, parameter in self._parameters.items():
            self._held[name].lerp_(parameter, share)
        self._version.fill_(version)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the reference's weights inside, without gradients.

        The policy's weights come back bit for bit.
        """
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
