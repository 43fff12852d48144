"""Reward functions of a completion and an example: ``fn(completion, example)``, the shortest form."""

import inspect
from collections.abc import Callable
from typing import Any

from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import Rollout

WANTED = "want fn(completion, example), or RewardFn(fn) where fn(rollout, env_input)"


class CompletionReward:
    """``fn(completion, example)`` in the form that a rubric calls: ``(rollout, env_input)``.

    The completion is the content of the rollout's last assistant message, without its reasoning. The example is the
    ``env_input`` of the data sample, a row's dict in a RowDataset.
    """

    def __init__(self, fn: Callable[[str, Any], Any]):
        """
        Raises:
            ConfigError: ``fn`` can't be called with two arguments.
        """
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", None) or type(fn).__name__
        self.__module__ = getattr(fn, "__module__", __name__)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        check_two_arguments(fn, self.__name__, WANTED)

    def __call__(self, rollout: Rollout, env_input: Any) -> Any:
        """What ``fn`` returns: a number, or an awaitable of one."""
        return self.fn(last_assistant_text(rollout), env_input)


def check_two_arguments(fn: Callable[..., Any], name: str, wanted: str) -> None:
    """
    Raises:
        ConfigError: ``fn`` can't be called with two arguments; the cure is ``wanted``.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError("rubric.reward_fns", f"{name}{signature}", f"{error}; {wanted}") from None


def last_assistant_text(rollout: Rollout) -> str:
    """Content of the rollout's last assistant message, without its reasoning; "" if there is none."""
    return rollout.turns[-1].assistant_message["content"] if rollout.turns else ""
