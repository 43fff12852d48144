"""Samples given replies, so that a task can be tried and tested without a model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from renderers import Message
from transformers import AutoTokenizer

from torchtitan.experiments.rl.generation.judge import Reply
from torchtitan.experiments.rl.generation.references import ModelReference
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion


class ScriptedPolicy:
    """Policy whose replies are given. Implements rollouts.policy.PolicyClient.

    Every token has log-probability -1, and limits on tokens cut replies as they would a model's.
    """

    version = 0

    def __init__(self, tokenizer: Any, replies: Sequence[str] | Callable[[int, int], str]):  # noqa: ANN401 - transformers'
        """Initialize the policy.

        Args:
            tokenizer: tokenizer of the task's renderer, or its folder.
            replies: completions of each rollout, turn by turn; or a function of the rollout's index
                in its group and of the turn.
        """
        if isinstance(tokenizer, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        self.tokenizer = tokenizer
        self.reply = replies if callable(replies) else lambda rollout, turn: replies[turn]
        self.prompts: list[str] = []
        """Prompts that replies were asked for, special tokens included, in order."""
        self.stands_in = False
        """True if this policy has been asked in place of a frozen model, such as a judge."""

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> "ScriptedSession":
        """See ModelClient.session."""
        return ScriptedSession(self, self.index_of(rollout_id), sampling, stop_token_ids[0])

    @staticmethod
    def index_of(rollout_id: str) -> int:
        """Return the index of a rollout in its group."""
        return int(rollout_id.rpartition("/")[2].partition("~")[0])

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """See ModelClient.score."""
        return np.where(np.arange(len(token_ids)) > 0, -1, 0).astype(np.float32)

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        """See ChatClient.chat."""
        return Reply(
            message={"role": "assistant", "content": self.reply(0, 0)},
            prompt_tokens=0,
            completion_tokens=0,
        )

    def with_adapter(self, name: str) -> "ScriptedPolicy":
        """Return this policy, whose replies no adapter changes; see PolicyClient.with_adapter."""
        return self

    def frozen(self, model: ModelReference) -> "ScriptedModel":
        """Return a client with this policy's replies for every model; see PolicyClient.frozen."""
        return ScriptedModel(self)


class ScriptedModel:
    """Frozen model that replies as a scripted policy does, and has it note that it was asked."""

    def __init__(self, policy: ScriptedPolicy):
        self._policy = policy

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> "ScriptedSession":
        """See ModelClient.session."""
        self._policy.stands_in = True
        return self._policy.session(
            rollout_id=rollout_id, seed=seed, sampling=sampling, stop_token_ids=stop_token_ids
        )

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """See ModelClient.score."""
        self._policy.stands_in = True
        return await self._policy.score(token_ids)

    async def chat(
        self, messages: Sequence[Message], *, seed: int, sampling: SamplingConfig
    ) -> Reply:
        """See ChatClient.chat."""
        self._policy.stands_in = True
        return await self._policy.chat(messages, seed=seed, sampling=sampling)


class ScriptedSession:
    """Session of a scripted policy. Implements rollouts.policy.PolicySession."""

    stops_at_texts = True

    def __init__(
        self, policy: ScriptedPolicy, index: int, sampling: SamplingConfig, stop_token: int
    ):
        """Initialize the session.

        Args:
            policy: policy that has the replies.
            index: index of the rollout in its group.
            sampling: limits of a completion.
            stop_token: id of the token that ends each reply.
        """
        self._policy = policy
        self._index = index
        self._sampling = sampling
        self._stop_token = stop_token
        self._turn = 0

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """See PolicySession.generate."""
        policy = self._policy
        policy.prompts.append(str(policy.tokenizer.decode(prompt_token_ids)))
        text = policy.reply(self._index, self._turn)
        self._turn += 1
        ids = [*policy.tokenizer.encode(text, add_special_tokens=False), self._stop_token]
        ids = ids[: self._tokens_to_stop(ids, stop)]
        limit = min(max_tokens, self._sampling.max_tokens)
        kept = np.asarray(ids[:limit], np.int32)
        return Completion(
            token_ids=kept,
            logprobs=np.full(len(kept), -1, np.float32),
            policy_versions=np.full(len(kept), policy.version, np.int32),
            finish_reason="stop" if len(ids) <= limit else "length",
        )

    def close(self) -> None:
        """Do nothing: the session holds nothing."""

    def _tokens_to_stop(self, ids: list[int], stop: Sequence[str]) -> int:
        """Return how many tokens complete the first stop text; all of them if there is none."""
        if not stop:
            return len(ids)
        for count in range(1, len(ids)):
            if any(text in self._policy.tokenizer.decode(ids[:count]) for text in stop):
                return count
        return len(ids)
