"""StaticSFT: cross-entropy on conversations of a dataset."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import MinLen

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.types import ROLES


class StaticSFT(Algorithm):
    """Supervised learning on conversations that are given, by no teacher.

        ℓ = -logp    of every token of the chosen roles' messages

    Of an assistant's message that is what the policy would sample, the end of its turn included; of others it is the body. A
    `DemonstrationTask` renders the conversations and sets the weights.
    """

    action_component: ClassVar[str] = "ce"
    needs_group: ClassVar[bool] = False

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        roles: Annotated[tuple[str, ...], MinLen(1)] = ("assistant",)
        """Whose messages are trained on."""

        def needs_roles(self) -> str | None:
            return "roles"

        def validate(self, *, field: str, **context) -> None:
            super(StaticSFT.Config, self).validate(field=field, **context)
            for role in self.roles:
                if role not in ROLES:
                    raise ConfigError(f"{field}.roles", role, f"is no role: name some of {', '.join(ROLES)}")

    config: Config

    async def score_rollout(self, rollout: Rollout) -> None:
        raise ValueError("StaticSFT learns from conversations of a dataset: use a DemonstrationTask, or SFT and a teacher")
