"""Loads an environment of the verifiers package, once per process, and makes it fit to live in a run.

1. An Environment takes over SIGINT and SIGTERM when it is made. An actor's thread may not, and Ctrl-C is the run's: not here.
2. A verifiers rubric counts a reward function that raises as 0. Here the failure is kept, and its rollout is an error.
3. A sync reward function would hold up the event loop: here it runs in a worker thread.

Imports verifiers with this module.
"""

import contextlib
import contextvars
import functools
import json
import logging
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import verifiers
import verifiers.envs.environment

from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_user, is_finite_number

# verifiers keeps its log to itself; its warnings belong into the process's.
logging.getLogger("verifiers").propagate = True

_failures: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures of the reward functions of one rollout")


@functools.cache
def load_environment(name: str, args: str) -> "verifiers.Environment":
    """The environment that ``name``'s module makes of ``args``, JSON; the same object for the same words.

    Raises:
        Exception: whatever the environment's own code raises.
    """
    with _signals_left_alone():
        environment = verifiers.load_environment(name, **json.loads(args))
    for rubric in _rubrics(environment):
        rubric.funcs[:] = [_watched(function) for function in rubric.funcs]
    return environment


def scores_groups(environment: "verifiers.Environment") -> bool:
    """Whether some reward function compares rollouts."""
    return any(rubric.has_group_rewards or rubric.has_advantages for rubric in _rubrics(environment))


async def score(environment: "verifiers.Environment", state: "verifiers.State") -> dict[str, float]:
    """Have the environment's rubric score a finished rollout: its functions' values by name, and their weighted sum, "reward".

    Raises:
        RuntimeError: a reward function failed; names each that did.
    """
    failures: list[str] = []
    _failures.set(failures)  # seen by all that is called from here, and by no other rollout
    try:
        await environment.rubric.score_rollout(state)
    finally:
        await environment.rubric.cleanup(state)
    if failures:
        raise RuntimeError("; ".join(failures))
    return {**state["metrics"], "reward": state["reward"]}


def _rubrics(environment: "verifiers.Environment") -> Iterator["verifiers.Rubric"]:
    """All rubrics of an environment, or of a group of environments; each once."""
    waiting, seen = [environment.rubric, *(inner.rubric for inner in getattr(environment, "envs", []))], []
    while waiting:
        rubric = waiting.pop()
        if not any(rubric is known for known in seen):
            seen.append(rubric)
            waiting += getattr(rubric, "rubrics", [])
            yield rubric


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function in a thread if it is sync, with what goes wrong in it written down."""

    @functools.wraps(function)  # rubrics read the signature to know what to pass
    async def watched(*args: Any, **kwargs: Any) -> Any:
        failures = _failures.get([])
        try:
            value = await call_user(functools.partial(function, *args, **kwargs), timeout_s=None)
        except UserCodeError as error:
            failures.append(f"reward function {function.__name__!r}: {error}")
            raise
        if not is_finite_number(value):
            failures.append(f"reward function {function.__name__!r} returned {str(value)[:60]!r}, want a finite number")
        return value

    return watched


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    module = verifiers.envs.environment
    kept, module.signal = module.signal, SimpleNamespace(**vars(signal) | {"signal": lambda number, handler: None})
    try:
        yield
    finally:
        module.signal = kept
