"""verifiers 0.3.1: its signal handlers, and the reward functions inside its rubrics. Imports verifiers with this module."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import verifiers
import verifiers.envs.environment


@contextlib.contextmanager
def no_signal_handlers() -> Iterator[None]:
    """Environments made inside leave SIGINT and SIGTERM alone.

    An Environment takes both over when it is made and has no switch for it. Here its module's ``signal`` is replaced for as
    long, by one whose ``signal`` does nothing.
    """
    module = verifiers.envs.environment
    kept, module.signal = module.signal, SimpleNamespace(**vars(signal) | {"signal": lambda number, handler: None})
    try:
        yield
    finally:
        module.signal = kept


def replace_reward_functions(environment: verifiers.Environment, replace: Callable[[Callable[..., Any]], Any]) -> None:
    """Put ``replace(function)`` in the place of each reward function.

    A rubric's functions are in the list ``funcs``, which has no public way to change but to add.
    """
    for rubric in _rubrics(environment):
        rubric.funcs[:] = [replace(function) for function in rubric.funcs]


def compares_rollouts(environment: verifiers.Environment) -> bool:
    """Whether some reward function looks at several rollouts, by the rubric's own ``has_group_rewards``/``has_advantages``."""
    return any(rubric.has_group_rewards or rubric.has_advantages for rubric in _rubrics(environment))


def _rubrics(environment: verifiers.Environment) -> Iterator[verifiers.Rubric]:
    """All rubrics of an environment, or of a group of environments (``envs``), or of a group (``rubrics``); each once."""
    waiting = [environment.rubric, *(inner.rubric for inner in getattr(environment, "envs", []))]
    seen: list[verifiers.Rubric] = []
    while waiting:
        rubric = waiting.pop()
        if not any(rubric is known for known in seen):
            seen.append(rubric)
            waiting += getattr(rubric, "rubrics", [])
            yield rubric
