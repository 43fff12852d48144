"""Rules of an agent's rollout for requests: what it refuses, leaves out and counts."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from renderers import Message, Renderer

from torchtitan.experiments.rl.envs.special_texts import control_token_in
from torchtitan.experiments.rl.gateway.request import (
    LIMIT_CODES,
    TASKS_OWN,
    WISHES,
    ModelReply,
    ModelRequest,
    Refusal,
    is_unmet,
    unavailable,
)
from torchtitan.experiments.rl.printable import one_sentence, shown
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig

logger = logging.getLogger(__name__)

MAX_IGNORED_NAMES = 32
"""Maximum number of names that ignored fields are counted by; a program may send any."""


class Notices:
    """Kinds of what has happened to the agents of a task, each of which is logged once."""

    def __init__(self, task: str = "agent"):
        """Have seen nothing.

        Args:
            task: name of the task, for the log.
        """
        self.task = task
        self._refusals: set[tuple[str, str]] = set()
        self._ignored: set[str] = set()

    def refused(self, refusal: Refusal) -> None:
        """Log the first refusal of each code and field.

        A limit of the run that was reached is no fault of the agent's, so it is no warning.
        """
        field = re.sub(r"\[.*", "", refusal.field or "")
        if (refusal.code, field) in self._refusals:
            return
        self._refusals.add((refusal.code, field))
        level = logging.INFO if refusal.code in LIMIT_CODES else logging.WARNING
        logger.log(
            level,
            "task %s: a call of an agent was refused: %s (others like it are counted as "
            "agent/%s/refused and in the rollouts' refusals)",
            self.task,
            one_sentence(str(refusal)),
            self.task,
        )

    def ignored(self, name: str) -> str:
        """Return the name by which an ignored field is counted, and log the first of each."""
        if name not in self._ignored:
            if len(self._ignored) == MAX_IGNORED_NAMES or not re.fullmatch(r"[\w -]{1,64}", name):
                return "other"
            self._ignored.add(name)
            logger.warning(
                "task %s: an agent sends %s, which nothing here reads: its calls are answered "
                "without, and counted as agent/%s/ignored/%s",
                self.task,
                name,
                self.task,
                name,
            )
        return name


class RequestRules:
    """Rules of one rollout for the requests of its agent."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        noise: Mapping[str, str],
        refused_fields: Sequence[str],
        counts: Counter[str],
        notices: Notices,
    ):
        """Compile the patterns of noise.

        Args:
            noise: patterns by name. What one matches in a system message is left out.
            refused_fields: fields of `request.WISHES` that a request is refused for.
            counts: counts of the rollout (`Rollout.calls`), to which the rules add theirs.
            notices: kinds that the rollouts of the task have logged.
        """
        self.sampling: SamplingConfig | None = None
        """Sampling settings of the rollout, once it is open."""
        self._renderer = renderer
        self._noise = {name: re.compile(pattern) for name, pattern in noise.items()}
        self._refused_fields = refused_fields
        self._counts = counts
        self._notices = notices

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

    def count_ignored(self, request: ModelRequest) -> None:
        """Count what a request has and nothing here reads, by name."""
        for name in request.ignored:
            self._counts[f"ignored/{self._notices.ignored(name)}"] += 1

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
