"""A verifiers environment as an agent: its own rollout loop runs, and asks the policy over HTTP.

Environments are adapted to a run in three ways:

1. An Environment sets handlers of SIGINT and SIGTERM when it is made. Here it sets none: an actor's thread may not, and the
   command handles Ctrl-C.
2. A verifiers rubric counts a reward function that raises as 0. Here the rollout ends as an error.
3. A sync reward function would hold up the event loop: here it runs in a worker thread.

Imports verifiers with this module.
"""

import contextvars
import functools
import json
from collections.abc import Callable
from typing import Any

import verifiers
from openai import AsyncOpenAI
from verifiers import Environment
from verifiers.clients import OpenAIChatCompletionsClient

from torchtitan.experiments.rl.compat.verifiers import no_signal_handlers, replace_reward_functions
from torchtitan.experiments.rl.gateway.server import Endpoint
from torchtitan.experiments.rl.process.setup import take_log_of
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_user, cause_of, is_finite_number

_failures: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failures of the reward functions of one rollout")


@functools.cache
def load_environment(name: str, args: str) -> "verifiers.Environment":
    """The environment that ``name``'s module makes of ``args``, JSON; the same object for the same arguments.

    Raises:
        Exception: whatever the environment's own code raises.
    """
    take_log_of("verifiers")
    with no_signal_handlers():
        environment = verifiers.load_environment(name, **json.loads(args))
    replace_reward_functions(environment, _watched)
    return environment


async def score(environment: "verifiers.Environment", state: "verifiers.State") -> dict[str, float]:
    """Have the environment's rubric score a finished rollout: its functions' values by name, and their weighted sum, "reward".

    Raises:
        RuntimeError: a reward function failed; names each that did.
    """
    failures: list[str] = []
    _failures.set(failures)  # a context variable: other rollouts have their own
    try:
        await environment.rubric.score_rollout(state)
    finally:
        await environment.rubric.cleanup(state)
    if failures:
        raise RuntimeError("; ".join(failures))
    return {**state["metrics"], "reward": state["reward"]}


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function in a thread if it is sync, with its failures added to ``_failures``."""

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


class PolicyClient(OpenAIChatCompletionsClient):
    async def raise_from_native_response(self, response: Any) -> None:
        """Raises nothing for an empty answer: the rubric scores it."""


async def play(environment: Environment, row: dict[str, Any], endpoint: Endpoint) -> dict[str, float]:
    """One rollout of the environment, whose model is the policy: what ``score`` makes of it.

    Raises:
        RuntimeError, TimeoutError: the environment failed, or its own time ran out.
    """
    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0, timeout=None) as client:
        # The environment's sampling arguments are left out: the task sets the sampling.
        state = await environment.rollout(row, client=PolicyClient(client), model=endpoint.model, sampling_args={})
    if (error := state["error"]) is not None:
        cause = f", from {cause_of(error.__cause__)}" if error.__cause__ else ""
        raise RuntimeError(f"the environment's rollout failed: {cause_of(error)}{cause}")
    if state.get("timed_out"):
        raise TimeoutError("the environment's own time limit (timeout_seconds) ran out")
    return await score(environment, state)
