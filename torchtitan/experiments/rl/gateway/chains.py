"""Which turn of a rollout a request goes on from. Pure: no tokens, no I/O.

A client sends its whole history with each request. The histories of a rollout are a tree, whose branches are what the model
said::

    request 1   S U1                 turn 1 says A1: a root
    request 2   S U1 A1 T1           turn 2 goes on from turn 1, with T1 new
    request 3   S U1 A1 T2           turn 3 goes on from turn 1 too, with T2 new: a fork
    request 4   S' U9                turn 4: another root, such as a sub-agent or a compacted history

A request goes on from the deepest turn whose messages and answer begin its own. What the client sends back of an answer is
compared by what it means: a client may write the arguments of a call as other JSON of the same value, and may leave the
reasoning out. Where it goes on, the turn's own messages are the history, not the client's copies of them.
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
    extends: bool
    """Whether its prompt starts with its parent's prompt and completion, token for token."""
    children: "list[Node[T]]" = field(default_factory=list)
    taken: bool = False
    """Whether a request has gone on from it, or is about to."""

    def path(self) -> list[T]:
        """From the root to this turn."""
        nodes: list[T] = []
        node: Node[T] | None = self
        while node is not None:
            nodes.append(node.value)
            node = node.parent
        return nodes[::-1]


@dataclass(eq=False, slots=True)
class _Place(Generic[T]):
    """A message of some history, with all before it."""

    nodes: list[Node[T]] = field(default_factory=list)
    """Turns that said it; none where the client wrote it."""
    after: "dict[Hashable, dict[str, _Place[T]]]" = field(default_factory=dict)
    """The messages that followed it: by meaning, then by reasoning."""
    sent: Message | None = None
    means: Hashable = None
    """The message that was looked up last, and its meaning: in a long history it is the one that is looked for again."""

    def find(self, message: Message) -> "list[_Place[T]]":
        """Where a history goes on with the message: in several places where answers differ in nothing but their reasoning, and
        the client leaves it out. First the answer that has none."""
        if self.sent != message:
            self.sent, self.means = message, meaning(message)
        known, reasoning = self.after.get(self.means, {}), _reasoning(message)
        return [known[own] for own in sorted(known, key=bool) if own == reasoning or not reasoning]

    def add(self, message: Message) -> "_Place[T]":
        return self.after.setdefault(meaning(message), {}).setdefault(_reasoning(message), _Place())


@dataclass(slots=True)
class Match(Generic[T]):
    node: Node[T] | None
    """The turn that the request goes on from; None: it is a root."""
    known: int
    """Messages of the request up to that turn's answer, which is the last of them; the others are new."""
    place: _Place[T]


class Chains(Generic[T]):
    """The turns of one rollout."""

    def __init__(self) -> None:
        self.roots: list[Node[T]] = []
        self._scopes: list[tuple[Any, _Place[T]]] = []

    def match(self, scope: Any, messages: Sequence[Message]) -> Match[T]:
        """Where a request goes on.

        Args:
            scope: what else a history has to agree in, compared with ``==``: tools, and the model that is asked.
        """
        place = next((root for known, root in self._scopes if known == scope), None)
        if place is None:
            place = _Place()
            self._scopes.append((scope, place))
        match, places = Match(None, 0, place), [place]
        for index, message in enumerate(messages):
            places = [found for place in places for found in place.find(message)]
            if not places:
                break
            if said := next((place for place in places if place.nodes), None):
                # Of equal answers, one that nobody has gone on from. They are siblings: it does not matter which.
                match = Match(min(said.nodes, key=lambda node: node.taken), index + 1, said)
        return match

    def add(
        self,
        match: Match[T],
        new: Sequence[Message],
        said: Message | None,
        value: T,
        *,
        extends: bool,
        kept: Message | None = None,
    ) -> Node[T]:
        """A turn that has ended.

        Args:
            new: the request's messages after ``match.known``.
            said: the turn's answer; None: no client has it, so none goes on from it.
            extends: see ``Node``.
            kept: the answer with the stop text that ended it, which some clients put back.
        """
        node = Node(value, match.node, extends and match.node is not None)
        (self.roots if match.node is None else match.node.children).append(node)
        if said is not None:
            place = match.place
            for message in new:
                place = place.add(message)
            for answer in (said, kept):
                ended = None if answer is None else place.add(answer)
                if ended is not None and node not in ended.nodes:
                    ended.nodes.append(node)
        return node

    def in_order(self) -> Iterator[Node[T]]:
        """Every turn once, chain by chain: after a turn comes the one that extends it, if any, then its other branches.

        So training samples, which join a turn to the one before it, need to know nothing of trees.
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
    """What two messages that mean the same have in common, reasoning aside. Their contents are texts: dialects join parts."""
    role, content = message["role"], message["content"]
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
    """The arguments that a tool is called with, as canonical JSON; as they are where they are no JSON."""
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value if isinstance(value, dict) else {"value": value}, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or "").strip()
