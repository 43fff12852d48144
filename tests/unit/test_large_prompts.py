"""Large tools and long space, which a rendering goes through too: off the event loop, or refused before they are tokenised."""

import threading

import pytest

from tests.fakes.policy import ScriptedPolicy
from tests.unit.agents import client_of, run_agent
from torchtitan.experiments.rl.envs.conversation import LARGE_TEXT, Conversation, cannot_fit
from torchtitan.experiments.rl.rollouts.types import RolloutStatus

HELLO = {"role": "user", "content": "hello"}


def tools(count, description="Adds."):
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "description": description}}
        for number in range(count)
    ]


class Watched:
    """Renderer that notes the threads in which it renders."""

    def __init__(self, renderer):
        self.threads = []
        self._renderer = renderer

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    def render(self, *args, **options):
        self.threads.append(threading.get_ident())
        return self._renderer.render(*args, **options)


@pytest.mark.parametrize(
    ("message", "offered", "on_loop"),
    [
        (HELLO, tools(20), True),
        (HELLO, tools(100), False),
        (HELLO, tools(1, "adds " * (LARGE_TEXT // 5)), False),
        ({"role": "user", "content": "hello" + " " * LARGE_TEXT}, None, False),
    ],
    ids=["20 small tools", "100 small tools", "a large description", "long space"],
)
async def test_what_takes_long_to_render_is_rendered_off_the_event_loop(
    message, offered, on_loop, renderer
):
    watched = Watched(renderer)
    conversation = Conversation(watched, max_tokens=200_000)
    assert await conversation.open([message], offered)
    (thread,) = watched.threads
    assert (thread == threading.get_ident()) is on_loop


@pytest.mark.parametrize(
    ("message", "offered", "fits"),
    [
        (HELLO, tools(1, "x" * 2**20), False),
        (HELLO, tools(1_000), False),
        (HELLO, tools(512), True),
        ({"role": "user", "content": " " * 2**20}, None, True),  # a template may strip it
        ({"role": "user", "content": "x" + " " * 2**20 + "x"}, None, False),
    ],
    ids=["a description of 1 MiB", "1,000 tools", "512 tools", "space", "space inside of a text"],
)
def test_tools_count_in_what_can_not_fit(message, offered, fits):
    """A token has at most 256 characters, a tool at least one token."""
    assert cannot_fit([message], 512, offered) is not fits


async def test_tools_that_can_not_fit_are_refused_and_never_rendered(renderer, tokenizer):
    watched = Watched(renderer)

    async def agent(sample, endpoint):
        async with client_of(endpoint) as ask:
            for offered, code in (
                (tools(1, "x" * 10_000_000), "context_length_exceeded"),
                (tools(1_000), "context_length_exceeded"),
                (tools(10_000), "invalid_request"),
            ):
                status, reply = await ask([HELLO], tools=offered)
                assert status == 400 and reply["error"]["code"] == code

    rollout = await run_agent(agent, ScriptedPolicy(tokenizer, "ok"), watched, tokens=512)
    assert not watched.threads
    assert list(rollout.refusals) == [
        "more tokens > 511 maximum (env.max_rollout_tokens): compact the conversation, or begin a "
        "new one",
        "tools has 10000 entries, want at most 1024: offer those that the agent needs now",
    ]
    assert rollout.status is RolloutStatus.ERROR
