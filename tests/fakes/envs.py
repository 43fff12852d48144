"""Envs that talk for some turns, and envs that misbehave as a test says."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput


class TalkingEnv(MessageEnv):
    """Env that answers "more" until it received ``turns`` messages.

    Each message earns ``turn_reward``.
    """

    def __init__(
        self,
        turns: int = 1,
        *,
        opening: str = "start",
        role: str = "user",
        turn_reward: float = 1.0,
    ):
        self.turns = turns
        self.opening = opening
        self.role = role
        self.turn_reward = turn_reward
        self.received: list[Any] = []
        self.closed = 0

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": self.opening}])

    async def step_message(self, message: Any) -> StepOutput:
        self.received.append(message)
        return StepOutput(
            env_messages=[{"role": self.role, "content": f"more {len(self.received)}"}],
            done=len(self.received) >= self.turns,
            reward_components={"steps": self.turn_reward},
        )

    async def close(self) -> None:
        self.closed += 1


class BrokenEnv(TalkingEnv):
    """Env that calls ``what`` in its method ``where``, which is "reset" or "step_message"."""

    def __init__(self, where: str, what: Callable[[], Any]):
        super().__init__(turns=2)
        self.where = where
        self.what = what

    async def reset(self) -> ResetOutput:
        return await self._break() if self.where == "reset" else await super().reset()

    async def step_message(self, message: Any) -> StepOutput:
        if self.where == "step_message":
            return await self._break()
        return await super().step_message(message)

    async def _break(self) -> Any:
        answer = self.what()
        return await answer if asyncio.iscoroutine(answer) else answer


def raise_value_error() -> NoReturn:
    raise ValueError("bad\nluck")


def raise_cancelled() -> NoReturn:
    raise asyncio.CancelledError


async def hang() -> None:
    await asyncio.sleep(3600)


async def hang_through_cancellation() -> None:
    # Long enough to outlive the grace, short enough to let the event loop of the test end.
    for _ in range(20):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            pass


def answer_with(**changes: Any) -> Callable[[], StepOutput]:
    """Return a function that makes a StepOutput of which some fields are wrong."""
    fields = {"env_messages": [{"role": "user", "content": "x"}], "done": False, **changes}
    return lambda: StepOutput(**fields)


FAILURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "raises": (raise_value_error, "error", "ValueError: bad luck"),
    "exits": (lambda: sys.exit(3), "error", "SystemExit: 3"),
    "cancels itself": (raise_cancelled, "error", "CancelledError"),
    "hangs": (hang, "timeout", "no answer within 0.2 s"),
    "hangs through cancellation": (hang_through_cancellation, "timeout", "no answer within 0.2 s"),
    "returns None": (lambda: None, "error", "returned NoneType, want "),
    "returns a dict": (lambda: {"done": True}, "error", "returned dict, want "),
}
"""Misbehaviour of an env by name: its code, the rollout's status, and a part of the cause."""
