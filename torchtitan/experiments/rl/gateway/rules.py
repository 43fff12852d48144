"""Rules of an agent's rollout for requests: what it refuses, leaves out and counts."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from renderers import Message, Renderer

from torchtitan.experiments.rl.envs.special_texts import control_token_in
from torchtitan.experiments.rl.gateway.request import (
    TASKS_OWN,
    WISHES,
    ModelReply,
    ModelRequest,
    Refusal,
    is_unmet,
    unavailable,
)
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig

logger = logging.getLogger(__name__)


class RequestRules:
    """Rules of one rollout for the requests of its agent."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        noise: Mapping[str, str],
        refused_fields: Sequence[str],
        counts: Counter[str],
    ):
        """Compile the patterns of noise.

        Args:
            noise: patterns by name. What one matches in a system message is left out.
            refused_fields: fields of `request.WISHES` that a request is refused for.
            counts: counts of the rollout (`Rollout.calls`), to which the rules add theirs.
        """
        self.sampling: SamplingConfig | None = None
        """Sampling settings of the rollout, once it is open."""
        self._renderer = renderer
        self._noise = {name: re.compile(pattern) for name, pattern in noise.items()}
        self._refused_fields = refused_fields
        self._counts = counts

    def check_fields(self, request: ModelRequest, *, asks_policy: bool) -> None:
        """Refuse a request whose fields want another sampling than the rollout's.

        Args:
            asks_policy: True if the request is for the policy, whose seeds follow from the run's.

        Raises:
            Refusal: names the field, the value and the cure.
        """
        if request.seed is not None and asks_policy:
            cure = "leave it out: the seeds of the policy follow from the run's"
            raise Refusal(f"seed = {request.seed}: {cure}", code="unsupported_value", field="seed")
        for name, value in request.sampling.items():
            if value != self._own_value(name, value):
                raise unavailable(name, value, TASKS_OWN[name].cure)
        for name in self._refused_fields:
            value = request.wishes.get(name)
            if value is not None and value != self._own_value(name, value):
                raise unavailable(name, value, WISHES[name].cure)

    def without_noise(self, messages: list[Message], *, counted: bool = True) -> list[Message]:
        """Return the messages without what the patterns of noise match in system messages.

        Args:
            counted: True to count what is left out; False if no model is asked.
        """
        if not self._noise:
            return messages
        return [
            self._without_noise(message, counted)
            if message["role"] in ("system", "developer")
            else message
            for message in messages
        ]

    def _without_noise(self, message: Message, counted: bool) -> Message:
        for name, pattern in self._noise.items():
            rest, count = pattern.subn("", message["content"])
            if not count:
                continue
            if counted:
                self._count_noise(name, count, example=pattern.search(message["content"]))
            message = message | {"content": rest}
        return message

    def _count_noise(self, name: str, count: int, *, example: re.Match[str] | None) -> None:
        """Count texts that were left out, and log the first of each name."""
        key = f"noise/{name}"
        if not self._counts[key]:
            logger.info("noise %r: left out %s", name, shown(example and example[0]))
        self._counts[key] += count

    def count_special_texts(self, new: list[Message]) -> None:
        """Count a request whose new messages have the text of a special token, shown as text."""
        if control_token_in(new, self._renderer) is not None:
            self._counts["special_texts"] += 1

    def count_wishes(self, request: ModelRequest, reply: ModelReply) -> None:
        """Count the wishes of a request, and those that its answer does not meet."""
        for name, value in request.wishes.items():
            if value != self._own_value(name, value):
                self._counts[f"wish/{name}"] += 1
                self._counts[f"unmet/{name}"] += is_unmet(name, value, reply)

    def _own_value(self, name: str, value: object) -> object:
        """Return the rollout's own value of a field of TASKS_OWN or WISHES; None if it has none.

        For ``chat_template_kwargs``, whose ``value`` is a dict, it is a dict of the rollout's own
        values for the same keys.
        """
        settings = getattr(self._renderer, "config", None)
        if name == "chat_template_kwargs":
            keys = value if isinstance(value, dict) else {}
            return {key: getattr(settings, key, None) for key in keys}
        return getattr(self.sampling, name, getattr(settings, name, None))


def check_stop(request: ModelRequest, session: PolicySession) -> None:
    """Refuse a client's stop texts if the engine of the model does not look for texts.

    Raises:
        Refusal: names the field, the texts and the cure.
    """
    if request.stop and not session.stops_at_texts:
        name = request.stop_field
        cure = (
            "the run's engine does not look for texts: leave it out, or name tokens in the task's "
            "sampling.stop_token_ids"
        )
        raise Refusal(
            f"{name} = {shown(request.stop)}: {cure}", code="unsupported_value", field=name
        )
