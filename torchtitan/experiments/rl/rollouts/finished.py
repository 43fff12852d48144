"""Rollouts that have ended: their arrays are read-only, and any other change to them is found, named and undone.

Reward functions and algorithms see the same `Rollout` objects that are trained on and recorded. Copies of all tokens for each
of them would cost more than the rest of a rollout's scoring. So its state is remembered: which objects it is made of, and the
content of its messages.
"""

import marshal
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from operator import attrgetter, is_
from typing import Any, TypeVar

import numpy as np

from torchtitan.experiments.rl.rollouts.types import Completion, Rollout, RolloutGroup, RolloutTurn
from torchtitan.experiments.rl.types import CREDIT_STREAMS, STREAMS, TrainingSample

T = TypeVar("T")

GROUP_FIELDS = tuple(field.name for field in fields(RolloutGroup))
OWN_FIELDS = tuple(field.name for field in fields(Rollout))
TURN_FIELDS = (
    *(field.name for field in fields(RolloutTurn)),
    *(f"completion.{field.name}" for field in fields(Completion)),
)
SAMPLE_FIELDS = tuple(field.name for field in fields(TrainingSample) if field.name not in CREDIT_STREAMS)

_own_values, _turn_values, _sample_values = attrgetter(*OWN_FIELDS), attrgetter(*TURN_FIELDS), attrgetter(*SAMPLE_FIELDS)
_turn_arrays = attrgetter(
    "prompt_token_ids",
    "prompt_role_ids",
    "prompt_is_content",
    "prompt_message_indices",
    "completion.token_ids",
    "completion.logprobs",
    "completion.policy_versions",
)
_sample_arrays = attrgetter(*(name for name in STREAMS if name not in CREDIT_STREAMS))

_credit_of = attrgetter(*CREDIT_STREAMS)

MAX_DEPTH = 20
"""Levels of a message whose content is remembered where `marshal` does not take it."""


class FinishedRollout:
    """The state of a rollout that has ended. Makes its arrays read-only, but for the streams that algorithms write."""

    __slots__ = ("_arrays", "_contents", "_lists", "_own", "_parts", "_samples", "_turns", "rollout")

    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self._own = _own_values(rollout)
        self._turns = [(turn, _turn_values(turn)) for turn in rollout.turns]
        self._samples = [(sample, _sample_values(sample)) for sample in rollout.samples]
        self._lists = _lists(rollout)
        self._arrays = make_read_only(rollout)
        self._parts = _parts(rollout)
        self._contents = _contents(self._parts)

    def change(self, *, allowed: Collection[str] = ()) -> str | None:
        """What was changed since, such as "status" or "turns[1].prompt_messages"; None: nothing.

        Args:
            allowed: fields of the rollout and of its samples that may change.
        """
        try:
            return self._change(allowed)
        except (AttributeError, TypeError) as error:  # a field was deleted
            return f"its fields ({error})"

    def restore(self) -> None:
        """Undo every change, but for what was written to an array that was made writable, or to a message with values that JSON
        does not have."""
        for name, value in zip(OWN_FIELDS, self._own, strict=True):
            setattr(self.rollout, name, value)
        for entries, before in self._lists:
            entries[:] = before
        for owner, names, values in self._records():
            for name, value in zip(names, values, strict=True):
                path, _, attribute = name.rpartition(".")
                setattr(getattr(owner, path) if path else owner, attribute, value)
        for array in self._arrays:
            array.flags.writeable = False
        if isinstance(self._contents, bytes) and _contents(self._parts) != self._contents:
            for part, before in zip(self._parts, marshal.loads(self._contents), strict=True):
                part.clear()
                part.update(before)

    def _change(self, allowed: Collection[str]) -> str | None:
        if found := _differing(OWN_FIELDS, self._own, _own_values(self.rollout), allowed):
            return found
        for entries, before in self._lists:
            if len(entries) != len(before) or not all(map(is_, entries, before)):
                return self._name_of(entries)
        for index, (turn, values) in enumerate(self._turns):
            if not all(map(is_, values, now := _turn_values(turn))):
                return f"turns[{index}].{_differing(TURN_FIELDS, values, now, ())}"
        for index, (sample, values) in enumerate(self._samples):
            if found := _differing(SAMPLE_FIELDS, values, _sample_values(sample), allowed):
                return f"samples[{index}].{found}"
        if any(array.flags.writeable for array in self._arrays):
            return "a read-only array"
        if _contents(self._parts) != self._contents:
            return "a message or a reward component of the env"
        return None

    def _records(self) -> Iterator[tuple[Any, tuple[str, ...], tuple[Any, ...]]]:
        for turn, values in self._turns:
            yield turn, TURN_FIELDS, values
        for sample, values in self._samples:
            yield sample, SAMPLE_FIELDS, values

    def _name_of(self, entries: Any) -> str:
        if entries is self.rollout.turns:
            return "turns"
        return "samples" if entries is self.rollout.samples else "the messages or tools of a turn"


class FinishedGroup:
    """The state of a group whose rollouts have ended: finds, names and undoes changes, as `FinishedRollout` does."""

    def __init__(self, group: RolloutGroup):
        self._group = group
        self._values = attrgetter(*GROUP_FIELDS)(group)
        self._rollouts = [FinishedRollout(rollout) for rollout in group.rollouts]
        self._credit = [(sample, _credit_of(sample)) for rollout in group.rollouts for sample in rollout.samples]
        self.statuses = [rollout.status for rollout in group.rollouts]
        self.errors = [rollout.error for rollout in group.rollouts]

    def change(self, *, allowed: tuple[str, ...] = (), credit_too: bool = False) -> str | None:
        """What was changed, and of which rollout; None: nothing.

        Args:
            allowed: fields of the rollouts that may change.
            credit_too: credit may not change either.
        """
        for name, value in zip(GROUP_FIELDS, self._values, strict=True):
            if getattr(self._group, name, None) is not value:
                return f"{name} of its group"
        now, before = self._group.rollouts, [finished.rollout for finished in self._rollouts]
        if len(now) != len(before) or any(rollout is not known for rollout, known in zip(now, before, strict=True)):
            return "the list of rollouts of its group"
        for finished in self._rollouts:
            if change := finished.change(allowed=allowed):
                return f"{change} of rollout {finished.rollout.rollout_id}, which has ended"
        for sample, credit in self._credit if credit_too else ():
            if not all(map(is_, credit, _credit_of(sample))):
                return f"the credit of rollout {sample.rollout_id}"
        return None

    def restore(self, *, credit_too: bool = False) -> None:
        """Undo every change."""
        for sample, credit in self._credit if credit_too else ():
            for name, values in zip(CREDIT_STREAMS, credit, strict=True):
                setattr(sample, name, values)
        for name, value in zip(GROUP_FIELDS, self._values, strict=True):
            setattr(self._group, name, value)
        self._group.rollouts[:] = [finished.rollout for finished in self._rollouts]
        for finished in self._rollouts:
            finished.restore()


class ExampleContent:
    """What reward functions are given of an example, each the same objects: finds changes, and undoes what JSON can hold."""

    def __init__(self, env_input: Any, info: Any):
        self._parts = {"env_input": env_input, "info": info}
        self._before = {name: _contents([part]) for name, part in self._parts.items()}

    def change(self) -> str | None:
        """Which part was changed; None: neither. What can be undone is."""
        changed = [name for name, part in self._parts.items() if _contents([part]) != self._before[name]]
        for name in changed:
            part, before = self._parts[name], self._before[name]
            if isinstance(before, bytes) and isinstance(part, dict | list):
                part.clear()
                (content,) = marshal.loads(before)
                part.update(content) if isinstance(part, dict) else part.extend(content)
            else:
                self._before[name] = _contents([part])
        return changed[0] if changed else None


def leaving_unchanged(group: RolloutGroup, call: Callable[[], T]) -> T:
    """``call()``, which is given a group that was scored, and may change nothing of it.

    Raises:
        ValueError: it changed something, which is undone; says what.
        BaseException: whatever it raised.
    """
    finished = FinishedGroup(group)
    try:
        value = call()
    finally:
        if change := finished.change(credit_too=True):
            finished.restore(credit_too=True)
    if change:
        raise ValueError(f"it changed {change}")
    return value


def make_read_only(rollout: Rollout) -> list[np.ndarray]:
    """Its arrays, which are read-only now, but for the streams that algorithms write."""
    arrays = []
    for get, records in ((_turn_arrays, rollout.turns), (_sample_arrays, rollout.samples)):
        for record in records:
            for array in get(record):
                if type(array) is np.ndarray:  # a stream may be None
                    array.setflags(write=False)
                    arrays.append(array)
    return arrays


def _parts(rollout: Rollout) -> list[dict[str, Any]]:
    """The dicts that a rollout holds: messages, and what the env rewarded."""
    if not rollout.turns:
        return []
    last = rollout.turns[-1]
    conversation = [*last.prompt_messages, last.assistant_message, *last.env_messages]
    parts: list[Any] = list(conversation)
    for turn in rollout.turns:
        parts.append(turn.reward_components)
        start = len(turn.prompt_messages)
        own = [*turn.prompt_messages, turn.assistant_message, *turn.env_messages]
        if conversation[: len(own)] != own or conversation[start] is not turn.assistant_message:  # its history was cut
            parts += own
    return parts


def _lists(rollout: Rollout) -> list[tuple[list[Any], tuple[Any, ...]]]:
    """The lists that a rollout is made of, each with what it holds."""
    lists: list[Any] = [rollout.turns, rollout.samples]
    for turn in rollout.turns:
        lists += (turn.prompt_messages, turn.env_messages)
        if turn.tools is not None and turn.tools is not lists[-1]:
            lists.append(turn.tools)
    return [(entries, tuple(entries)) for entries in lists]


def _differing(names: tuple[str, ...], before: tuple, now: tuple, allowed: Collection[str]) -> str | None:
    if all(map(is_, before, now)):
        return None
    pairs = zip(names, before, now, strict=True)
    return next((name for name, old, new in pairs if old is not new and name not in allowed), None)


def _contents(parts: list[Any]) -> Any:
    """A copy of the messages' content that can be compared: in one piece where they hold nothing but what JSON does."""
    try:
        return marshal.dumps(parts, 2)  # 2: later formats depend on how often an object is referred to
    except ValueError:
        return [_copied(part) for part in parts]


def _copied(value: Any, depth: int = 0) -> Any:
    """Nested tuples; another object stands for itself, by its identity."""
    if depth < MAX_DEPTH and isinstance(value, dict):
        return tuple((key, _copied(entry, depth + 1)) for key, entry in value.items())
    if depth < MAX_DEPTH and isinstance(value, list | tuple):
        return tuple(_copied(entry, depth + 1) for entry in value)
    return value if type(value) in (str, int, float, bool, bytes, type(None)) else id(value)
