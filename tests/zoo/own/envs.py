"""Kinds of envs and the tasks that make them."""

from typing import Any

import numpy as np

from tests.zoo import world
from tests.zoo.misbehaviour import Kind, LyingLength, LyingNumber, answering, changing
from tests.zoo.own.makers import (
    HUGE,
    SURROGATE,
    Own,
    harmless,
    meddling,
    refused,
    said,
    with_,
    wrong_types,
)

MESSAGES: dict[str, Any] = {
    "no list": "hello",
    "None": None,
    "a dict": {"role": "user", "content": "x"},
    "of None": [None],
    "of texts": ["hello"],
    "without a role": [{"content": "x"}],
    "of an unknown role": said("x", "wizard"),
    "of no role": said("x", None),
    "of a role in a list": said("x", ["user"]),
    "without content": [{"role": "user"}],
    "with None for content": said(None),
    "with a number for content": said(3.5),
    "with bytes for content": said(b"x"),
    "with a dict for content": said({"text": "x"}),
    "with an image": said(
        [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
    ),
    "with an unknown part": said([{"type": "smell", "smell": "x"}]),
    "with a part without a type": said([{"text": "x"}]),
    "with plain values for parts": said(["x", 7]),
    "with None for a part": said([None]),
    "with a number for a text part": said([{"type": "text", "text": 7}]),
    "with a surrogate": said(SURROGATE),
    "with a surrogate in a part": said([{"type": "text", "text": SURROGATE}]),
    "with a lying length": LyingLength(),
    "with a bad tool call": [
        {"role": "assistant", "content": "", "tool_calls": [None]},
        *said("x"),
    ],
    "with a text for tool calls": [
        {"role": "assistant", "content": "", "tool_calls": "call"},
        *said("x"),
    ],
}
TOOLS: dict[str, Any] = {
    "a text": "tool",
    "a dict": {"name": "tool"},
    "of None": [None],
    "of texts": ["tool"],
    "without a name": [{"type": "function", "function": {}}],
    "with a number for a name": [{"type": "function", "function": {"name": 7, "parameters": {}}}],
    "a number": 7,
    "None": None,
    "with an object in it": [
        {"type": "function", "function": {"name": "x", "parameters": {"a": object()}}}
    ],
    "with a surrogate": [
        {"type": "function", "function": {"name": "x", "description": SURROGATE, "parameters": {}}}
    ],
}
COMPONENTS: dict[str, Any] = {
    "None": None,
    "a list": [1.0],
    "nan": {"x": float("nan")},
    "infinite": {"x": float("inf")},
    "a text": {"x": "1"},
    "an array": {"x": np.ones(2)},
    "named by a number": {1: 1.0},
    "too large for a float": {"x": 10**400},
    "a lying number": {"x": LyingNumber()},
    "None by name": {"x": None},
}
FINISHES: dict[str, Any] = {
    "a text": "no",
    "None": None,
    "a number": 1,
    "an array": np.ones(2, bool),
    "a lying number": LyingNumber(),
}

ENV_RESET: Own = (
    wrong_types()
    | {f"messages {name}": ("refused", with_(messages=value)) for name, value in MESSAGES.items()}
    | {"messages empty": ("refused", with_(messages=[]))}
    | {"messages of a million characters": ("overflows", with_(messages=said(HUGE)))}
    | {f"tools {name}": ("refused", with_(tools=value)) for name, value in TOOLS.items()}
)
ENV_STEP: Own = (
    wrong_types()
    | {
        f"messages {name}": ("refused", with_(env_messages=value, done=False))
        for name, value in MESSAGES.items()
    }
    | {"messages empty and not done": ("refused", with_(env_messages=[], done=False))}
    | {f"done {name}": ("refused", with_(done=value)) for name, value in FINISHES.items()}
    | {
        f"reward components {name}": ("refused", with_(reward_components=value))
        for name, value in COMPONENTS.items()
    }
    | harmless(
        edits_the_message_it_is_given=meddling(
            lambda env, message: message.update(content="changed", role="user")
        ),
        empties_the_message_it_is_given=meddling(lambda env, message: message.clear()),
    )
)


# ---- tasks


def _shared(envs: list, chosen: tuple[int, ...]) -> list:
    kept = [envs[index] for index in chosen[: len(envs)]]
    world.forget(*(env for env in envs if not any(env is other for other in kept)))
    return kept


MAKE_ENVS: Own = (
    wrong_types()
    | refused(
        shares_one_env=changing(lambda envs: _shared(envs, (0, 0, 0, 0))),
        shares_two_envs=changing(lambda envs: _shared(envs, (0, 1, 0, 1))),
        gives_too_few=changing(lambda envs: (world.forget(envs[-1]), envs[:-1])[1]),
        gives_too_many=Kind(
            change=lambda envs, task, sample, n: [*envs, world.HonestEnv(sample, 0, task.name)]
        ),
        gives_None_among_them=changing(
            lambda envs: (world.forget(envs[-1]), [*envs[:-1], None])[1]
        ),
        gives_the_class=answering(lambda: [world.HonestEnv] * world.GROUP_SIZE),
        gives_a_tuple_of_texts=answering(lambda: ("env",) * world.GROUP_SIZE),
    )
    | {
        "gives one env for all groups": (
            "refused again",
            Kind(
                change=lambda envs, task, sample, n: [
                    _pool(task, env, i) for i, env in enumerate(envs)
                ]
            ),
        )
    }
)


def _pool(task: Any, env: Any, index: int) -> Any:
    """The envs of the first group again: each was used and closed."""
    kept = task.__dict__.setdefault("pool", {}).setdefault(index, env)
    if kept is not env:
        world.forget(env)
    return kept


MAKE_ENV: Own = wrong_types() | {
    "gives one env for all": ("refused", Kind(change=lambda env, task, sample: _first(task, env))),
}


def _first(task: Any, env: Any) -> Any:
    first = task.__dict__.setdefault("first", env)
    if first is not env:
        world.forget(env)
    return first


RUN_ROLLOUT: Own = harmless(answers_something=changing(lambda answer: "done")) | refused(
    returns_at_once=answering(lambda: None)
)
