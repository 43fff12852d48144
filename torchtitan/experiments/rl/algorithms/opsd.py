"""OPSD: on-policy self-distillation.

The policy, shown a demonstration, scores the tokens that it sampled without one.
"""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import numpy as np
from renderers import Message, RenderedTokens

from torchtitan.experiments.rl.algorithms.base import Algorithm, set_ref_kl_streams
from torchtitan.experiments.rl.ask.call import contained
from torchtitan.experiments.rl.bounds import Changeable, NonEmptyStr, PositiveInt
from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.envs.messages import check_unicode
from torchtitan.experiments.rl.envs.special_texts import control_token_in, render_as_text
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutTurn
from torchtitan.experiments.rl.types import TrainingSample

TEMPLATE = "\n\nA right answer: {demonstration}"
"""Default text that is added to the question. assets/tiny_qwen3_reader was taught to read it."""


class OPSD(Algorithm):
    """On-policy self-distillation (Zhao et al., arXiv:2601.18734).

    The policy samples from the plain prompt x. The same weights then score the sampled tokens y
    behind a prompt that also holds a demonstration d, and the ref_kl component descends

        KL(π(· | x) ‖ sg π(· | x, d)) = E[log π(y | x) - log π(y | x, d)]

    It needs no reward and no second model. The demonstration is
    ``DataSample.info[demonstration_key]``, or else the field of that name of the data sample or the
    rollout. A subclass may make it from the rollout (`demonstration`), or word the prompt in its
    own way (`demonstrated`).
    """

    action_component: ClassVar[str] = "ref_kl"
    needs_group: ClassVar[bool] = False
    asks_models: ClassVar[bool] = True
    replaces: ClassVar[tuple[str, ...]] = ("reference_ids",)

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        demonstration_key: NonEmptyStr = "demonstration"
        """Name of the text that is the demonstration: a key of ``DataSample.info``, else a field of
        the DataSample, such as "env_input", or of the Rollout."""
        place: Literal["question", "system"] = "question"
        """Place of the demonstration. "question" adds it to the last user message of each sample's
        first prompt, which is rendered anew. "system" puts it into a system message of its own, and
        the sample follows it token by token, which works with any prompt, tools and number of
        turns."""
        template: str = TEMPLATE
        """Text that is added to the question, or text of the system message."""
        reference: Literal["policy", "trainer"] = "policy"
        """Model that scores behind the demonstration. "policy" asks the generators, with the
        weights that they hold. "trainer" uses ``trainer.reference``, a copy that follows the
        policy, when the sample is trained on."""
        max_concurrency: Changeable[PositiveInt] = 256
        """Maximum number of score requests in flight."""

        def validate(self, *, field: str, **task_fields) -> None:
            super(OPSD.Config, self).validate(field=field, **task_fields)
            if "{demonstration}" not in self.template:
                raise ConfigError(
                    f"{field}.template",
                    self.template,
                    "has no {demonstration}, so the KL would be about nothing",
                )

    config: Config

    def __init__(self, config: Config, *, context: BuildContext):
        super().__init__(config)
        self.renderer = context.renderer

    async def setup(self, policy: PolicyClient) -> None:
        self._policy = policy
        self._requests = asyncio.Semaphore(self.config.max_concurrency)

    async def score_rollout(self, rollout: Rollout) -> None:
        # The first turn of each sample: the demonstration goes into its prompt.
        first: dict[int, RolloutTurn] = {}
        for turn, span in turn_spans(rollout.turns):
            first.setdefault(span.sample, turn)
        demonstration = self.demonstration(rollout) if first else ""
        if self.config.reference == "trainer":
            for index, sample in enumerate(rollout.samples):
                sample.reference_ids, _ = self._conditioned(sample, first[index], demonstration)
                sample.ref_kl_weights = sample.loss_mask.astype(np.float32)
                sample.rl_weights = np.zeros(len(sample), np.float32)
            return
        scores = (
            self._score(sample, first[index], demonstration)
            for index, sample in enumerate(rollout.samples)
        )
        for sample, ref_logprobs in zip(
            rollout.samples, await asyncio.gather(*scores), strict=True
        ):
            set_ref_kl_streams(sample, ref_logprobs)

    async def _score(
        self, sample: TrainingSample, turn: RolloutTurn, demonstration: str
    ) -> np.ndarray:
        """Return the log-probabilities of a sample's tokens behind the demonstration, float32 [L].

        They are 0 on the sample's first prompt.
        """
        token_ids, prompt = self._conditioned(sample, turn, demonstration)
        try:
            async with self._requests:
                logprobs = await contained(self._policy.score(token_ids))
        except RunError as error:
            added = prompt - len(turn.prompt_token_ids)
            raise RunError(
                f"{len(token_ids)} tokens, {added} of them for the demonstration: {error}"
            ) from error
        return np.concatenate([np.zeros(len(turn.prompt_token_ids), np.float32), logprobs[prompt:]])

    def _conditioned(
        self, sample: TrainingSample, turn: RolloutTurn, demonstration: str
    ) -> tuple[np.ndarray, int]:
        """Return the tokens of the sample behind the demonstration, and the length of its prompt.

        Returns:
            int32 [R], and the number of tokens before the first sampled one.
        """
        if self.config.place == "system":
            prompt = [*self.block(demonstration), *turn.prompt_token_ids.tolist()]
        else:
            messages = self.demonstrated(turn.prompt_messages, demonstration)
            prompt = self._render_as(turn)(
                messages, tools=turn.tools, add_generation_prompt=True
            ).token_ids
        rest = sample.token_ids[len(turn.prompt_token_ids) :]
        return np.concatenate([np.asarray(prompt, np.int32), rest]), len(prompt)

    def _render_as(self, turn: RolloutTurn) -> Callable[..., RenderedTokens]:
        """Return what renders a conversation as the turn's prompt was rendered.

        The texts of special tokens are text in it, unless the turn's env meant control tokens.
        """
        as_text = functools.partial(render_as_text, self.renderer)
        if control_token_in((turn.prompt_messages, turn.tools), self.renderer) is None:
            return as_text
        plain = self.renderer.render(
            turn.prompt_messages, tools=turn.tools, add_generation_prompt=True
        )
        is_meant = np.array_equal(plain.token_ids, turn.prompt_token_ids)
        return self.renderer.render if is_meant else as_text

    def demonstration(self, rollout: Rollout) -> str:
        """Return the demonstration that the policy is shown.

        Raises:
            ValueError: the data sample has none.
        """
        return self._demonstration_in(rollout.data_sample, rollout)

    def _demonstration_in(self, example: DataSample | None, rollout: Rollout | None) -> str:
        """Return the text with the configured name in the example, or else in the rollout.

        Raises:
            ValueError: neither has one.
        """
        key = self.config.demonstration_key
        sample_id = example.sample_id if example is not None else None
        info = example.info.get(key) if example is not None else None
        candidates = (info, getattr(example, key, None), getattr(rollout, key, None))
        text = next((value for value in candidates if isinstance(value, str)), None)
        if text is None:
            raise ValueError(
                f"data sample {sample_id!r} has no text in info[{key!r}]: the dataset must put its "
                "demonstration there"
            )
        check_unicode(text, f"the demonstration of data sample {sample_id!r}")
        return text

    def check_example(
        self, example: DataSample, *, field: str, max_rollout_tokens: int, max_model_len: int
    ) -> None:
        """Raise if an example has no demonstration, or one that leaves too little context.

        A demonstration that is made from a rollout, or is a field of it, is not there yet.
        """
        text = ""
        fields_of_rollouts = {entry.name for entry in fields(Rollout)}
        if (
            type(self).demonstration is OPSD.demonstration
            and self.config.demonstration_key not in fields_of_rollouts
        ):
            try:
                text = self._demonstration_in(example, None)
            except ValueError as error:
                raise ConfigError(
                    f"{field}.algorithm.demonstration_key",
                    self.config.demonstration_key,
                    str(error),
                ) from None
        if self.config.place == "system":
            added = len(self.block(text))
        else:
            message: Message = {"role": "user", "content": "x"}
            with_text = self._prompt_tokens(self.demonstrated([message], text))
            added = with_text - self._prompt_tokens([message])
        if max_rollout_tokens + added >= max_model_len:
            cure = (
                f"a rollout of that length and the demonstration of data sample "
                f"{example.sample_id!r} ({added} tokens) must be shorter than "
                f"generator.engine.max_model_len = {max_model_len}: lower this or raise that"
            )
            raise ConfigError(f"{field}.env.max_rollout_tokens", max_rollout_tokens, cure)

    def _prompt_tokens(self, messages: list[Message]) -> int:
        rendered = render_as_text(self.renderer, messages, add_generation_prompt=True)
        return len(rendered.token_ids)

    def block(self, demonstration: str) -> list[int]:
        """Return the tokens of the demonstration as a system message, to stand before a sample."""
        text = self.config.template.replace("{demonstration}", demonstration).strip()
        return render_as_text(self.renderer, [{"role": "system", "content": text}]).token_ids

    def demonstrated(self, messages: list[Message], demonstration: str) -> list[Message]:
        """Return the conversation with the demonstration at the end of its last user message."""
        addition = self.config.template.replace("{demonstration}", demonstration)
        last = max(
            (index for index, message in enumerate(messages) if message["role"] == "user"),
            default=None,
        )
        if last is None:
            raise ValueError(
                "the prompt has no user message to add the demonstration to: override "
                "OPSD.demonstrated"
            )
        content = messages[last]["content"]
        content = (
            content + addition
            if isinstance(content, str)
            else [*content, {"type": "text", "text": addition}]
        )
        return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
