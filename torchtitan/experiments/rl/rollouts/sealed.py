"""Rollouts that have ended, as reward functions, rubrics, algorithms, filters and samplers are given them.

What is trained on and recorded is the original. User code gets a copy whose fields can't be set and whose arrays are read-only,
so an attempt fails in the line that makes it. Messages, and the example, are copies: what is done to them has no effect.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, ClassVar, NoReturn

import numpy as np

from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutTurn,
)
from torchtitan.experiments.rl.types import CREDIT_STREAMS, STREAMS, TrainingSample

LIBRARY = f"{__name__.rpartition('.rollouts.')[0]}."
PLAIN = (str, int, float, bool, type(None))


def is_own(part: Any) -> bool:
    """Whether a function or an object is of this library: it changes nothing, and gets the originals."""
    return str(getattr(getattr(part, "func", part), "__module__", "")).startswith(LIBRARY)


def copied(value: Any, of_others: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """A copy of dicts and lists within each other, in a tenth of the time of ``copy.deepcopy``.

    Args:
        of_others: copies what is neither one of these nor a plain value.
    """
    if type(value) is dict:
        return {
            key: entry if type(entry) is str else copied(entry, of_others)
            for key, entry in value.items()
        }
    if type(value) is list:
        return [copied(entry, of_others) for entry in value]
    return value if type(value) in PLAIN else of_others(value)


def copied_example(value: Any) -> Any:
    """A copy of an example's ``env_input`` or ``info``. Objects that JSON does not have are shared: they may be large."""
    return copied(value, lambda other: other)


class _Sealed:
    """A record whose fields can't be set. To make, copy or pickle one makes a plain record."""

    __slots__ = ()
    plain: ClassVar[type]
    names: ClassVar[tuple[str, ...]]
    settable: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.plain(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (self.plain, {name: getattr(self, name) for name in self.names})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.settable:
            self.__delattr__(name)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"can't change {name} of a rollout that has ended ({self.plain.__name__})"
        )


def _sealed(plain: type, *settable: str) -> type[_Sealed]:
    names = tuple(field.name for field in fields(plain))
    # By the name of the plain record, as Python's own errors say it.
    return type(
        plain.__name__,
        (_Sealed, plain),
        {"__slots__": (), "plain": plain, "names": names, "settable": settable},
    )


_SealedGroup, _SealedTurn, _SealedSample = (
    _sealed(RolloutGroup),
    _sealed(RolloutTurn),
    _sealed(TrainingSample),
)
_SealedRollout, _RubricsRollout = _sealed(Rollout), _sealed(Rollout, "status", "error", "traceback")
_SealedCompletion = _sealed(Completion)


def _made(plain: type, values: dict[str, Any]) -> Any:
    return plain(**values)


def _seal(cls: type[_Sealed], record: Any, **values: Any) -> Any:
    sealed = object.__new__(cls)
    for name in cls.names:
        value = values[name] if name in values else getattr(record, name)
        if type(value) is np.ndarray:
            if name not in CREDIT_STREAMS:  # an algorithm may still change these in place
                value.flags.writeable = False
            value = value.view()
            value.flags.writeable = False
        object.__setattr__(sealed, name, value)
    return sealed


def sealed_rollout(
    rollout: Rollout, *, for_rubric: bool = False, lends_samples: bool = False
) -> Rollout:
    """
    Args:
        for_rubric: its status and error can be set: `tasks/task.py` reads them.
        lends_samples: its samples can be written; ``take_samples`` reads them.
    """
    copies: dict[int, Any] = {}

    def once(message: Any) -> Any:
        """A copy; the same one for all turns."""
        if id(message) not in copies:
            copies[id(message)] = copied_example(message)
        return copies[id(message)]

    turns = tuple(
        _seal(
            _SealedTurn,
            turn,
            prompt_messages=[once(message) for message in turn.prompt_messages],
            assistant_message=once(turn.assistant_message),
            env_messages=[once(message) for message in turn.env_messages],
            tools=once(turn.tools),
            reward_components=dict(turn.reward_components),
            completion=_seal(_SealedCompletion, turn.completion),
        )
        for turn in rollout.turns
    )
    return _seal(
        _RubricsRollout if for_rubric else _SealedRollout,
        rollout,
        data_sample=_copied_sample(rollout.data_sample),
        turns=turns,
        samples=tuple(
            _lent(sample) if lends_samples else _seal(_SealedSample, sample)
            for sample in rollout.samples
        ),
        reward_components=dict(rollout.reward_components),
        metadata=copied(rollout.metadata),
    )


def sealed_group(group: RolloutGroup, *, lends_samples: bool = False) -> RolloutGroup:
    """The group with each rollout as ``sealed_rollout`` gives it, in a list of its own."""
    return _seal(
        _SealedGroup,
        group,
        data_sample=_copied_sample(group.data_sample),
        rollouts=[
            sealed_rollout(rollout, lends_samples=lends_samples) for rollout in group.rollouts
        ],
        costs=dict(group.costs),
    )


def take_samples(
    rollout: Rollout,
    lent: Rollout,
    check: Callable[[TrainingSample], None],
    *,
    allowed: Collection[str] = (),
) -> None:
    """Give a rollout what an algorithm has written to the samples of its copy.

    Args:
        check: refuses what can't be trained on.
        allowed: fields that it may replace beside the credit.

    Raises:
        ValueError: it has replaced another field, or ``check`` refuses a sample; the rollout is as it was.
    """
    for index, (sample, written) in enumerate(zip(rollout.samples, lent.samples, strict=True)):
        for name in _SealedSample.names:
            if getattr(written, name, None) is getattr(sample, name):
                continue
            if name not in CREDIT_STREAMS and name not in allowed:
                raise ValueError(f"changed samples[{index}].{name} of a rollout that has ended")
        check(written)
    for sample, written in zip(rollout.samples, lent.samples, strict=True):
        for name in (*CREDIT_STREAMS, *allowed):
            setattr(sample, name, getattr(written, name))


def _lent(sample: TrainingSample) -> TrainingSample:
    for name in STREAMS.keys() - CREDIT_STREAMS:
        values = getattr(sample, name)
        if type(values) is np.ndarray:
            values.flags.writeable = False
    return copy.copy(sample)


def _copied_sample(example: DataSample | None) -> DataSample | None:
    if example is None:
        return None
    made = copy.copy(example)
    made.env_input, made.info = copied_example(example.env_input), copied_example(example.info)
    return made
