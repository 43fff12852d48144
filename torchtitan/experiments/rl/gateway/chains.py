"""Finds the turn of a rollout that a request goes on from. Pure: no tokens, no I/O.

A client sends its whole history with each request. The histories of a rollout are a tree, whose
branches are what the model said:

    request 1   S U1                 turn 1 says A1: a root
    request 2   S U1 A1 T1           turn 2 goes on from turn 1, with T1 new
    request 3   S U1 A1 T2           turn 3 goes on from turn 1 too, with T2 new: a fork
    request 4   S' U9                turn 4: another root, such as of a sub-agent

A request goes on from the deepest turn whose messages and answer begin its own. What the client
sends back of an answer is compared by its meaning: a client may write the arguments of a call as
other JSON of the same value, and may leave the reasoning out. The prompt is made of the messages
that the turn has, and not of the client's copies of them.
"""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from renderers import Message

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Node(Generic[T]):
    """A turn in the tree."""

    value: T
    parent: "Node[T] | None"
    """Turn that this one goes on from; None for a root."""
    extends: bool
    """True if the turn's prompt starts with the parent's prompt and completion, token for token."""
    children: "list[Node[T]]" = field(default_factory=list)
    taken: bool = False
    """True if a request has gone on from the turn, or is about to."""

    def path(self) -> list[T]:
        """Return the values from the root to this turn."""
        nodes: list[T] = []
        node: Node[T] | None = self
        while node is not None:
            nodes.append(node.value)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False, slots=True)
class _Prefix(Generic[T]):
    """First messages of a history."""

    nodes: list[Node[T]] = field(default_factory=list)
    """Turns whose answer is the last of these messages; none if the client wrote that one."""
    longer: "dict[Hashable, dict[str, _Prefix[T]]]" = field(default_factory=dict)
    """Prefixes with one message more, by its meaning and then by its reasoning."""
    last_message: Message | None = None
    """Message that was looked up last. In a long history the same one is looked up again."""
    last_meaning: Hashable = None
    """Meaning of that message."""

    def find(self, message: Message) -> "list[_Prefix[T]]":
        """Return the known prefixes that have this message as one more.

        There are several if answers differ in nothing but their reasoning, and the client leaves it
        out. The answer without reasoning comes first.
        """
        if self.last_message != message:
            self.last_message = message
            self.last_meaning = meaning(message)
        known = self.longer.get(self.last_meaning, {})
        reasoning = _reasoning(message)
        return [
            known[other] for other in sorted(known, key=bool) if other == reasoning or not reasoning
        ]

    def add(self, message: Message) -> "_Prefix[T]":
        """Return the prefix that has this message as one more, made if there is none."""
        by_reasoning = self.longer.setdefault(meaning(message), {})
        return by_reasoning.setdefault(_reasoning(message), _Prefix())


@dataclass(slots=True)
class Match(Generic[T]):
    """Place of a request in the tree."""

    node: Node[T] | None
    """Turn that the request goes on from; None if it begins a history."""
    known: int
    """Number of the request's messages up to and with that turn's answer. The others are new."""
    prefix: _Prefix[T]
    """The known messages."""


class TurnTree(Generic[T]):
    """Tree of the turns of one rollout."""

    def __init__(self) -> None:
        self.roots: list[Node[T]] = []
        """Turns that go on from no other."""
        self._scopes: list[tuple[object, _Prefix[T]]] = []
        """Empty prefix of the histories of each scope."""

    def match(self, scope: object, messages: Sequence[Message]) -> Match[T]:
        """Return the turn that a request goes on from.

        Args:
            scope: what histories have to agree in beside their messages, compared with ``==``: the
                tools, and the model that is asked.
        """
        empty = self._empty_prefix(scope)
        match = Match(None, 0, empty)
        prefixes = [empty]
        for index, message in enumerate(messages):
            prefixes = [longer for prefix in prefixes for longer in prefix.find(message)]
            if not prefixes:
                break
            answered = next((prefix for prefix in prefixes if prefix.nodes), None)
            if answered is not None:
                # Of equal answers, take one that nobody has gone on from. They are siblings, so it
                # does not matter which.
                node = min(answered.nodes, key=lambda node: node.taken)
                match = Match(node, index + 1, answered)
        return match

    def _empty_prefix(self, scope: object) -> _Prefix[T]:
        for known, empty in self._scopes:
            if known == scope:
                return empty
        empty = _Prefix()
        self._scopes.append((scope, empty))
        return empty

    def add(  # noqa: PLR0913 - a turn, and how it was reached
        self,
        match: Match[T],
        new: Sequence[Message],
        answer: Message | None,
        value: T,
        *,
        extends: bool,
        whole_answer: Message | None = None,
    ) -> Node[T]:
        """Add a turn that has ended.

        Args:
            match: place of the turn's request in the tree.
            new: messages of the request after ``match.known``.
            answer: answer that the client was sent; None if no client has it, so that none goes on
                from it.
            extends: see `Node`.
            whole_answer: answer with the stop text that ended it, which some clients put back.
        """
        node = Node(value, match.node, extends and match.node is not None)
        siblings = self.roots if match.node is None else match.node.children
        siblings.append(node)
        if answer is None:
            return node
        prefix = match.prefix
        for message in new:
            prefix = prefix.add(message)
        for form in (answer, whole_answer):
            if form is not None:
                nodes = prefix.add(form).nodes
                if node not in nodes:
                    nodes.append(node)
        return node

    def in_order(self) -> Iterator[Node[T]]:
        """Yield every turn once, chain by chain.

        After a turn comes the one that extends it, if any, and then its other branches. So training
        samples, which join a turn to the one before it, need to know nothing of trees.
        """
        waiting = self.roots[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += [
                child
                for extends in (False, True)
                for child in reversed(node.children)
                if child.extends is extends
            ]


def meaning(message: Message) -> Hashable:
    """Return a key that is equal for messages of the same meaning, whatever their reasoning.

    Contents are texts, because the dialects join parts.
    """
    role = message["role"]
    content = message["content"]
    if role != "assistant":
        return role, content
    calls = message.get("tool_calls") or ()
    functions = (call.get("function", call) for call in calls)
    return (
        role,
        content.strip(),
        *((function["name"], arguments_of(function)) for function in functions),
    )


def arguments_of(function: Mapping[str, Any]) -> str:
    """Return the arguments of a call as canonical JSON, or as they are if they are no JSON."""
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value if isinstance(value, dict) else {"value": value}, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()
