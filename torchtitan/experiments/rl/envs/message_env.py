"""An environment, as a user writes it: it takes and returns messages.

The library does the tokens.
"""

import abc
from dataclasses import dataclass, field
from typing import Any

from renderers import Message, ToolSpec


@dataclass(kw_only=True, slots=True)
class ResetOutput:
    """Opening of a conversation."""

    messages: list[Message]
    """Opening conversation: system and user messages."""
    tools: list[ToolSpec] = field(default_factory=list)
    """Tools that the model may call, in OpenAI's function format."""
    control_tokens: bool = False
    """True if special tokens in these messages and tools, such as "<|im_end|>", are meant as
    control tokens, so that one can end its message. Otherwise the model is shown them as text."""


@dataclass(kw_only=True, slots=True)
class StepOutput:
    """Answer of an env to one assistant message."""

    env_messages: list[Message]
    """Answer of the env: user or tool messages. It may be empty if ``done`` is True."""
    done: bool
    """True if the conversation is over."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """Rewards that this step earned, by name. They are summed over the rollout; the rubric weighs
    them."""
    control_tokens: bool = False
    """True if special tokens in the answer are meant as control tokens, as in ResetOutput."""


class MessageEnv(abc.ABC):
    """One conversation.

    It is used once: ``reset``, then ``step_message`` for each assistant message until it is done.
    Methods that compute for long, or wait without ``await``, are written as plain functions: those
    run in worker threads. The row and the messages that an env is given are read-only.

    Example::

        from torchtitan.experiments.rl.tasks import *

        class Doubling(MessageEnv):
            async def reset(self):
                question = f"What is twice {self.row['number']}?"
                return ResetOutput(messages=[{"role": "user", "content": question}])

            async def step_message(self, message):
                right = final_number(message["content"]) == 2 * self.row["number"]
                retry = {"role": "user", "content": "That is wrong. Try again."}
                return StepOutput(
                    env_messages=[] if right else [retry],
                    done=right,
                    reward_components={"right": float(right)},
                )

        task = env_task([{"number": 21}], Doubling, env_component("right"))
    """

    def __init__(self, row: Any = None):  # noqa: ANN401 - the dataset's
        self.row = row
        """Data that the conversation is made from: the example's ``env_input``, if ``env_task``
        makes the env."""

    @abc.abstractmethod
    async def reset(self) -> ResetOutput:
        """Start the conversation. It is called exactly once, first."""

    @abc.abstractmethod
    async def step_message(self, message: Message) -> StepOutput:
        """Answer one assistant message.

        Args:
            message: content, reasoning_content and tool_calls, as the renderer parsed them.
        """

    async def metadata(self) -> dict[str, Any]:
        """Return what rewards and credit need to know of the rollout beside its turns.

        The values are JSON, and are in `Rollout.metadata` then. It is called once, when the rollout
        has ended and before ``close``, so it may look at what the env still holds: files of a
        sandbox, the state of a game. It is not called if the env failed.
        """
        return {}

    async def close(self) -> None:
        """Release what the env holds. It is called exactly once, also after an error."""
