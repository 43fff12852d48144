"""What a user writes: an environment that takes and returns messages. The library does the tokens."""

import abc
from dataclasses import dataclass, field
from typing import Any

from renderers import Message, ToolSpec


@dataclass(kw_only=True, slots=True)
class ResetOutput:
    messages: list[Message]
    """The opening conversation: system and user messages."""
    tools: list[ToolSpec] = field(default_factory=list)
    """Tools the model may call, OpenAI function format."""
    control_tokens: bool = False
    """True if special tokens in these messages, such as "<|im_end|>", are meant as control tokens. A rollout whose env writes
    one ends as an error otherwise: renderers can't write them as text, so it could end the message."""


@dataclass(kw_only=True, slots=True)
class StepOutput:
    env_messages: list[Message]
    """The env's answer: user or tool messages; may be empty when done."""
    done: bool
    reward_components: dict[str, float] = field(default_factory=dict)
    """What this step earned, by name; summed over the rollout and left to the rubric to weigh."""
    control_tokens: bool = False
    """True if special tokens in the answer are meant as control tokens, as in ResetOutput."""


class MessageEnv(abc.ABC):
    """One conversation, used once: reset, then a step per assistant message until done.

    Methods that compute for long or wait without ``await`` are written as plain functions: those run in worker threads.
    """

    def __init__(self, row: Any = None):
        self.row = row
        """What the conversation is made from: the example's ``env_input``, where ``env_task`` makes the env."""

    @abc.abstractmethod
    async def reset(self) -> ResetOutput:
        """Start the conversation. Called exactly once, first."""

    @abc.abstractmethod
    async def step_message(self, message: Message) -> StepOutput:
        """Answer one assistant message (content, reasoning_content and tool_calls as the renderer parsed them)."""

    async def metadata(self) -> dict[str, Any]:
        """What rewards and credit are to know of the rollout beside its turns: ``Rollout.metadata``. JSON values.

        Called once, when the rollout has ended and before ``close``, so it may look at what the env still holds: files of a
        sandbox, the state of a game. Not called where the env failed.
        """
        return {}

    async def close(self) -> None:
        """Release what the env holds. Called exactly once, also after an error."""
