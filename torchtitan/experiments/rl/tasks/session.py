"""Checks each completion of the policy, or of a task's frozen source, as it enters the library."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from torchtitan.experiments.rl.errors import UserCodeError, cause_of
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import checked_completion
from torchtitan.experiments.rl.rollouts.types import Completion

logger = logging.getLogger(__name__)


class CheckedSession:
    """Session of a rollout with its model, whose completions are checked and read-only.

    It implements `rollouts.policy.PolicySession`. The engine behind it may be the user's own, so
    whatever is wrong with an answer is an error that names the generator.
    """

    def __init__(
        self,
        session: PolicySession,
        *,
        sampling: SamplingConfig,
        vocab_size: int,
        branch: Callable[[str], "CheckedSession"],
        branch_seed: Callable[[str], int],
    ):
        """Wrap the session of a model.

        Args:
            sampling: settings that the session was opened with.
            vocab_size: number of token ids that the model has.
            branch: opens another session of the same rollout, for another branch of its
                conversation. The seed follows from the rollout's seed and the key.
            branch_seed: returns the seed that a branch with this key has.
        """
        self.sampling = sampling
        self.branch = branch
        self.branch_seed = branch_seed
        self.unanswered = 0
        """Number of requests that the generator has not answered, cancelled ones included.

        So a rollout that was cancelled because it took too long can say that it waited for the
        generator.
        """
        self._session = session
        self._vocab_size = vocab_size
        self._closed = False

    @property
    def stops_at_texts(self) -> bool:
        return self._session.stops_at_texts

    async def generate(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_tokens: int,
        **options: Any,  # noqa: ANN401 - the other arguments of PolicySession.generate
    ) -> Completion:
        """Sample one completion, as `PolicySession.generate` does.

        Raises:
            UserCodeError: the generator failed, or its completion can't be trained on; names the
                generator. Or the prompt has an id that the model lacks; names the renderer.
        """
        prompt = prompt_token_ids
        self._check_ids(prompt, "renderer: the prompt has")
        if prompt.flags.writeable:
            # A prompt that a group shares is read-only already. It stays one object, so that a
            # message to the generators holds it once.
            prompt = prompt.view()
            prompt.flags.writeable = False
        self.unanswered += 1
        try:
            with trace.span("generate", prompt_tokens=len(prompt)):
                answer = await self._session.generate(prompt, max_tokens=max_tokens, **options)
            completion = checked_completion(answer)
            self._check_length(completion, max_tokens)
            self._check_ids(completion.token_ids, "a completion has")
        except BaseException as error:  # noqa: BLE001 - an engine may be the user's own
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self.unanswered -= 1
            raise UserCodeError(f"generator: {cause_of(error)}") from error
        self.unanswered -= 1
        return completion

    def _check_length(self, completion: Completion, max_tokens: int) -> None:
        limit = min(max_tokens, self.sampling.max_tokens)
        if len(completion.token_ids) > limit:
            raise UserCodeError(
                f"a completion has {len(completion.token_ids)} tokens, and at most {limit} were "
                "asked for"
            )

    def _check_ids(self, token_ids: np.ndarray, what: str) -> None:
        if not len(token_ids):
            return
        highest = token_ids.item(token_ids.argmax())
        if highest >= self._vocab_size:
            raise UserCodeError(
                f"{what} the token id {highest}, and the model has {self._vocab_size:,} ids"
            )

    def close(self) -> None:
        """Close the session of the model. A second call does nothing.

        A failure is logged: it can't undo the rollout.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._session.close()
        except Exception as error:  # noqa: BLE001 - an engine may be the user's own
            logger.warning("a session's close failed: %s", cause_of(error))


def is_cancelled() -> bool:
    """Return True if someone has cancelled the running asyncio task.

    A CancelledError that an engine raises by itself is a failure of the engine.
    """
    running = asyncio.current_task()
    return running is not None and running.cancelling() > 0
