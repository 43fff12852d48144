"""A conversation in messages and in tokens, whoever drives it: an env or an agent.

    open(messages)         prompt      P1
    add_completion(C1)     messages    ..., the completion as a message
    add_messages(answer)   prompt      P1 + C1 + E1, or P2 where the template rewrites history

Each completion is a turn. `rollouts/samples.py` makes training samples of the turns; no id that was
sampled is rendered again.

The text of a special token in a message, such as "<|im_end|>", is rendered as text
(`special_texts.py`), unless who wrote the message means it as a control token.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from renderers import Message, RenderedTokens, Renderer, ToolSpec

from torchtitan.experiments.rl.ask.call import is_cancelled
from torchtitan.experiments.rl.envs.messages import assistant_message, check_all_rendered
from torchtitan.experiments.rl.envs.prompt import (
    PROMPT_ARRAYS,
    GroupPrompts,
    Prompt,
    first_prompt,
    next_prompt,
)
from torchtitan.experiments.rl.envs.special_texts import SpecialTexts, special_texts
from torchtitan.experiments.rl.envs.tool_calls import parse_completion
from torchtitan.experiments.rl.envs.yield_queue import Priority, compute
from torchtitan.experiments.rl.errors import UserCodeError, cause_of
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.samples import checked_completion
from torchtitan.experiments.rl.rollouts.types import Completion, RolloutTurn

T = TypeVar("T")

LARGE_TEXT = 20_000
"""Number of characters above which rendering leaves the event loop. So many take some 20 ms, a
million of them a second or two."""

TOOL_FRAME = 300
"""Characters that a tool counts as beside its own. The time to render tools grows with the square
of their number: 50 small ones take some 20 ms, 300 of them 0.8 s."""

LARGE_COMPLETION = 5_000
"""Number of tokens above which parsing leaves the event loop."""

LONGEST_TOKEN = 256
"""Upper bound of a token's characters; no token of a vocabulary in use has more than 128."""

SHORT_COMPLETION = 32
"""Number of tokens up to which parsed completions are remembered. Longer ones are hardly ever
equal."""


def cannot_fit(
    messages: Sequence[Message], tokens: int, tools: Sequence[ToolSpec] | None = None
) -> bool:
    """Return True if messages and tools are too long for so many tokens, whatever their text is.

    These need not be tokenised. Space around a text may take no token, because templates strip it;
    a tool takes one at least.
    """
    characters = sum(len(text.strip()) for text in _texts(messages))
    characters += sum(map(len, _strings(tools or ())))
    return len(tools or ()) > tokens or characters > LONGEST_TOKEN * tokens


def _characters(messages: Sequence[Message], tools: Sequence[ToolSpec] | None = None) -> int:
    """Return the number of characters that a rendering of messages and tools goes through.

    A tool counts as `TOOL_FRAME` characters more than its own.
    """
    own = sum(map(len, _texts(messages))) + sum(map(len, _strings(tools or ())))
    return own + TOOL_FRAME * len(tools or ())


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the texts of the messages."""
    for message in messages:
        content = message["content"]
        for part in [content] if isinstance(content, str) else content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _strings(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, also the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)


def _rendered(conversation: "_ToRender") -> RenderedTokens:
    """Render a whole conversation, and raise if the renderer left a message out."""
    rendered = conversation.renderer.render(
        conversation.messages, tools=conversation.tools, add_generation_prompt=True
    )
    check_all_rendered(rendered, conversation.messages)
    return rendered


def _common_prefix(ids: list[int], old: list[int]) -> int:
    """Return how many of the ``old`` tokens a prompt starts with."""
    if ids[: len(old)] == old:
        return len(old)
    for index, (new_id, old_id) in enumerate(zip(ids, old, strict=False)):
        if new_id != old_id:
            return index
    return min(len(ids), len(old))


@dataclass(frozen=True, slots=True)
class _ToRender:
    """Messages and tools as a renderer takes them."""

    messages: list[Message]
    tools: list[ToolSpec] | None
    plain: Renderer
    """Renderer of conversations without special texts."""
    texts: SpecialTexts | None
    """Special texts if these messages or tools have twins of some; None if they have none."""

    @property
    def renderer(self) -> Renderer:
        return self.plain if self.texts is None else self.texts.renderer


class Conversation:
    """The messages and tokens of one conversation.

    It is opened once. Then follow, in turns, a completion and, while the conversation goes on, the
    messages that answer it. Messages are given checked (`envs/messages.py`). Whatever the renderer
    raises is a UserCodeError that names it.
    """

    def __init__(self, renderer: Renderer, *, max_tokens: int, group: GroupPrompts | None = None):
        """Make an empty conversation.

        Args:
            max_tokens: maximum number of tokens of a prompt and its completion together.
            group: prompts that were rendered for other conversations of the group.
        """
        self.messages: list[Message] = []
        """The whole conversation so far."""
        self.tools: list[ToolSpec] | None = None
        self.turns: list[RolloutTurn] = []
        """One turn per completion."""
        self.prompt: Prompt | None = None
        """Prompt to sample from next; None if there is none."""
        self.special_texts = 0
        """Number of messages so far that had the text of a special token, which was rendered as
        text."""
        self._renderer = renderer
        self._special_texts = special_texts(renderer)
        self._control_token_indices: set[int] = set()
        """Indices of the messages whose special tokens are meant as control tokens."""
        self._max_tokens = max_tokens
        self._group = group or GroupPrompts()
        self._extended_turns: list[RolloutTurn] = []
        """The last turns, whose prompts are prefixes of the next."""
        self._prompted_at = 0.0

    @classmethod
    def after(cls, turns: list[RolloutTurn], renderer: Renderer, *, max_tokens: int) -> Self:
        """Return the conversation as it stood after the last of ``turns``.

        It goes on from there in another way than the turns' own conversation did.
        """
        last = turns[-1]
        forked = cls(renderer, max_tokens=max_tokens)
        assert last.prompt_message_indices is not None, "the turn is of a conversation"
        forked.turns = list(turns)
        forked.tools = last.tools
        forked.messages = [*last.prompt_messages, last.assistant_message]
        arrays = {name: getattr(last, f"prompt_{name}") for name in PROMPT_ARRAYS}
        forked.prompt = Prompt(ids=last.prompt_token_ids.tolist(), **arrays)
        return forked

    @property
    def max_completion_tokens(self) -> int:
        """Maximum number of tokens of the next completion; 0 if there is no next prompt."""
        return self._max_tokens - len(self.prompt.ids) if self.prompt else 0

    async def open(
        self,
        messages: list[Message],
        tools: list[ToolSpec] | None,
        *,
        control_tokens: bool = False,
    ) -> bool:
        """Render the opening conversation, and return False if it leaves no room to sample.

        Args:
            control_tokens: True if special tokens in the messages and tools are meant as control
                tokens.
        """
        self.tools = tools
        self.extend(messages, control_tokens=control_tokens)
        opening = self._to_render(0)

        async def render() -> Prompt | None:
            if cannot_fit(messages, self._max_tokens, tools):
                return None
            return await compute(
                lambda: first_prompt(_rendered(opening)),
                large=_characters(messages, tools) > LARGE_TEXT,
                priority=Priority.FIRST_PROMPT,
            )

        prompt = await self._rendering(
            "render", self._group.first(opening.messages, opening.tools, render)
        )
        return prompt is not None and self._set_prompt(prompt)

    def extend(self, messages: list[Message], *, control_tokens: bool = False) -> None:
        """Append messages that others than the model wrote.

        Args:
            control_tokens: True if special tokens in them are meant as control tokens.
        """
        first = len(self.messages)
        self.messages.extend(messages)
        if control_tokens:
            self._control_token_indices.update(range(first, len(self.messages)))
        elif self._special_texts is not None:
            found = map(self._special_texts.first_in, messages)
            self.special_texts += sum(token is not None for token in found)

    async def add_completion(self, completion: Completion) -> RolloutTurn:
        """Record a completion of the prompt as a turn, and parse it into the next message.

        Raises:
            ValueError: the completion can't be trained on.
        """
        prompt = self.prompt
        assert prompt is not None, "there is no prompt to complete"
        completion = checked_completion(completion)  # a task's own turn loop may have made it
        turn = RolloutTurn(
            prompt_messages=list(self.messages),
            **{f"prompt_{name}": getattr(prompt, name) for name in PROMPT_ARRAYS},
            completion=completion,
            assistant_message={"role": "assistant", "content": ""},
            tools=self.tools,
            generate_s=time.perf_counter() - self._prompted_at,
        )
        self.turns.append(turn)
        self._extended_turns.append(turn)
        sampled_ids = completion.token_ids.tolist()
        known_answers = prompt.answers if len(sampled_ids) <= SHORT_COMPLETION else {}

        def parse() -> Message:
            key = tuple(sampled_ids)
            if key not in known_answers:
                parsed = parse_completion(
                    self._renderer, sampled_ids, tools=self.tools, prompt_ids=prompt.ids
                )
                known_answers[key] = assistant_message(parsed, turn=len(self.turns) - 1)
            return known_answers[key]

        parsing = compute(parse, large=len(sampled_ids) > LARGE_COMPLETION)
        turn.assistant_message = await self._rendering("parse_response", parsing)
        self.messages.append(turn.assistant_message)
        return turn

    async def add_messages(self, new: list[Message]) -> bool:
        """Render the prompt after messages that answer the last completion.

        The caller has given ``new`` to ``extend`` before. Sampled tokens stay as they are if
        the renderer can go on from them. Otherwise the whole conversation is rendered.

        Returns:
            False if the prompt leaves no room for a completion.
        """
        if cannot_fit(new, self._max_tokens):
            return False
        return self._set_prompt(await self._rendering("render", self._next_prompt(new)))

    async def _next_prompt(self, new: list[Message]) -> Prompt:
        last = self.prompt
        assert last is not None, "there is no completion to answer"
        sampled_ids = self.turns[-1].completion.token_ids.tolist()
        old_ids = last.ids + sampled_ids
        answer_index = len(self.messages) - len(new) - 1

        answers = self._to_render(answer_index + 1)

        def bridge() -> Prompt | None:
            rendered = answers.renderer.bridge_to_next_turn(
                last.ids, sampled_ids, answers.messages, tools=answers.tools
            )
            if rendered is None:
                return None
            # The roles in `rendered` are those of the new messages alone. Its token ids begin with
            # the old ones, but for those that the completion has after the end of its turn.
            kept = _common_prefix(rendered.token_ids, old_ids)
            check_all_rendered(rendered, new, start=kept)
            return next_prompt(
                rendered,
                last,
                sampled_ids,
                kept=kept,
                answer_index=answer_index,
                first_index=answer_index + 1,
            )

        def render_anew(whole: _ToRender) -> Prompt:
            rendered = _rendered(whole)
            extends = rendered.token_ids[: len(old_ids)] == old_ids
            kept = len(old_ids) if extends else 0
            return next_prompt(rendered, last, sampled_ids, kept=kept, answer_index=answer_index)

        prompt = await compute(bridge, large=_characters(new) > LARGE_TEXT)
        if prompt is None:
            whole = self._to_render(0)
            is_large = _characters(self.messages, self.tools) > LARGE_TEXT
            prompt = await compute(functools.partial(render_anew, whole), large=is_large)
        return prompt

    def _to_render(self, first: int) -> _ToRender:
        """Return the tools, and the messages from ``first`` on, with twins of their special texts.

        Messages whose special tokens are control tokens are left as they are.
        """
        messages = self.messages[first:]
        texts = self._special_texts
        tools = self._tools_as_text
        has_twins = tools is not self.tools
        for index, message in enumerate(messages):
            if texts is None or texts.first_in(message) is None:
                continue
            if not self._has_control_tokens(first + index, texts):
                messages[index] = texts.twin(message)
                has_twins = True
        return _ToRender(messages, tools, self._renderer, texts if has_twins else None)

    @functools.cached_property
    def _tools_as_text(self) -> list[ToolSpec] | None:
        """Tools with twins of their special texts; the tools themselves if they have none."""
        texts = self._special_texts
        # The opening's special tokens are those of its tools too.
        if self.tools is None or texts is None or 0 in self._control_token_indices:
            return self.tools
        return self.tools if texts.first_in(self.tools) is None else texts.twin(self.tools)

    def _has_control_tokens(self, index: int, texts: SpecialTexts) -> bool:
        """Return True if a message's special texts stand for control tokens.

        Those of a sampled message do if the model sampled such tokens. If it sampled ordinary ones,
        as it does where it quotes a page, they are text in the next prompt too.
        """
        message = self.messages[index]
        for turn in self.turns:
            if turn.assistant_message is message:
                before_end = turn.completion.token_ids[:-1].tolist()
                return not texts.token_ids.isdisjoint(before_end)
        return index in self._control_token_indices

    def end(self) -> None:
        """End the conversation: there is no further prompt."""
        self.prompt = None

    def _set_prompt(self, prompt: Prompt) -> bool:
        """Take the next prompt, and return False if it leaves no room for a completion."""
        self.prompt = prompt
        self._prompted_at = time.perf_counter()
        if self.max_completion_tokens < 1:
            return False
        if not prompt.extends:
            self._extended_turns = []
        # The prompts of a conversation are prefixes of each other: kept as views, a long one is in
        # memory once.
        for turn in self._extended_turns:
            length = len(turn.prompt_token_ids)
            for name in PROMPT_ARRAYS:
                setattr(turn, f"prompt_{name}", getattr(prompt, name)[:length])
        return True

    async def _rendering(self, method: str, work: Awaitable[T]) -> T:
        """Return what the renderer makes.

        Raises:
            UserCodeError: the renderer failed, or was late; names it.
        """
        owner = f"{type(self._renderer).__name__}.{method}"
        try:
            with trace.span(method):
                return await work
        except UserCodeError as error:
            raise error.of(owner) from error
        except BaseException as error:  # noqa: BLE001 - a renderer may be the user's own
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            raise UserCodeError(f"{owner}: {cause_of(error)}") from error
