"""Echo: reinforcement learning, and cross-entropy on what the environment answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from annotated_types import Gt
from renderers import Message

from torchtitan.experiments.rl.algorithms.grpo import GRPO
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutTurn
from torchtitan.experiments.rl.types import ROLES, Role

RoleWeight = Annotated[float, Gt(0), Cure("to leave a role out, don't name it")]


class Echo(GRPO):
    """Environment cross-entropy hybrid objective (Shrivastava et al., arXiv:2605.24517): GRPO's credit for what the policy
    sampled, and cross-entropy, with a small weight by role, on what the environment answered.

        ℓ = ℓ_rl(sampled tokens) + alpha[role]·(-logp)    on body tokens of env messages after the first sampled token

    What a tool that ``tool_names`` has answered, weighs by the tool's name instead.

    Only bodies count, not the template around them. Where a prompt was rendered anew and starts a sample of its own, what
    stands in it comes before that sample's first sampled token, and has no weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        alpha: dict[Role, RoleWeight] = field(default_factory=lambda: {"tool": 0.1})
        """Weight by message role. Setting any role replaces the whole table. An assistant's is one that the env gave."""
        tool_names: dict[str, RoleWeight] = field(default_factory=dict)
        """Weight of what a tool answers by the tool's name, in the place of ``alpha["tool"]``. Other tools have that one, and
        none if ``alpha`` doesn't name the role."""
        keep: Callable[[Rollout, RolloutTurn], bool | np.ndarray] | None = None
        """A user's filter: whether the env's messages before this turn are trained on; or bool [P], for each token of the
        turn's prompt. Importable: defined at the top level of a module."""

        def needs_roles(self) -> str | None:
            return "alpha" if self.alpha else "tool_names"

        def validate(self, *, field: str, **context) -> None:
            super(Echo.Config, self).validate(field=field, **context)
            if not (self.alpha or self.tool_names):
                raise ConfigError(
                    f"{field}.alpha",
                    self.alpha,
                    'no role has a weight: name one, such as {"tool": 0.1}, or use GRPO',
                )

    config: Config

    async def score_rollout(self, rollout: Rollout) -> None:
        ce_weights = [np.zeros(len(sample), np.float32) for sample in rollout.samples]
        alpha = np.array(
            [*(self.config.alpha.get(role, 0.0) for role in ROLES), 0.0], np.float32
        )  # -1, no role, is the last
        for turn, span in turn_spans(rollout.turns):
            if span.new == 0:  # a sample's first prompt: nothing was sampled before it
                continue
            weights = alpha[turn.prompt_role_ids]
            if self.config.tool_names and turn.prompt_message_indices is not None:
                names = [*tool_names(turn.prompt_messages), None]  # -1, of no message, is the last
                by_tool = self.config.tool_names
                of_message = np.array(
                    [-1.0 if name is None else by_tool.get(name, -1.0) for name in names],
                    np.float32,
                )
                by_name = of_message[turn.prompt_message_indices]
                weights = np.where(by_name < 0, weights, by_name)
            weights = weights * turn.prompt_is_content
            if self.config.keep is not None:
                weights = weights * checked_mask(self.config.keep(rollout, turn), len(weights))
            answered = slice(span.new, span.completion)
            ce_weights[span.sample][answered] = weights[answered]
        for sample, weights in zip(rollout.samples, ce_weights, strict=True):
            sample.ce_weights = weights


def checked_mask(mask: object, tokens: int) -> np.ndarray:
    """What ``keep`` returned, as bool [] or bool [tokens].

    Raises:
        TypeError, ValueError: it is neither.
    """
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"keep returned {array.dtype} values, want one bool, or one for each token of the turn's prompt"
        )
    if array.shape not in ((), (tokens,)):
        raise ValueError(
            f"keep returned the shape {array.shape}, want one bool, or {tokens}: the tokens of the turn's prompt"
        )
    return array


def tool_names(messages: Sequence[Message]) -> list[str | None]:
    """For each message the name of the tool that it is the answer of; None where it is no tool's, or that is not known.

    A tool's message says it itself (``name``), or names the call that it answers (``tool_call_id``). One that does neither is
    taken for the answer to the first call of the last assistant message that nothing has answered.
    """
    names: list[str | None] = []
    open_calls: dict[str, str] = {}
    for message in messages:
        fields: Mapping = message
        if fields["role"] == "assistant":
            open_calls = {}
            for index, call in enumerate(fields.get("tool_calls") or ()):
                open_calls[str(call.get("id") or index)] = call.get("function", call)["name"]
        names.append(_answering(fields, open_calls) if fields["role"] == "tool" else None)
    return names


def _answering(message: Mapping, open_calls: dict[str, str]) -> str | None:
    """The tool's name; the call that the message answers is taken from ``open_calls``."""
    own, call = message.get("name"), message.get("tool_call_id")
    if call is None:  # the first of that name, where the message has one
        call = next((key for key, name in open_calls.items() if own is None or name == own), None)
    called = open_calls.pop(str(call), None)
    return own if isinstance(own, str) else called
