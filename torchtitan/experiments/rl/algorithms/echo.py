"""Echo: reinforcement learning, and cross-entropy on the environment's answers."""

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
    """Environment cross-entropy hybrid objective (Shrivastava et al., arXiv:2605.24517).

        ℓ = ℓ_rl(sampled tokens) + alpha[role]·(-logp)

    GRPO's credit for sampled tokens, and cross-entropy, with a small weight by role, on tokens that
    the env answered after the first sampled token. An answer of a tool in ``tool_names`` is
    weighted by the tool's name instead.

    Only the content of messages counts, and not the template around it. If a prompt was rendered
    anew and starts a sample of its own, its messages come before that sample's first sampled token,
    and have no weight.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        alpha: dict[Role, RoleWeight] = field(default_factory=lambda: {"tool": 0.1})
        """Weight by message role. Setting any role replaces the whole table. Messages of the
        assistant are those that the env gave."""
        tool_names: dict[str, RoleWeight] = field(default_factory=dict)
        """Weight of a tool's answers by the tool's name, in place of ``alpha["tool"]``, which other
        tools have."""
        keep: Callable[[Rollout, RolloutTurn], bool | np.ndarray] | None = None
        """Function that says whether the env's messages before a turn are trained on, or which
        tokens of the turn's prompt are, bool [P]. It stands at the top level of a module, so that
        processes can import it. None keeps all."""

        def needs_roles(self) -> str | None:
            return "alpha" if self.alpha else "tool_names"

        def validate(self, *, field: str, **task_fields) -> None:
            super(Echo.Config, self).validate(field=field, **task_fields)
            if not (self.alpha or self.tool_names):
                raise ConfigError(
                    f"{field}.alpha",
                    self.alpha,
                    'no role has a weight: name one, such as {"tool": 0.1}, or use GRPO',
                )

    config: Config

    async def score_rollout(self, rollout: Rollout) -> None:
        ce_weights = [np.zeros(len(sample), np.float32) for sample in rollout.samples]
        # -1, of no role, is the last entry.
        alpha = np.array([*(self.config.alpha.get(role, 0.0) for role in ROLES), 0.0], np.float32)
        for turn, span in turn_spans(rollout.turns):
            if span.new == 0:  # a sample's first prompt: nothing was sampled before it
                continue
            weights = alpha[turn.prompt_role_ids]
            if self.config.tool_names and turn.prompt_message_indices is not None:
                by_tool = self._weights_by_tool(turn)[turn.prompt_message_indices]
                weights = np.where(by_tool < 0, weights, by_tool)
            weights = weights * turn.prompt_is_content
            if self.config.keep is not None:
                weights = weights * checked_mask(self.config.keep(rollout, turn), len(weights))
            answered = slice(span.new, span.completion)
            ce_weights[span.sample][answered] = weights[answered]
        for sample, weights in zip(rollout.samples, ce_weights, strict=True):
            sample.ce_weights = weights

    def _weights_by_tool(self, turn: RolloutTurn) -> np.ndarray:
        """Return the weight of each prompt message, and -1 where ``tool_names`` does not have it.

        The last entry is -1 too: the index of tokens of no message.
        """
        names = tool_names(turn.prompt_messages)
        weights = [self.config.tool_names.get(name, -1.0) if name else -1.0 for name in names]
        return np.array([*weights, -1.0], np.float32)


def checked_mask(mask: object, tokens: int) -> np.ndarray:
    """Return the result of ``keep``, as bool [] or bool [tokens].

    Raises:
        TypeError: ``mask`` does not hold bools.
        ValueError: ``mask`` has another shape.
    """
    array = np.asarray(mask)
    if array.dtype != np.bool_:
        raise TypeError(
            f"keep returned {array.dtype} values, want one bool, or one for each token of the "
            "turn's prompt"
        )
    if array.shape not in ((), (tokens,)):
        raise ValueError(
            f"keep returned the shape {array.shape}, want one bool, or {tokens}: the tokens of the "
            "turn's prompt"
        )
    return array


def tool_names(messages: Sequence[Message]) -> list[str | None]:
    """Return for each message the name of the tool that it is an answer of, or None.

    A tool's message gives the name itself (``name``), or the id of the call that it answers
    (``tool_call_id``). A message with neither is taken for the answer to the first unanswered call
    of the last assistant message.
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
    """Return the name of the tool that the message is of, and close the call that it answers."""
    given = message.get("name")
    call_id = message.get("tool_call_id")
    if call_id is None:  # the first open call, of the given name if there is one
        fitting = (key for key, name in open_calls.items() if given in (None, name))
        call_id = next(fitting, None)
    called = open_calls.pop(str(call_id), None)
    return given if isinstance(given, str) else called
