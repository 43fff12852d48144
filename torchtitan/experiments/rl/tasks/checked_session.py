"""The session that a turn loop is given: what the generator does wrong has the generator's name."""

import asyncio

import numpy as np

from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import PolicySession
from torchtitan.experiments.rl.rollouts.samples import check_completion
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.user_code.calls import UserCodeError, cause_of


class CheckedSession:
    """Implements rollouts.policy.PolicySession. An engine may be the user's own."""

    def __init__(self, session: PolicySession, *, vocab_size: int | None = None):
        """``vocab_size``: ids that the model has; None: not known."""
        self._session, self._vocab_size = session, vocab_size
        self.waits = 0
        """Completions that the generator has not answered."""

    async def generate(self, prompt_token_ids: np.ndarray, *, max_tokens: int) -> Completion:
        """See PolicySession.generate.

        Raises:
            UserCodeError: the generator failed, or its completion can't be trained on; names the generator.
        """
        prompt = prompt_token_ids
        self._check_ids(prompt, "renderer: the prompt has")
        if prompt.flags.writeable:  # one that a group shares is read-only, and stays one object: a message then holds it once
            prompt = prompt.view()
            prompt.flags.writeable = False
        self.waits += 1
        try:
            with trace.span("generate", prompt_tokens=len(prompt)):
                completion = await self._session.generate(prompt, max_tokens=max_tokens)
            check_completion(completion)
            self._check_ids(completion.token_ids, "a completion has")
        except BaseException as error:
            running = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and running is not None and running.cancelling():
                raise
            self.waits -= 1
            raise UserCodeError(f"generator: {cause_of(error)}") from error
        self.waits -= 1
        return completion

    def _check_ids(self, token_ids: np.ndarray, what: str) -> None:
        if self._vocab_size is None or not len(token_ids):
            return
        ids = np.asarray(token_ids)  # a user's generator may give a list
        highest = ids.item(ids.argmax())
        if highest >= self._vocab_size:
            raise UserCodeError(f"{what} the token id {highest}, and the model has {self._vocab_size:,} ids")

    def close(self) -> None:
        """See PolicySession.close."""
        self._session.close()
