"""Prompts: what the renderer makes of a conversation, and who computes it when."""

import asyncio
import marshal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import check_all_rendered
from torchtitan.experiments.rl.types import ROLE_IDS

T = TypeVar("T")

LARGE_TEXT = 20_000
"""Characters above which rendering leaves the event loop: so many take some 20 ms, a million of them a second or two."""

LARGE_COMPLETION = 5_000
"""The same of parsing, in tokens."""

LONGEST_TOKEN = 256
"""Characters; no token of a vocabulary in use has more than 128."""

MAX_TOKEN_ID = np.iinfo(np.int32).max

_RENDER_THREAD = ThreadPoolExecutor(1, thread_name_prefix="render")
"""For large texts, one at a time: several would keep the interpreter from the event loop."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    ids: list[int]
    """[P]. The list that the renderer takes."""
    token_ids: np.ndarray
    """int32 [P]. The same."""
    role_ids: np.ndarray
    """int8 [P]. See RolloutTurn.prompt_role_ids."""
    is_content: np.ndarray
    """bool [P]. See RolloutTurn.prompt_is_content."""
    message_indices: np.ndarray
    """int16 [P]. See RolloutTurn.prompt_message_indices."""
    extends: bool = False
    """Starts with the last prompt and its completion, token for token."""


class Line(IntEnum):
    """Who continues first. New requests come before answers: without requests the engine waits, and answers can."""

    FIRST_PROMPT = 0
    """A rollout that renders its first prompt."""
    NEW_GROUP = 1
    """A group that begins. So the requests of one group leave before the envs of 31 others are made."""
    ANSWER = 2
    """A rollout that parses a completion, or renders what its env said to it."""


class YieldQueue:
    """A cooperative yield queue: lets one caller continue in each iteration of the event loop; first come, first served in
    each line.

    Rendering a prompt computes for 0.1 to 1 ms without awaiting. When an engine answers 512 requests at once, all 512 rollouts
    are ready in one iteration of the loop, and everything else (timers, messages of generators, the trainer) would wait for
    half a second. One caller an iteration costs some 20 us a call.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, deque[asyncio.Future[None]]] = {line: deque() for line in Line}
        self._scheduled = False
        self._holder: asyncio.Task | None = None
        """Who has continued in this iteration."""

    @property
    def busy(self) -> bool:
        """Whether a caller waits, or continues in this iteration."""
        return self._scheduled

    @property
    def held(self) -> bool:
        """Whether the running asyncio task has been let continue in this iteration, so that it need not wait again."""
        return self._holder is not None and self._holder is asyncio.current_task()

    async def wait(self, line: Line) -> None:
        """Return in an iteration of the event loop in which no other caller returns."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._lines[line].append(place)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        await place
        self._holder = asyncio.current_task()

    def _next(self) -> None:
        self._holder = None
        for line in self._lines.values():
            while line:
                place = line.popleft()
                if not place.done():  # done: cancelled
                    place.set_result(None)
                    asyncio.get_running_loop().call_soon(self._next)
                    return
        self._scheduled = False


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, YieldQueue] = WeakKeyDictionary()


def yield_queue() -> YieldQueue:
    """The queue of the running event loop."""
    loop = asyncio.get_running_loop()
    queue = _QUEUES.get(loop)
    if queue is None:
        queue = _QUEUES[loop] = YieldQueue()
    return queue


async def first_prompt(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> Prompt:
    """The prompt of a conversation nothing was sampled in.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """
    return await off_the_loop_if(
        _characters(conversation) > LARGE_TEXT,
        lambda: _prompt(_rendered_anew(renderer, conversation, tools)),
        line=Line.FIRST_PROMPT,
    )


async def next_prompt(
    renderer: Renderer,
    last: Prompt,
    sampled_ids: list[int],
    new: list[Message],
    *,
    conversation: list[Message],
    tools: list[ToolSpec] | None,
) -> Prompt:
    """The prompt after a completion and the ``new`` messages the env answered with, which end the conversation.

    Sampled tokens stay as they are where the renderer can go on from them. Where it can't, it renders the conversation anew.

    Raises:
        ValueError: a message that is not text, or of a role the model's template hasn't.
    """

    answer = len(conversation) - len(new) - 1  # the completion's message

    def bridged() -> Prompt | None:
        rendered = renderer.bridge_to_next_turn(last.ids, sampled_ids, new, tools=tools)
        if rendered is None:
            return None
        # It describes the new messages alone. It kept less than all where a completion goes on after the end of its turn.
        kept = _kept(rendered, last, sampled_ids)
        check_all_rendered(rendered, new, start=kept)
        return _prompt(rendered, last, sampled_ids, kept=kept, answer=answer, first=answer + 1)

    def anew() -> Prompt:
        rendered = _rendered_anew(renderer, conversation, tools)
        kept = _kept(rendered, last, sampled_ids)
        return _prompt(rendered, last, sampled_ids, kept=kept if kept == len(last.ids) + len(sampled_ids) else 0, answer=answer)

    prompt = await off_the_loop_if(_characters(new) > LARGE_TEXT, bridged)
    if prompt is None:
        prompt = await off_the_loop_if(_characters(conversation) > LARGE_TEXT, anew)
    return prompt


def cannot_fit(messages: Sequence[Message], tokens: int) -> bool:
    """Whether messages are too long for so many tokens whatever their text is: those need not be tokenised."""
    return _characters(messages) > LONGEST_TOKEN * tokens


async def off_the_loop_if(large: bool, call: Callable[[], T], *, line: Line = Line.ANSWER) -> T:
    """Compute something in a thread if it is large, or else here, in an iteration of the event loop of its own."""
    if large:
        return await asyncio.get_running_loop().run_in_executor(_RENDER_THREAD, call)
    queue = yield_queue()
    if not queue.held:
        await queue.wait(line)
    return call()


def _rendered_anew(renderer: Renderer, conversation: list[Message], tools: list[ToolSpec] | None) -> RenderedTokens:
    rendered = renderer.render(conversation, tools=tools, add_generation_prompt=True)
    check_all_rendered(rendered, conversation)
    return rendered


def _kept(rendered: RenderedTokens, last: Prompt, sampled_ids: list[int]) -> int:
    """Tokens of the last prompt and its completion that the prompt starts with."""
    start = len(last.ids)
    end = start + len(sampled_ids)
    if rendered.token_ids[start:end] == sampled_ids and rendered.token_ids[:start] == last.ids:
        return end
    pairs = enumerate(zip(rendered.token_ids, [*last.ids, *sampled_ids], strict=False))
    return next((index for index, (new, old) in pairs if new != old), min(end, len(rendered.token_ids)))


def _prompt(
    rendered: RenderedTokens,
    last: Prompt | None = None,
    sampled_ids: Sequence[int] = (),
    *,
    kept: int = 0,
    answer: int = 0,
    first: int = 0,
) -> Prompt:
    """
    Args:
        last: the last prompt; ``sampled_ids`` are its completion.
        kept: tokens of these two that the prompt starts with, described as they are there. Only the others are converted, or
            the turns of a long conversation would cost milliseconds each.
        answer: index of the completion's message in the conversation.
        first: that of the first message that ``rendered`` describes.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids = rendered.token_ids
    new_ids = np.asarray(ids[kept:])
    are_ids = new_ids.size == 0 or (new_ids.dtype.kind in "iu" and new_ids.ndim == 1 and new_ids.item(new_ids.argmin()) >= 0)
    if not (ids and are_ids):
        raise ValueError(f"the prompt's token ids are no list of integers from 0 up: {str(ids)[:60]}")
    if new_ids.size and new_ids.item(new_ids.argmax()) > MAX_TOKEN_ID:
        raise ValueError(f"the prompt has a token id of {new_ids.max()}")
    token_ids, role_ids, is_content = np.empty(len(ids), np.int32), np.empty(len(ids), np.int8), np.empty(len(ids), bool)
    message_indices = np.empty(len(ids), np.int16)
    if last is not None and kept:
        prompted = min(kept, len(last.ids))
        token_ids[:prompted] = last.token_ids[:prompted]
        role_ids[:prompted] = last.role_ids[:prompted]
        is_content[:prompted] = last.is_content[:prompted]
        message_indices[:prompted], message_indices[prompted:kept] = last.message_indices[:prompted], answer
        token_ids[prompted:kept] = sampled_ids[: kept - prompted]
        role_ids[prompted:kept], is_content[prompted:kept] = ROLE_IDS["assistant"], True
    token_ids[kept:] = new_ids
    if rendered.is_content:  # without it, roles are guesses (see check_all_rendered)
        is_content[kept:] = rendered.is_content[kept:]
        of_message = np.array([ROLE_IDS.get(role, -1) for role in rendered.message_roles] + [-1], np.int8)
        of_message_index = np.asarray(rendered.message_indices[kept:], np.int16)
        new_roles = of_message[of_message_index]  # -1, of no message, is the last
        if len(new_roles) != len(new_ids):
            raise ValueError(f"{len(new_roles)} roles for {len(new_ids)} token ids")
        role_ids[kept:] = new_roles
        message_indices[kept:] = np.where(of_message_index < 0, -1, of_message_index + first)
    else:
        role_ids[kept:], is_content[kept:], message_indices[kept:] = -1, False, -1
    extends = last is not None and kept == len(last.ids) + len(sampled_ids)
    return Prompt(
        ids=ids,
        token_ids=token_ids,
        role_ids=role_ids,
        is_content=is_content,
        message_indices=message_indices,
        extends=extends,
    )


def _characters(messages: Sequence[Message]) -> int:
    """Of their text; templates may strip the space around it."""
    count = 0
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            count += len(text.strip()) if isinstance(text, str) else 0
    return count


MAX_SHARED_TOKENS = 32
"""Longer completions are hardly ever equal."""


class GroupPrompts:
    """What the renderer has made for one group."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, Prompt] = {}
        self._answers: dict[int, dict[tuple[int, ...], Message]] = {}
        """Parsed completions, by the ``id`` of their prompt."""
        self._lock = asyncio.Lock()

    async def first(
        self, conversation: list[Message], tools: list[ToolSpec] | None, render: Callable[[], Awaitable[Prompt]]
    ) -> Prompt:
        """The prompt of a conversation. Its arrays are read-only: other rollouts have the same.

        Args:
            render: called if no rollout of the group has rendered this conversation with these tools.
        """
        try:
            key = marshal.dumps((conversation, tools), 2)  # 2: later formats depend on how often an object is referred to
        except ValueError:  # an object that JSON does not have: whether two are equal is not known
            return await render()
        async with self._lock:
            prompt = self._prompts.get(key)
            if prompt is None:
                prompt = self._prompts[key] = await render()
                self._answers[id(prompt)] = {}
                for array in (prompt.token_ids, prompt.role_ids, prompt.is_content):
                    array.flags.writeable = False
        return prompt

    def answer(self, prompt: Prompt, sampled_ids: list[int]) -> Message | None:
        """A completion of a first prompt, if a rollout has parsed the same one. Not to be changed."""
        answers = self._answers.get(id(prompt))
        return answers.get(tuple(sampled_ids)) if answers else None

    def keep_answer(self, prompt: Prompt, sampled_ids: list[int], message: Message) -> None:
        """Remember a parsed completion, if it is one of a first prompt."""
        answers = self._answers.get(id(prompt))
        if answers is not None and len(sampled_ids) <= MAX_SHARED_TOKENS:
            answers[tuple(sampled_ids)] = message
