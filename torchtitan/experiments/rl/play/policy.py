"""The policy of a played task: a person's answers, and a model's for the turns that the person lets it answer."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np
from renderers import Message

from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy, ScriptedSession


class ModelAsked(Exception):
    """The person lets the model answer this turn."""


class Model(Protocol):
    """What answers then: ``generation/endpoint.py`` or ``model.py``."""

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> PolicySession: ...

    async def close(self) -> None: ...


class Person(Protocol):
    """player.py."""

    def reply(self, rollout: int, turn: int) -> str: ...

    def judge(self, messages: Sequence[Message]) -> str: ...

    def waits(self) -> None: ...

    def model_failed(self, why: str) -> None: ...

    def model_answered(self, rollout: int, text: str) -> None: ...


class PlayedPolicy(ScriptedPolicy):
    """Implements rollouts.policy.PolicyClient. A model's tokens stay as it sampled them, with its log-probabilities."""

    def __init__(self, tokenizer_path: str, person: Person, model: Callable[[], Model]):
        """``model`` is called when it is asked first; it may raise ConfigError."""
        super().__init__(tokenizer_path, person.reply)
        self.person, self.one_turn = person, asyncio.Lock()
        self._make = model
        self._model: Model | None = None

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = self._make()
        return self._model

    def session(self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]) -> "PlayedSession":
        """See ModelClient.session."""

        def by_model() -> PolicySession:
            return self.model.session(rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids)

        return PlayedSession(self, self.index_of(rollout_id), sampling, stop_token_ids, by_model)

    async def chat(self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig) -> Reply:
        """See ChatClient.chat. The person is the judge too."""
        async with self.one_turn:
            text = self.person.judge(messages)
        return Reply(message={"role": "assistant", "content": text}, prompt_tokens=0, completion_tokens=0)

    async def close(self) -> None:
        if self._model is not None:
            await self._model.close()


class PlayedSession(ScriptedSession):
    """Implements rollouts.policy.PolicySession."""

    def __init__(
        self,
        policy: PlayedPolicy,
        index: int,
        sampling: SamplingConfig,
        stop_token_ids: list[int],
        model: Callable[[], PolicySession],
    ):
        """``model`` opens the model's session, when it is asked first."""
        super().__init__(policy, index, sampling, stop_token_ids[0])
        self._policy: PlayedPolicy = policy
        self._stop_token_ids, self._make = stop_token_ids, model
        self._model: PolicySession | None = None

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        """See PolicySession.generate. A model that fails or is interrupted leaves the turn to the person."""
        async with self._policy.one_turn:  # the terminal shows one rollout at a time
            while True:
                try:
                    return await super().generate(prompt_token_ids, max_tokens=max_tokens)
                except ModelAsked:
                    completion = await self._by_model(prompt_token_ids, max_tokens)
                if completion is not None:
                    return completion

    async def _by_model(self, prompt_token_ids: np.ndarray, max_tokens: int) -> Completion | None:
        person = self._policy.person
        try:
            person.waits()
            if self._model is None:
                self._model = self._make()
            completion = await interruptible(self._model.generate(prompt_token_ids, max_tokens=max_tokens))
        except (RunError, ConfigError) as error:
            person.model_failed(str(error))
            return None
        except KeyboardInterrupt:
            person.model_failed("it was interrupted")
            return None
        ids = completion.token_ids.tolist()
        shown = ids[:-1] if ids and ids[-1] in self._stop_token_ids else ids
        self._turn += 1
        person.model_answered(self._index, str(self._policy.tokenizer.decode(shown)))
        return completion

    def close(self) -> None:
        if self._model is not None:
            self._model.close()


async def interruptible(work: Coroutine[Any, Any, Completion]) -> Completion:
    """``work``, which Ctrl-C cancels.

    Raises:
        KeyboardInterrupt: it did.
    """
    loop, task, before = asyncio.get_running_loop(), asyncio.ensure_future(work), signal.getsignal(signal.SIGINT)
    pressed = False

    def cancel() -> None:
        nonlocal pressed
        pressed = task.cancel() or pressed

    try:
        # Not by add_signal_handler: a Ctrl-C while it is being added raises, and interrupts the next call too.
        signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(cancel))
        return await task
    except asyncio.CancelledError:
        if not pressed:
            raise
        raise KeyboardInterrupt from None
    finally:
        task.cancel()  # Ctrl-C may have come before it was awaited
        signal.signal(signal.SIGINT, before)
