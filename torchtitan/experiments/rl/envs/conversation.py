"""A conversation in messages and in tokens: what keeps the two together, whoever drives it.

    open(messages)         prompt      P1
    add_completion(C1)     messages    ..., the completion as a message
    add_messages(answer)   prompt      P1 + C1 + E1, or P2 where the template rewrites history

Each completion is a turn. `rollouts/samples.py` makes training samples of the turns; no id that was sampled is rendered again.
"""

import asyncio
import heapq
import itertools
import marshal
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.envs.messages import assistant_message, check_all_rendered
from torchtitan.experiments.rl.envs.tool_calls import parse_completion
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.samples import check_completion
from torchtitan.experiments.rl.rollouts.sealed import copied
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

SHORT_COMPLETION = 32
"""Tokens. Longer ones are hardly ever equal."""

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
    answers: dict[tuple[int, ...], Message] = field(default_factory=dict)
    """Short completions of it, parsed. The rollouts of a group, which begin with one prompt, often give the same."""


DESCRIBED: dict[str, Any] = {
    "token_ids": np.int32,
    "role_ids": np.int8,
    "is_content": np.bool_,
    "message_indices": np.int16,
}
"""Arrays of a prompt; a turn has each as ``prompt_<name>``."""
NOTHING = Prompt(
    ids=[], **dict[str, Any]((name, np.empty(0, dtype)) for name, dtype in DESCRIBED.items())
)
"""What was prompted before a conversation's first prompt."""


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
        self._waiting: list[tuple[Line, int, asyncio.Future[None]]] = []
        """A heap: those of a line in the order in which they came."""
        self._order = itertools.count()
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
        heapq.heappush(self._waiting, (line, next(self._order), place))
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next)
        await place
        self._holder = asyncio.current_task()

    def _next(self) -> None:
        self._holder = None
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():  # done: cancelled
                place.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._scheduled = False


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, YieldQueue] = WeakKeyDictionary()


def yield_queue() -> YieldQueue:
    """The queue of the running event loop."""
    return _QUEUES.setdefault(asyncio.get_running_loop(), YieldQueue())


async def off_the_loop_if(large: bool, call: Callable[[], T], *, line: Line = Line.ANSWER) -> T:
    """Compute in a thread what is large, else here, in an iteration of the event loop in which no other rollout computes."""
    if large:
        return await asyncio.get_running_loop().run_in_executor(_RENDER_THREAD, call)
    queue = yield_queue()
    if not queue.held:
        await queue.wait(line)
    return call()


def cannot_fit(messages: Sequence[Message], tokens: int) -> bool:
    """Whether messages are too long for so many tokens whatever their text is: those need not be tokenised."""
    return _characters(messages) > LONGEST_TOKEN * tokens


def _kept(ids: list[int], old: list[int]) -> int:
    """How many of the ``old`` tokens a prompt starts with."""
    if ids[: len(old)] == old:
        return len(old)
    pairs = enumerate(zip(ids, old, strict=False))
    return next((index for index, (new, was) in pairs if new != was), min(len(ids), len(old)))


def described(
    rendered: RenderedTokens,
    last: Prompt = NOTHING,
    sampled_ids: Sequence[int] = (),
    *,
    kept: int = 0,
    answer: int = 0,
    first: int = 0,
) -> Prompt:
    """A prompt with what is known of each token.

    Args:
        last: the last prompt; ``sampled_ids`` are its completion.
        kept: tokens of these two that the prompt starts with, described as they are there. Only the others are converted, or
            the turns of a long conversation would cost milliseconds each.
        answer: index of the completion's message in the conversation.
        first: that of the first message that ``rendered`` describes.

    Raises:
        ValueError: it holds an image, or what are no token ids, or not a role for each.
    """
    if rendered.multi_modal_data is not None and not rendered.multi_modal_data.is_empty():
        raise ValueError("the env sent an image or a video: only text reaches the model")
    ids, contents = rendered.token_ids, rendered.is_content[kept:]
    new_ids = np.asarray(ids[kept:])
    new, numbers = len(new_ids), new_ids.ndim == 1 and new_ids.dtype.kind in "iu"
    # argmin and item take a tenth of the time of min.
    if not ids or (
        new
        and not (
            numbers
            and 0
            <= new_ids.item(new_ids.argmin())
            <= new_ids.item(new_ids.argmax())
            <= MAX_TOKEN_ID
        )
    ):
        raise ValueError(
            f"the prompt's token ids are no list of integers from 0 to {MAX_TOKEN_ID}: {str(ids)[:60]}"
        )
    roles: Any = -1
    message_indices: Any = -1
    if contents:  # without it, roles are guesses (see check_all_rendered)
        of_message = np.asarray(rendered.message_indices[kept:], np.int16)
        if not len(of_message) == len(contents) == new:
            raise ValueError(f"{len(of_message)} roles for {new} token ids")
        # -1, of no message, is the last.
        roles = np.array([ROLE_IDS.get(role, -1) for role in rendered.message_roles] + [-1])[
            of_message
        ]
        message_indices = np.where(of_message < 0, -1, of_message + first)
    before = min(kept, len(last.ids))
    parts: dict[str, tuple[Any, Any]] = {
        "token_ids": (sampled_ids[: kept - before], new_ids),
        "role_ids": (ROLE_IDS["assistant"], roles),
        "is_content": (True, contents or False),
        "message_indices": (answer, message_indices),
    }
    arrays = dict[str, Any]()
    for name, (sampled, added) in parts.items():
        array = arrays[name] = np.empty(len(ids), DESCRIBED[name])
        array[:before], array[before:kept], array[kept:] = (
            getattr(last, name)[:before],
            sampled,
            added,
        )
    return Prompt(ids=ids, extends=kept == len(last.ids) + len(sampled_ids), **arrays)


def _characters(messages: Sequence[Message]) -> int:
    """Of their text; templates may strip the space around it."""
    contents = [
        [content] if isinstance(content := message["content"], str) else content
        for message in messages
    ]
    texts = [
        part.get("text") if isinstance(part, dict) else part for parts in contents for part in parts
    ]
    return sum(len(text.strip()) for text in texts if isinstance(text, str))


class GroupPrompts:
    """What the renderer has made for one group."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, Prompt] = {}
        self._lock = asyncio.Lock()

    async def first(
        self,
        conversation: list[Message],
        tools: list[ToolSpec] | None,
        render: Callable[[], Awaitable[Prompt]],
    ) -> Prompt:
        """The prompt of a conversation. Its arrays are read-only: other rollouts have the same.

        Args:
            render: called if no rollout of the group has rendered this conversation with these tools.
        """
        try:
            key = marshal.dumps(
                (conversation, tools), 2
            )  # 2: later formats depend on how often an object is referred to
        except ValueError:  # an object that JSON does not have: whether two are equal is not known
            return await render()
        async with self._lock:
            prompt = self._prompts.get(key)
            if prompt is None:
                prompt = self._prompts[key] = await render()
                for name in DESCRIBED:
                    getattr(prompt, name).flags.writeable = False
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
        self._renderer, self._max_tokens, self._group = (
            renderer,
            max_tokens,
            group or GroupPrompts(),
        )
        self.prompt: Prompt | None = None
        """What to sample from next; None: nothing."""
        self._chain: list[RolloutTurn] = []
        """The last turns, whose prompts are prefixes of the next."""
        self._prompted_at = 0.0

    @classmethod
    def after(
        cls, turns: list[RolloutTurn], renderer: Renderer, *, max_tokens: int
    ) -> "Conversation":
        """The conversation as it stood after the last of ``turns``, to go on from there in another way."""
        last, forked = turns[-1], cls(renderer, max_tokens=max_tokens)
        assert last.prompt_message_indices is not None, "the turn is of a conversation"
        forked.turns, forked.tools = list(turns), last.tools
        forked.messages = [*last.prompt_messages, last.assistant_message]
        arrays = {name: getattr(last, f"prompt_{name}") for name in DESCRIBED}
        forked.prompt = Prompt(ids=last.prompt_token_ids.tolist(), **arrays)
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

        async def render() -> Prompt:
            large = _characters(messages) > LARGE_TEXT
            return await off_the_loop_if(
                large, lambda: described(self._rendered()), line=Line.FIRST_PROMPT
            )

        return self._set_prompt(
            await self._rendering("render", self._group.first(messages, tools, render))
        )

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
            **{f"prompt_{name}": getattr(prompt, name) for name in DESCRIBED},
            completion=completion,
            assistant_message={"role": "assistant", "content": ""},
            tools=self.tools,
            generate_s=time.perf_counter() - self._prompted_at,
        )
        self.turns.append(turn)
        self._chain.append(turn)
        sampled_ids = np.asarray(completion.token_ids).tolist()

        known = prompt.answers if len(sampled_ids) <= SHORT_COMPLETION else {}

        def parse() -> Message:
            if (key := tuple(sampled_ids)) not in known:
                parsed = parse_completion(
                    self._renderer, sampled_ids, tools=self.tools, prompt_ids=prompt.ids
                )
                known[key] = assistant_message(parsed, turn=len(self.turns) - 1)
            return copied(known[key])

        parsing = off_the_loop_if(len(sampled_ids) > LARGE_COMPLETION, parse)
        turn.assistant_message = await self._rendering("parse_response", parsing)
        self.messages.append(turn.assistant_message)
        return turn

    async def add_messages(self, new: list[Message]) -> bool:
        """Render the prompt after messages that answer the last completion and end the conversation. False: it leaves no room
        for a completion.

        Sampled tokens stay as they are where the renderer can go on from them. Else the whole conversation is rendered.
        """
        if cannot_fit(new, self._max_tokens):
            return False
        return self._set_prompt(await self._rendering("render", self._next_prompt(new)))

    async def _next_prompt(self, new: list[Message]) -> Prompt:
        last = self.prompt
        assert last is not None, "there is no completion to answer"
        sampled_ids = np.asarray(self.turns[-1].completion.token_ids).tolist()
        old, answer = last.ids + sampled_ids, len(self.messages) - len(new) - 1

        def bridged() -> Prompt | None:
            rendered = self._renderer.bridge_to_next_turn(
                last.ids, sampled_ids, new, tools=self.tools
            )
            if rendered is None:
                return None
            # It describes the new messages alone. It kept less than all where a completion goes on after the end of its turn.
            kept = _kept(rendered.token_ids, old)
            check_all_rendered(rendered, new, start=kept)
            return described(
                rendered, last, sampled_ids, kept=kept, answer=answer, first=answer + 1
            )

        def whole() -> Prompt:
            rendered = self._rendered()
            kept = len(old) if rendered.token_ids[: len(old)] == old else 0
            return described(rendered, last, sampled_ids, kept=kept, answer=answer)

        prompt = await off_the_loop_if(_characters(new) > LARGE_TEXT, bridged)
        return (
            await off_the_loop_if(_characters(self.messages) > LARGE_TEXT, whole)
            if prompt is None
            else prompt
        )

    def _rendered(self) -> RenderedTokens:
        rendered = self._renderer.render(
            self.messages, tools=self.tools, add_generation_prompt=True
        )
        check_all_rendered(rendered, self.messages)
        return rendered

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
            for name in DESCRIBED:
                setattr(turn, f"prompt_{name}", getattr(prompt, name)[:length])
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
            if (
                isinstance(error, asyncio.CancelledError)
                and running is not None
                and running.cancelling()
            ):
                raise
            raise UserCodeError(
                f"{type(self._renderer).__name__}.{method}: {cause_of(error)}"
            ) from error
