"""Echo: reinforcement learning, and cross-entropy on what the environment answers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from annotated_types import Gt

from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutTurn
from torchtitan.experiments.rl.types import ROLES

ENV_ROLES = tuple(role for role in ROLES if role != "assistant")

RoleWeight = Annotated[float, Gt(0), Cure("to leave a role out, don't name it")]


class Echo(GRPO):
    """Environment cross-entropy hybrid objective (Shrivastava et al., arXiv:2605.24517): GRPO's credit for what the policy
    sampled, and cross-entropy, with a small weight by role, on what the environment answered.

        ℓ = ℓ_rl(sampled tokens) + alpha[role]·(-logp)    on body tokens of env messages after the first sampled token

    Only bodies count, not the template around them. Where a prompt was rendered anew and starts a sample of its own, what
    stands in it comes before that sample's first sampled token, and has no weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        alpha: dict[str, RoleWeight] = field(default_factory=lambda: {"tool": 0.1})
        """Weight by message role. Setting any role replaces the whole table."""
        keep: Callable[[Rollout, RolloutTurn], bool | np.ndarray] | None = None
        """A user's filter: whether the env's messages before this turn are trained on; or bool [P], for each token of the
        turn's prompt. Importable: defined at the top level of a module."""

        def needs_roles(self) -> str | None:
            return "alpha"

        def validate(self, *, field: str, **context) -> None:
            super(Echo.Config, self).validate(field=field, **context)
            if not self.alpha:
                raise ConfigError(
                    f"{field}.alpha", self.alpha, 'no role has a weight: name one, such as {"tool": 0.1}, or use GRPO'
                )
            for role in self.alpha:
                if role not in ENV_ROLES:
                    cure = f"is no role of an env's message: use one of {', '.join(ENV_ROLES)}"
                    raise ConfigError(f"{field}.alpha", role, cure)

    config: Config

    async def score_rollout(self, rollout: Rollout) -> None:
        ce_weights = [np.zeros(len(sample), np.float32) for sample in rollout.samples]
        alpha = np.array([*(self.config.alpha.get(role, 0.0) for role in ROLES), 0.0], np.float32)  # -1, no role, is the last
        for turn, span in zip(rollout.turns, turn_spans(rollout.turns), strict=True):
            if span is None or span.new == 0:  # a sample's first prompt: nothing was sampled before it
                continue
            weights = alpha[turn.prompt_role_ids] * turn.prompt_is_content
            if self.config.keep is not None:
                weights = weights * np.asarray(self.config.keep(rollout, turn), bool)
            answered = slice(span.new, span.completion)
            ce_weights[span.sample][answered] = weights[answered]
        for sample, weights in zip(rollout.samples, ce_weights, strict=True):
            sample.ce_weights = weights
