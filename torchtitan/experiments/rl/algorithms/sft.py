"""SFT: cross-entropy on tokens that a teacher sampled, or on conversations of a dataset."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import MinLen

from torchtitan.experiments.rl.algorithms.base import Algorithm, Teacher, check_frozen, connect
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, LivePolicy
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.types import Role


class SFT(Algorithm):
    """Supervised learning on the rollouts of a frozen teacher.

    Sequence-level distillation, Kim and Rush, arXiv:1606.07947.

        ℓ = -logp    of every token the teacher sampled

    The teacher takes the policy's place in the task's envs, so tools and several turns work as in
    any rollout. Its tokens have no policy version and never go stale. It needs no reward: filter by
    one to keep only what succeeded.
    """

    action_component: ClassVar[str] = "ce"
    needs_group: ClassVar[bool] = False
    replaces: ClassVar[tuple[str, ...]] = ("loss_mask", "generator_logprobs", "temperature")

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        teacher: Teacher = field(default_factory=LivePolicy)
        """Model to sample from, a FrozenModel or HostedModel with the policy's tokenizer."""

        def frozen_source(self) -> FrozenModel | HostedModel | None:
            return self.teacher if isinstance(self.teacher, FrozenModel | HostedModel) else None

        def validate(self, *, field: str, **task_fields) -> None:
            super(SFT.Config, self).validate(field=field, **task_fields)
            check_frozen(
                self.teacher,
                field=f"{field}.teacher",
                why="the policy's own samples teach it nothing",
                max_rollout_tokens=task_fields.get("max_rollout_tokens"),
            )

    config: Config

    async def setup(self, policy: PolicyClient) -> None:
        await connect(policy, self.config.teacher)

    async def score_rollout(self, rollout: Rollout) -> None:
        for sample in rollout.samples:
            sample.ce_weights = sample.loss_mask.astype(np.float32)
            # The policy sampled none of these tokens.
            sample.loss_mask = np.zeros(len(sample), bool)
            sample.generator_logprobs = np.zeros(len(sample), np.float32)
            # The teacher's logits were divided by its own temperature, the policy's are not.
            sample.temperature = 1.0


class StaticSFT(Algorithm):
    """Supervised learning on conversations of a dataset, without a teacher.

        ℓ = -logp    of every token of the chosen roles' messages

    These are the tokens that the policy would sample of an assistant's message, with the end of its
    turn, and the content of other roles' messages. A `DemonstrationTask` renders the conversations
    and sets the weights.
    """

    action_component: ClassVar[str] = "ce"
    needs_group: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        roles: Annotated[tuple[Role, ...], MinLen(1)] = ("assistant",)
        """Roles whose messages are trained on."""

        def needs_roles(self) -> str | None:
            return "roles"

    config: Config

    async def score_rollout(self, rollout: Rollout) -> None:
        raise ValueError(
            "StaticSFT learns from conversations of a dataset: use a DemonstrationTask, or SFT and "
            "a teacher"
        )
