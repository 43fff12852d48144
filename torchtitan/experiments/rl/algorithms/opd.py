"""OPD: on-policy distillation. A teacher scores the tokens that the policy sampled."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from torchtitan.experiments.rl.algorithms.base import (
    Algorithm,
    Teacher,
    check_frozen,
    connect,
    set_ref_kl_streams,
)
from torchtitan.experiments.rl.ask.call import contained
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import HostedModel, LivePolicy
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout


class OPD(Algorithm):
    """On-policy distillation (Agarwal et al., arXiv:2306.13649).

    Token by token, as in Thinking Machines, "On-Policy Distillation", 2025.

    The policy samples, the teacher scores the sampled tokens, and the ref_kl component descends

        KL(policy ‖ teacher) = E[logp - ref_logp]

    It needs no reward: the rubric of a task, if it has one, only measures.
    """

    action_component: ClassVar[str] = "ref_kl"
    needs_group: ClassVar[bool] = False
    asks_models: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        teacher: Teacher = field(default_factory=LivePolicy)
        """Model to learn from, a FrozenModel or HostedModel with the policy's tokenizer."""

        def validate(self, *, field: str, policy_path: str | None = None, **task_fields) -> None:
            super(OPD.Config, self).validate(field=field, policy_path=policy_path, **task_fields)
            check_frozen(
                self.teacher,
                field=f"{field}.teacher",
                why="the policy as its own teacher has a KL of zero and nothing to learn",
                max_rollout_tokens=task_fields.get("max_rollout_tokens"),
            )
            if not isinstance(self.teacher, HostedModel) or policy_path is None:
                return
            if Path(self.teacher.path).resolve() == Path(policy_path).resolve():
                cure = "the policy starts here, so the KL is zero: name another model, or use OPSD"
                raise ConfigError(f"{field}.teacher.path", self.teacher.path, cure)

    config: Config

    async def setup(self, policy: PolicyClient) -> None:
        self._teacher = await connect(policy, self.config.teacher)

    async def score_rollout(self, rollout: Rollout) -> None:
        references = await asyncio.gather(
            *(contained(self._teacher.score(sample.token_ids)) for sample in rollout.samples)
        )
        for sample, ref_logprobs in zip(rollout.samples, references, strict=True):
            set_ref_kl_streams(sample, ref_logprobs)
