"""A policy that samples given replies, so that a task can be tried and tested without a model."""

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
    """Implements rollouts.policy.PolicyClient. Every token has log-probability -1; limits on tokens cut replies as they would a
    model's.

    ``replies`` are each rollout's completions, turn by turn, or a function of the rollout's index in its group and the turn.
    """

    version = 0

    def __init__(self, tokenizer: Any, replies: Sequence[str] | Callable[[int, int], str]):
        """
        Args:
            tokenizer: the one that the task's renderer has, or its folder.
        """
        if isinstance(tokenizer, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
        self.tokenizer = tokenizer
        self.reply = replies if callable(replies) else lambda rollout, turn: replies[turn]
        self.prompts: list[str] = []
        """Prompts that it was given, special tokens included, in order."""

    def session(
        self, *, rollout_id: str, seed: int, sampling: SamplingConfig, stop_token_ids: list[int]
    ) -> "ScriptedSession":
        """See ModelClient.session."""
        return ScriptedSession(self, self.index_of(rollout_id), sampling, stop_token_ids[0])

    @staticmethod
    def index_of(rollout_id: str) -> int:
        """Of the rollout in its group."""
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

    def frozen(self, model: ModelReference) -> "ScriptedPolicy":
        """See PolicyClient.frozen. Every model is this one."""
        return self


class ScriptedSession:
    """Implements rollouts.policy.PolicySession."""

    stops_at_texts = True

    def __init__(self, policy: ScriptedPolicy, index: int, sampling: SamplingConfig, stop: int):
        self._policy, self._index, self._sampling, self._stop = policy, index, sampling, stop
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
        ids = [*policy.tokenizer.encode(text, add_special_tokens=False), self._stop]
        ids = ids[: self._tokens_to_stop(ids, stop)]
        limit = min(max_tokens, self._sampling.max_tokens)
        kept = np.asarray(ids[:limit], np.int32)
        return Completion(
            token_ids=kept,
            logprobs=np.full(len(kept), -1, np.float32),
            policy_versions=np.full(len(kept), policy.version, np.int32),
            finish_reason="stop" if len(ids) <= limit else "length",
        )

    def _tokens_to_stop(self, ids: list[int], stop: Sequence[str]) -> int:
        """Return how many of the tokens complete the first stop text; all of them if there is none."""
        for count in range(1, len(ids) if stop else 0):
            if any(text in self._policy.tokenizer.decode(ids[:count]) for text in stop):
                return count
        return len(ids)

    def close(self) -> None:
        pass
