"""A conversation in messages and in tokens: what keeps the two together, whoever drives it.

    open(messages)         prompt      P1
    add_completion(C1)     messages    ..., the completion as a message
    add_messages(answer)   prompt      P1 + C1 + E1, or P2 where the template rewrites history

Each completion is a turn. `rollouts/samples.py` makes training samples of the turns; no id that was sampled is rendered again.
"""

import asyncio
import marshal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import assistant_message, check_all_rendered
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.samples import check_completion
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutTurn
from torchtitan.experiments.rl.types import ROLE_IDS
from torchtitan.experiments.rl.user_code.calls import UserCodeError, cause_of

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


class GroupPrompts:
    """What the renderer has made for one group."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, Prompt] = {}
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
                for array in (prompt.token_ids, prompt.role_ids, prompt.is_content):
                    array.flags.writeable = False
        return prompt


class Conversation:
    """Opened once; then a completion and, while it goes on, the messages that answer it, in turns.

    Messages are given checked (`envs/messages.py`). Whatever the renderer raises is a UserCodeError that names it.
    """

    def __init__(self, renderer: Renderer, *, max_tokens: int, group: GroupPrompts | None = None):
        """
        Args:
            max_tokens: that a prompt and its completion may have together.
            group: what was rendered for the other conversations of its group.
        """
        self.messages: list[Message] = []
        """The whole conversation so far."""
        self.tools: list[ToolSpec] | None = None
        self.turns: list[RolloutTurn] = []
        """One per completion."""
        self._renderer, self._max_tokens, self._group = renderer, max_tokens, group or GroupPrompts()
        self.prompt: Prompt | None = None
        """What to sample from next; None: nothing."""
        self._chain: list[RolloutTurn] = []
        """The last turns, whose prompts are prefixes of the next."""
        self._prompted_at = 0.0

    @classmethod
    def after(cls, turns: list[RolloutTurn], renderer: Renderer, *, max_tokens: int) -> "Conversation":
        """The conversation as it stood after the last of ``turns``, to go on from there in another way."""
        last, forked = turns[-1], cls(renderer, max_tokens=max_tokens)
        assert last.prompt_message_indices is not None, "the turn is of a conversation"
        forked.turns, forked.tools = list(turns), last.tools
        forked.messages = [*last.prompt_messages, last.assistant_message]
        forked.prompt = Prompt(
            ids=last.prompt_token_ids.tolist(),
            token_ids=last.prompt_token_ids,
            role_ids=last.prompt_role_ids,
            is_content=last.prompt_is_content,
            message_indices=last.prompt_message_indices,
        )
        return forked

    @property
    def max_completion_tokens(self) -> int:
        """Tokens the next completion may have; 0 where there is no next prompt."""
        return self._max_tokens - len(self.prompt.ids) if self.prompt else 0

    async def open(self, messages: list[Message], tools: list[ToolSpec] | None) -> bool:
        """Render the opening conversation. False: it leaves no room for a completion."""
        self.messages, self.tools = messages, tools
        if cannot_fit(messages, self._max_tokens):
            return False
        prompt = self._group.first(messages, tools, lambda: first_prompt(self._renderer, messages, tools))
        return self._set_prompt(await self._rendering("render", prompt))

    async def add_completion(self, completion: Completion) -> RolloutTurn:
        """Record a completion of the prompt as a turn, and parse it into the conversation's next message.

        Raises:
            ValueError: it can't be trained on.
        """
        prompt = self.prompt
        assert prompt is not None, "there is no prompt to complete"
        check_completion(completion)
        turn = RolloutTurn(
            prompt_messages=list(self.messages),
            prompt_token_ids=prompt.token_ids,
            prompt_role_ids=prompt.role_ids,
            prompt_is_content=prompt.is_content,
            prompt_message_indices=prompt.message_indices,
            completion=completion,
            assistant_message={"role": "assistant", "content": ""},
            tools=self.tools,
            generate_s=time.perf_counter() - self._prompted_at,
        )
        self.turns.append(turn)
        self._chain.append(turn)
        sampled_ids = np.asarray(completion.token_ids).tolist()

        def parse() -> Message:
            parsed = self._renderer.parse_response(sampled_ids, tools=self.tools, prompt_ids=prompt.ids)
            return assistant_message(parsed, turn=len(self.turns) - 1)

        parsing = off_the_loop_if(len(sampled_ids) > LARGE_COMPLETION, parse)
        turn.assistant_message = await self._rendering("parse_response", parsing)
        self.messages.append(turn.assistant_message)
        return turn

    async def add_messages(self, new: list[Message]) -> bool:
        """Render the prompt after messages that answer the last completion. False: it leaves no room for a completion."""
        last, turn = self.prompt, self.turns[-1]
        assert last is not None, "there is no completion to answer"
        if cannot_fit(new, self._max_tokens):
            return False
        sampled_ids = np.asarray(turn.completion.token_ids).tolist()
        following = next_prompt(self._renderer, last, sampled_ids, new, conversation=self.messages, tools=self.tools)
        return self._set_prompt(await self._rendering("render", following))

    def end(self) -> None:
        """There is no further prompt."""
        self.prompt = None

    def _set_prompt(self, prompt: Prompt) -> bool:
        self.prompt, self._prompted_at = prompt, time.perf_counter()
        if self.max_completion_tokens < 1:
            return False
        self._chain = self._chain if prompt.extends else []
        # The prompts of a conversation are prefixes of each other: kept as views, a long one is in memory once.
        for turn in self._chain:
            length = len(turn.prompt_token_ids)
            turn.prompt_token_ids = prompt.token_ids[:length]
            turn.prompt_role_ids, turn.prompt_is_content = prompt.role_ids[:length], prompt.is_content[:length]
            turn.prompt_message_indices = prompt.message_indices[:length]
        return True

    async def _rendering(self, method: str, work: Awaitable[T]) -> T:
        """What the renderer makes.

        Raises:
            UserCodeError: it failed; names the renderer.
        """
        try:
            with trace.span(method):
                return await work
        except BaseException as error:
            running = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and running is not None and running.cancelling():
                raise
            raise UserCodeError(f"{type(self._renderer).__name__}.{method}: {cause_of(error)}") from error
