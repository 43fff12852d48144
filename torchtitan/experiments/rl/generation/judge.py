"""A judge: a frozen model that envs and rubrics talk to in messages.

What builds a judge asks for its model in ``setup``, and then calls ``chat(messages)``. A model that the run hosts is reached
through tokens, with a renderer of its own tokenizer; one behind a server through ``/v1/chat/completions``.
"""

import asyncio
import json
import time
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, cast

import numpy as np
from annotated_types import MinLen
from renderers import Message, Renderer

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import (
    Cure,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.envs.messages import assistant_message
from torchtitan.experiments.rl.envs.renderer import RendererConfig, build_renderer
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.generation.references import HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import add_cost


class JudgeFailed(Exception):
    """A judge gave no whole answer. Whoever asked can't be scored: the failure is never a reward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Reply:
    """What a model answered."""

    message: Message
    prompt_tokens: int
    completion_tokens: int
    whole: bool = True
    """False where a limit on tokens cut it off."""


class ChatClient(Protocol):
    """A model that takes messages."""

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply: ...


class Judge(UserConfigurable):
    """Equal conversations share one call and its answer. Make one for each task and process; its limits are of that one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model: Annotated[
            ModelReference, Cure("name a FrozenModel (a server) or a HostedModel (a checkpoint)")
        ]
        name: Annotated[str, MinLen(1), Cure("errors and metrics name the judge by it")] = "judge"
        renderer: RendererConfig = field(default_factory=RendererConfig)
        """Of a hosted model, with the tokenizer in its folder."""
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
        """Greedy by default, so that one conversation has one verdict."""
        max_concurrency: PositiveInt = 64
        """Calls in flight at once; more wait."""
        timeout_s: PositiveFloat = 20.0
        """For each attempt. All attempts together should take less than what asks may take (Rubric.timeout_s): an error of that
        limit does not name the judge."""
        max_retries: NonNegativeInt = 2
        """Attempts after the first. The client of a server retries by ``FrozenModel.max_retries`` within each."""
        backoff_s: NonNegativeFloat = 0.5
        """Wait before the first retry; doubled for each further one."""
        cache_size: NonNegativeInt = 4096
        """Answers that are kept, the last used ones. 0: none; calls that are open at once still share."""

    def __init__(self, config: Config):
        self.config = config
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._calls: OrderedDict[str, asyncio.Task[Reply]] = OrderedDict()
        self._client: ChatClient | None = None

    async def setup(self, policy: PolicyClient) -> None:
        """Reach the model. A rubric's or env's owner calls it in its own ``setup``.

        Raises:
            RunError: the run does not host the model, or the server does not answer.
        """
        model = self.config.model
        client = policy.frozen(model)
        if isinstance(model, HostedModel):
            self._client = RenderedChat(
                client, build_renderer(self.config.renderer, model.path), owner=self.config.name
            )
            return
        self._client = cast(ChatClient, client)
        await self._client.chat(
            [{"role": "user", "content": "Hello"}], seed=0, sampling=SamplingConfig(max_tokens=1)
        )

    async def chat(self, messages: Sequence[Message]) -> Message:
        """The judge's answer to a conversation, as an assistant's message.

        Raises:
            JudgeFailed: every attempt failed, or the answer was cut off. Names the judge.
        """
        key = json.dumps(list(messages), sort_keys=True)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.create_task(
                self._ask(list(messages), zlib.crc32(key.encode()))
            )
            call.add_done_callback(lambda done: self._ended(key, done))
        else:
            self._count("cached", 1)
        self._calls.move_to_end(key)
        # Shielded: one who stops waiting does not take the answer from others. Read-only: others
        # are given the same answer.
        return read_only((await asyncio.shield(call)).message)

    def _ended(self, key: str, call: asyncio.Task[Reply]) -> None:
        failed = call.cancelled() or call.exception() is not None
        if failed and self._calls.get(key) is call:  # the next one to ask tries again
            del self._calls[key]
        while sum(other.done() for other in self._calls.values()) > self.config.cache_size:
            del self._calls[next(known for known, other in self._calls.items() if other.done())]

    async def _ask(self, messages: list[Message], seed: int) -> Reply:
        if self._client is None:
            raise JudgeFailed(
                f"judge {self.config.name!r} was asked before its setup: call judge.setup(policy) in yours"
            )
        config, problem = self.config, ""
        async with self._places:
            began = time.perf_counter()
            try:
                for attempt in range(config.max_retries + 1):
                    if attempt:
                        await asyncio.sleep(config.backoff_s * 2 ** (attempt - 1))
                    self._count("calls", 1)
                    try:
                        async with asyncio.timeout(config.timeout_s):
                            reply = await self._client.chat(
                                messages, seed=seed + attempt, sampling=config.sampling
                            )
                    except (TimeoutError, RunError, ValueError, TypeError) as error:
                        problem = str(error) or f"no answer within timeout_s = {config.timeout_s:g}"
                        continue
                    self._count("prompt_tokens", reply.prompt_tokens)
                    self._count("completion_tokens", reply.completion_tokens)
                    if reply.whole:
                        return reply
                    problem = f"its answer was cut off at sampling.max_tokens = {config.sampling.max_tokens}"
                    if config.sampling.temperature == 0:  # it would be again
                        break
            finally:
                self._count("seconds", time.perf_counter() - began)
        self._count("failed", 1)
        raise JudgeFailed(f"judge {config.name!r} failed, last with: {problem}")

    def _count(self, what: str, amount: float) -> None:
        add_cost(f"judge/{self.config.name}/{what}", amount)


class RenderedChat:
    """Implements ChatClient over a model that takes tokens."""

    def __init__(self, client: ModelClient, renderer: Renderer, *, owner: str):
        self._model, self._renderer, self._owner = client, renderer, owner

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        prompt = self._renderer.render(list(messages), add_generation_prompt=True).token_ids
        session = self._model.session(
            # By what is asked: where order matters, it does not depend on who asked first.
            rollout_id=f"judge-{self._owner}/{seed}",
            seed=seed,
            sampling=sampling,
            stop_token_ids=self._renderer.get_stop_token_ids(),
        )
        try:
            completion = await session.generate(
                np.asarray(prompt, np.int32), max_tokens=sampling.max_tokens
            )
        finally:
            session.close()
        sampled = completion.token_ids.tolist()
        parsed = self._renderer.parse_response(sampled, prompt_ids=prompt)
        return Reply(
            message=assistant_message(parsed, turn=0),
            prompt_tokens=len(prompt),
            completion_tokens=len(sampled),
            whole=completion.finish_reason == "stop",
        )
