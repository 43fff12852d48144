"""A policy that says what it is told, and envs that misbehave as they are told."""

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.rollouts.types import Completion

CLOSE = "<|im_end|>"


def completion_of(
    tokenizer, text: str, *, finish_reason: str = "stop", version: int = 0
) -> Completion:
    """The text as if sampled, with the turn's closing token when it stopped; token i has log-probability -(i + 1) / 8."""
    ids = tokenizer.encode(text + CLOSE * (finish_reason == "stop"), add_special_tokens=False)
    return Completion(
        token_ids=np.asarray(ids, np.int32),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
        policy_versions=np.full(len(ids), version, np.int32),
        finish_reason=finish_reason,
    )


class ScriptedPolicy:
    """``reply(rollout_id, turn)`` gives what each rollout says in each turn: a text, an exception to raise, or None to hang."""

    def __init__(self, tokenizer, reply: Callable[[str, int], object] | str = "ok"):
        self.tokenizer = tokenizer
        self.reply = reply if callable(reply) else lambda rollout_id, turn: reply
        self.version = 3
        self.sessions: list[ScriptedSession] = []

    def session(self, *, rollout_id, seed, sampling, stop_token_ids):
        self.sessions.append(ScriptedSession(self, rollout_id, seed, sampling, stop_token_ids))
        return self.sessions[-1]


def tokens_to_stop(tokenizer, ids, stops):
    """Return the number of tokens that complete the first of the texts; all if none is there."""
    found = (
        count
        for count in range(1, len(ids) + 1)
        if any(stop in tokenizer.decode(ids[:count]) for stop in stops)
    )
    return next(found, len(ids)) if stops else len(ids)


class ScriptedSession:
    stops_at_texts = True

    def __init__(self, policy, rollout_id, seed, sampling, stop_token_ids):
        self.policy, self.rollout_id, self.seed = policy, rollout_id, seed
        self.sampling, self.stop_token_ids = sampling, stop_token_ids
        self.prompts: list[list[int]] = []
        self.closed = 0

    async def generate(self, prompt_token_ids, *, max_tokens, stop=(), seed=None):
        assert isinstance(prompt_token_ids, np.ndarray) and prompt_token_ids.dtype == np.int32
        self.prompts.append(prompt_token_ids.tolist())
        await asyncio.sleep(0)
        reply = self.policy.reply(self.rollout_id, len(self.prompts) - 1)
        if isinstance(reply, BaseException):
            raise reply
        if reply is None:
            await asyncio.sleep(3600)
        sampled = completion_of(self.policy.tokenizer, reply, version=self.policy.version)
        limit = min(max_tokens, self.sampling.max_tokens)
        at_text = tokens_to_stop(self.policy.tokenizer, sampled.token_ids, stop)
        if at_text < len(sampled.token_ids) and at_text <= limit:
            return Completion(
                token_ids=sampled.token_ids[:at_text],
                logprobs=sampled.logprobs[:at_text],
                policy_versions=sampled.policy_versions[:at_text],
                finish_reason="stop",
            )
        if len(sampled.token_ids) > limit:
            return Completion(
                token_ids=sampled.token_ids[:limit],
                logprobs=sampled.logprobs[:limit],
                policy_versions=sampled.policy_versions[:limit],
                finish_reason="length",
            )
        return sampled

    def close(self):
        self.closed += 1


class TalkingEnv(MessageEnv):
    """Answers "more" as a user until ``turns`` answers were given, and earns ``turn_reward`` with each."""

    def __init__(
        self,
        turns: int = 1,
        *,
        opening: str = "start",
        role: str = "user",
        turn_reward: float = 1.0,
    ):
        self.turns, self.opening, self.role, self.turn_reward = turns, opening, role, turn_reward
        self.received: list[dict] = []
        self.closed = 0

    async def reset(self):
        return ResetOutput(messages=[{"role": "user", "content": self.opening}])

    async def step_message(self, message):
        self.received.append(message)
        return StepOutput(
            env_messages=[{"role": self.role, "content": f"more {len(self.received)}"}],
            done=len(self.received) >= self.turns,
            reward_components={"steps": self.turn_reward},
        )

    async def close(self):
        self.closed += 1


class BrokenEnv(TalkingEnv):
    """Does ``what`` in its ``where`` method, which is "reset" or "step_message"."""

    def __init__(self, where: str, what: Callable[[], object]):
        super().__init__(turns=2)
        self.where, self.what = where, what

    async def reset(self):
        return await self._break() if self.where == "reset" else await super().reset()

    async def step_message(self, message):
        return (
            await self._break()
            if self.where == "step_message"
            else await super().step_message(message)
        )

    async def _break(self):
        answer = self.what()
        return await answer if asyncio.iscoroutine(answer) else answer


def raise_value_error():
    raise ValueError("bad\nluck")


def raise_cancelled():
    raise asyncio.CancelledError


async def hang():
    await asyncio.sleep(3600)


async def hang_through_cancellation():
    # Long enough to outlive the grace, short enough to let the event loop of the test end.
    for _ in range(20):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            pass


def answer_with(**changes):
    """A StepOutput with some fields wrong."""
    return lambda: StepOutput(
        **{"env_messages": [{"role": "user", "content": "x"}], "done": False, **changes}
    )


FAILURES = {
    "raises": (raise_value_error, "error", "ValueError: bad luck"),
    "exits": (lambda: sys.exit(3), "error", "SystemExit: 3"),
    "cancels itself": (raise_cancelled, "error", "CancelledError"),
    "hangs": (hang, "timeout", "no answer within 0.2 s"),
    "hangs through cancellation": (hang_through_cancellation, "timeout", "no answer within 0.2 s"),
    "returns None": (lambda: None, "error", "returned NoneType, want "),
    "returns a dict": (lambda: {"done": True}, "error", "returned dict, want "),
}
"""What env code may do, the status it ends in, and a part of the cause."""


async def stepped(env, completion=None):
    """Where the conversation stands after a reset or a completion."""
    before = len(env.turns)
    await (env.initial_prompt() if completion is None else env.step_completion(completion))
    turn = env.turns[before] if len(env.turns) > before else None
    return SimpleNamespace(
        next_prompt_token_ids=None
        if env.prompt_token_ids is None
        else env.prompt_token_ids.tolist(),
        next_prompt_messages=list(env._conversation.messages),
        status=env.status,
        env_messages=turn.env_messages if turn else [],
        env_reward_components=turn.reward_components if turn else {},
        assistant_message=turn.assistant_message if turn else None,
        error=env.error,
    )
