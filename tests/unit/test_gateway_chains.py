"""The turn that a request goes on from is found, as by a search through all turns, over histories and what clients make of them."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.experiments.rl.gateway.chains import TurnTree, arguments_of, meaning

USERS = st.sampled_from(["go", "more", "no", ""])
ANSWERS = st.sampled_from(["yes", "maybe", ""])
REASONING = st.sampled_from(["", "because", "why"])
ARGUMENTS = st.sampled_from([{}, {"a": 1, "b": [2, {"d": 3, "c": 4}]}, {"a": 2}])


def user(text):
    return {"role": "user", "content": text}


def said(text, reasoning="", arguments=None):
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if arguments is not None:
        function = {"name": "search", "arguments": json.dumps(arguments)}
        message["tool_calls"] = [{"id": "call_0_0", "type": "function", "function": function}]
    return message


def as_clients_send(message, how):
    """The message as a client may write it: the same in meaning."""
    sent = copy.deepcopy(message)
    for call in sent.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        turned = dict(reversed(arguments.items()))
        call["function"]["arguments"] = [
            json.dumps(arguments),
            json.dumps(turned, indent=2),
            turned,
        ][how % 3]
        call["id"] = f"own_{how}"
    if how % 2:
        sent.pop("reasoning_content", None)
    return sent


def agrees(ours, theirs):
    """Written apart from the library's keys: role, text, calls by their values, and reasoning where it is sent."""

    def calls(message):
        values = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        return [json.loads(value) if isinstance(value, str) else value for value in values]

    reasoning = theirs.get("reasoning_content")
    same_reasoning = not reasoning or reasoning == ours.get("reasoning_content")
    same = all(ours[key] == theirs[key] for key in ("role", "content"))
    return same and calls(ours) == calls(theirs) and same_reasoning


@st.composite
def steps(draw):
    """Requests: each goes on from a turn before it, or begins anew, and says something new."""
    count = draw(st.integers(1, 10))
    return [
        {
            "from": draw(st.integers(-1, index - 1)),
            "new": [user(draw(USERS)) for _ in range(draw(st.integers(1, 2)))],
            "said": said(draw(ANSWERS), draw(REASONING), draw(st.none() | ARGUMENTS)),
            "how": draw(st.integers(0, 11)),
        }
        for index in range(count)
    ]


@settings(deadline=None, max_examples=300)
@given(steps())
def test_a_request_goes_on_from_the_deepest_turn_that_begins_it(script):
    tree, turns = TurnTree(), []
    for step in script:
        history = turns[step["from"]][0] if step["from"] >= 0 else []
        request = [as_clients_send(message, step["how"]) for message in [*history, *step["new"]]]
        match = tree.match("scope", request)
        depths = [
            len(known)
            for known, _ in turns
            if len(known) <= len(request)
            and all(agrees(a, b) for a, b in zip(known, request, strict=False))
        ]
        assert match.known == max(depths, default=0)
        path = [] if match.node is None else match.node.path()
        own = turns[path[-1]][0] if path else []
        assert len(own) == match.known and all(
            agrees(a, b) for a, b in zip(own, request, strict=False)
        )
        node = tree.add(match, request[match.known :], step["said"], len(turns), extends=True)
        turns.append(([*own, *request[match.known :], step["said"]], node))
    assert sorted(node.value for node in tree.in_order()) == list(range(len(turns)))


@settings(deadline=None, max_examples=100)
@given(steps())
def test_turns_are_handed_on_chain_by_chain(script):
    tree, nodes = TurnTree(), []
    for index, step in enumerate(script):
        history = nodes[step["from"]].value[1] if step["from"] >= 0 else []
        request = [*history, *step["new"]]
        match = tree.match("scope", request)
        value = (index, [*request, step["said"]])
        nodes.append(
            tree.add(match, request[match.known :], step["said"], value, extends=index % 2 == 0)
        )
    order = list(tree.in_order())
    for before, node in zip([None, *order], order, strict=False):
        extending = (
            [child for child in node.parent.children if child.extends] if node.parent else []
        )
        # The first that extends a turn comes right after it: that is what joins it to the turn's sample.
        if extending and node is extending[0]:
            assert before is node.parent


def test_another_scope_is_another_tree():
    tree = TurnTree()
    tree.add(
        tree.match(("policy", None), [user("go")]), [user("go")], said("yes"), 1, extends=False
    )
    request = [user("go"), said("yes"), user("more")]
    assert tree.match(("policy", None), request).known == 2
    assert tree.match(("policy", [{"name": "new"}]), request).known == 0


def test_of_equal_answers_one_that_nobody_went_on_from_is_taken():
    tree, request = TurnTree(), [user("go")]
    first = tree.add(tree.match("s", request), request, said("yes"), 1, extends=False)
    second = tree.add(tree.match("s", request), request, said("yes"), 2, extends=False)
    first.taken = True
    assert tree.match("s", [*request, said("yes"), user("more")]).node is second


def test_the_turn_that_extends_another_comes_right_after_it_and_a_root_extends_nothing():
    tree, go, yes = TurnTree(), user("go"), said("yes")
    root = tree.add(tree.match("s", [go]), [go], yes, "root", extends=True)
    for branch, extends in (("left", False), ("longer", True), ("right", False)):
        request = [go, yes, user(branch)]
        match = tree.match("s", request)
        tree.add(match, request[match.known :], said("no"), branch, extends=extends)
    assert [node.value for node in tree.in_order()] == ["root", "longer", "left", "right"]
    assert not root.extends and [node.extends for node in root.children] == [False, True, False]


def test_where_a_client_leaves_reasoning_out_every_answer_that_may_be_meant_is_followed():
    """Two answers differ in their reasoning alone: a history goes on from the one that has its second answer below it."""
    tree, go, yes = TurnTree(), user("go"), said("yes", reasoning="because")
    first = tree.add(tree.match("s", [go]), [go], yes, 1, extends=False)
    deep = tree.add(tree.match("s", [go, yes, go]), [go], said("no"), 2, extends=True)
    plain = tree.add(tree.match("s", [go]), [go], said("yes"), 3, extends=False)
    assert tree.match("s", [go, said("yes"), go]).node is plain
    assert tree.match("s", [go, yes, go]).node is first
    assert tree.match("s", [go, said("yes"), go, said("no"), go]).node is deep


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (said("x", arguments={"a": 1, "b": 2}), said("x", arguments={"b": 2, "a": 1}), True),
        (said("x", arguments={"a": 1}), said("x", arguments={"a": "1"}), False),
        (said("x", arguments={"a": 1}), said("x"), False),
        (
            said("x", arguments={"a": 1}),
            said("x") | {"tool_calls": [{"name": "search", "arguments": '{"a": 1}'}]},
            True,
        ),
        (said("x "), said("x"), True),
        (user("x "), user("x"), False),
        (user("x"), said("x"), False),
    ],
)
def test_what_two_messages_of_one_meaning_may_differ_in(ours, theirs, same):
    assert (meaning(ours) == meaning(theirs)) is same


@pytest.mark.parametrize(
    ("arguments", "canonical"),
    [
        ('{"b": 1,  "a": [2]}', '{"a": [2], "b": 1}'),
        ({"b": 1, "a": 2}, '{"a": 2, "b": 1}'),
        ("3", '{"value": 3}'),
        (None, '{"value": null}'),
        ("{b", "{b"),
    ],
)
def test_arguments_of_a_call_are_compared_as_json(arguments, canonical):
    assert arguments_of({"arguments": arguments}) == canonical


def test_looking_up_a_long_history_canonicalises_only_what_is_new(monkeypatch):
    tree, history = TurnTree(), []
    looked_at = []
    monkeypatch.setattr(
        "torchtitan.experiments.rl.gateway.chains.meaning",
        lambda message: looked_at.append(message) or meaning(message),
    )
    for turn in range(128):
        history.append(user(f"{turn}"))
        request = copy.deepcopy(history)  # a client's own copies
        looked_at.clear()
        match = tree.match("s", request)
        assert match.known == len(history) - 1
        tree.add(match, request[match.known :], said(f"a{turn}"), turn, extends=True)
        history.append(said(f"a{turn}"))
        assert len(looked_at) <= 5
