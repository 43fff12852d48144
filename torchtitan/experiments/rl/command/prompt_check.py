"""Compares a prompt with the messages and tools that it was rendered from."""

from typing import Any, cast

from renderers import Renderer

from torchtitan.experiments.rl.envs.renderer import renderer_name
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import RolloutTurn

CURE = "take a model whose template has a place for it, or name the renderer of the model's family"
SHOWN_LENGTH = 40
"""Maximum number of characters of a message that an error shows."""


def check_prompt(prompt: str, turn: RolloutTurn, renderer: Renderer, *, field: str) -> None:
    """Refuse a renderer that leaves out of a turn's prompt what the env gave.

    Args:
        prompt: text of the prompt's tokens, as the model sees it.
        field: path of the task's config.

    Raises:
        ConfigError: the text of a message or the name of a tool is not in the prompt, messages are
            in another order, or calls of tools can't be read from replies.
    """
    fault = _fault_of_tools(prompt, turn, renderer, field) or _fault_of_messages(
        prompt, turn, field
    )
    if fault is not None:
        raise ConfigError("renderer.name", renderer_name(renderer), fault)


def _fault_of_tools(prompt: str, turn: RolloutTurn, renderer: Renderer, field: str) -> str | None:
    if turn.tools and not getattr(renderer, "supports_tools", True):
        return (
            f"{field} offers tools, and this renderer reads no calls from replies: name the "
            "renderer of the model's family; a model without one can't call"
        )
    for tool in turn.tools or ():
        name = cast(dict[str, Any], tool).get("function", tool)["name"]
        if name not in prompt:
            return f"the prompt of {field} does not have its tool {name!r}: {CURE}"
    return None


def _fault_of_messages(prompt: str, turn: RolloutTurn, field: str) -> str | None:
    """Return which message is not in the prompt behind the message before it; None if all are.

    Messages of the assistant are left out: a template may change what was sampled on purpose.
    """
    end = 0
    for message in turn.prompt_messages:
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(content, str):
            continue
        text = content.strip()
        start = prompt.find(text, end)
        if start < 0:
            where = "in another place" if text in prompt else "not"
            shown = text[:SHOWN_LENGTH]
            return f"the prompt of {field} has the {message['role']}'s {shown!r} {where}: {CURE}"
        end = start + len(text)
    return None
