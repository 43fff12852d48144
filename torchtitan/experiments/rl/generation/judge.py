"""A judge: a frozen model that envs and rubrics talk to in messages.

    env or rubric ──▶ Judge.chat ──▶ a server's /v1/chat/completions
                                └──▶ RenderedChat ──▶ a model that the run hosts, by tokens

The owner of a judge calls ``setup`` once, and then ``chat(messages)``. The judge limits how many
calls are in flight, retries calls that fail, and answers equal conversations once.
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
from torchtitan.experiments.rl.envs.special_texts import render_as_text
from torchtitan.experiments.rl.envs.stop_tokens import with_stop_texts
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.frozen import read_only
from torchtitan.experiments.rl.generation.references import HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.costs import add_cost
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient, SamplingConfig


class JudgeFailed(Exception):
    """A judge that gave no whole answer.

    The rollout that it was asked about can't be scored: the failure is never a reward.
    """


@dataclass(kw_only=True, slots=True, frozen=True)
class Reply:
    """A model's answer to messages."""

    message: Message
    prompt_tokens: int
    completion_tokens: int
    whole: bool = True
    """False if a limit on tokens cut the answer off."""


class ChatClient(Protocol):
    """A model that takes messages."""

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply: ...


class Judge(UserConfigurable):
    """Asks a frozen model in messages. Equal conversations share one call and its answer.

    Make one judge for each task and process: its limits hold for that one.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model: Annotated[
            ModelReference, Cure("name a FrozenModel (a server) or a HostedModel (a checkpoint)")
        ]
        name: Annotated[str, MinLen(1), Cure("errors and metrics name the judge by it")] = "judge"
        renderer: RendererConfig = field(default_factory=RendererConfig)
        """Renderer of a hosted model, which uses the tokenizer in the model's folder."""
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
        """Sampling of answers. Greedy by default, so that one conversation has one verdict."""
        max_concurrency: PositiveInt = 64
        """Maximum number of calls in flight at once. More wait."""
        timeout_s: PositiveFloat = 20.0
        """Time limit of each attempt, in seconds.

        All attempts together should take less than the caller's own limit (Rubric.timeout_s),
        because an error of that limit does not name the judge. The defaults do not: three attempts
        may take 60 s, and a reward function 30 s. Lower this or raise that."""
        max_retries: NonNegativeInt = 2
        """Number of attempts after the first. Within each, the client of a server retries
        ``FrozenModel.max_retries`` times."""
        backoff_s: NonNegativeFloat = 0.5
        """Pause before the first retry, in seconds. It doubles for each further retry."""
        cache_size: NonNegativeInt = 4096
        """Maximum number of answers that are kept, the least recently used ones first to go.

        With 0, equal conversations still share a call while it is open."""

    def __init__(self, config: Config):
        self.config = config
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._calls: OrderedDict[str, asyncio.Task[Reply]] = OrderedDict()
        """Open calls and kept answers by their conversation, least recently used first."""
        self._client: ChatClient | None = None

    async def setup(self, policy: PolicyClient) -> None:
        """Connect to the model. The rubric or env that owns the judge calls it in its ``setup``.

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
        """Return the judge's answer to a conversation, as an assistant's message.

        Raises:
            JudgeFailed: every attempt failed, or the answer was cut off. The error names the judge.
        """
        key = json.dumps(list(messages), sort_keys=True)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = asyncio.create_task(
                self._ask(list(messages), zlib.crc32(key.encode()))
            )
            call.add_done_callback(lambda ended: self._keep_or_forget(key, ended))
        else:
            self._count("cached", 1)
        self._calls.move_to_end(key)
        # The call is shielded because other callers may wait for it too, and its answer read-only
        # because they are given the same one.
        return read_only((await asyncio.shield(call)).message)

    def _keep_or_forget(self, key: str, call: asyncio.Task[Reply]) -> None:
        """Forget a call that failed, and the answers beyond the cache's size.

        A conversation whose call is forgotten is asked again.
        """
        has_failed = call.cancelled() or call.exception() is not None
        if has_failed and self._calls.get(key) is call:
            del self._calls[key]
        answered = [other for other, task in self._calls.items() if task.done()]
        too_many = max(0, len(answered) - self.config.cache_size)
        for oldest in answered[:too_many]:
            del self._calls[oldest]

    async def _ask(self, messages: list[Message], seed: int) -> Reply:
        """Ask the model until it gives a whole answer.

        Raises:
            JudgeFailed: no attempt gave one, or ``setup`` was not called.
        """
        config = self.config
        if self._client is None:
            raise JudgeFailed(
                f"judge {config.name!r} was asked before its setup: call judge.setup(policy) in "
                "yours"
            )
        problem = ""
        async with self._slots:
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
                    limit = config.sampling.max_tokens
                    problem = f"its answer was cut off at sampling.max_tokens = {limit}"
                    if config.sampling.temperature == 0:  # the same answer would be cut off again
                        break
            finally:
                self._count("seconds", time.perf_counter() - began)
        self._count("failed", 1)
        raise JudgeFailed(f"judge {config.name!r} failed, last with: {problem}")

    def _count(self, quantity: str, amount: float) -> None:
        """Add to one of the judge's metrics, for the group whose rollout asked."""
        add_cost(f"judge/{self.config.name}/{quantity}", amount)


class RenderedChat:
    """A ChatClient of a model that takes tokens."""

    def __init__(self, client: ModelClient, renderer: Renderer, *, owner: str):
        self._model = client
        self._renderer = renderer
        self._owner = owner
        """Name of the judge."""

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        rendered = render_as_text(self._renderer, messages, add_generation_prompt=True)
        prompt = rendered.token_ids
        session = self._model.session(
            # The seed follows from the conversation. If the order of requests matters, it does not
            # depend on which rollout asked first.
            rollout_id=f"judge-{self._owner}/{seed}",
            seed=seed,
            sampling=with_stop_texts(sampling, self._renderer),
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
