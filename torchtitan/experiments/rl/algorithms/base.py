"""Base classes of algorithms, which decide what each sampled token is credited with.

``Algorithm`` is the base of all. ``GroupRewards`` is the base of those that compare the rewards of
a group, with a length penalty that prefers short answers among right ones. At the end are functions
for algorithms that compare with a reference model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient
from torchtitan.experiments.rl.rollouts.rounding import are_equal, equal_to
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.types import ROLE_IDS, TrainingSample, checked_stream


class Algorithm(UserConfigurable):
    """Gives credit to the tokens of a task's rollouts, in the streams of their training samples.

    A task has one instance. It is given each rollout as it arrives (`score_rollout`), then the
    whole group (`score_group`); the base class does nothing with either. The trainer knows no
    algorithm: it reads advantages, weights of the loss components, and log-probabilities of a
    reference. An algorithm that writes prompts of its own takes ``context`` in its constructor,
    which has the renderer (`configurable.BuildContext`).

    Example::

        from torchtitan.experiments.rl.algorithms import Algorithm

        class BestOfGroup(Algorithm):
            group_relative = True  # a group of one rollout teaches nothing

            def score_group(self, group):
                best = max(group.rewards, default=0.0)
                for rollout in group.scored:
                    rollout.assign_advantages(float(rollout.reward == best))
    """

    action_component: ClassVar[str] = "rl"
    """Loss component that sampled tokens feed: "rl", "ce" or "ref_kl"."""
    group_relative: ClassVar[bool] = False
    """True if credit compares the rollouts of a group, so that a group of one teaches nothing."""
    needs_group: ClassVar[bool] = True
    """True if a rollout's credit waits for its group. If False, and the class defines no
    ``score_group``, rollouts are trained on as they finish (``Task.needs_group``)."""
    asks_models: ClassVar[bool] = False
    """True if ``score_rollout`` asks models, and sets no advantages. It then runs after the
    pre-batch filters, so that a rollout which they drop costs no model's time, if the algorithm
    does not need its group and none of these filters reads credit."""
    batch_normalized: ClassVar[bool] = False
    """True if advantages are meant to be normalised over the step, by
    ``trainer.loss.normalize_advantages``."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """Fields of a training sample that ``score_rollout`` replaces, beside its credit. To change any
    other field is an error."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def frozen_source(self) -> FrozenModel | HostedModel | None:
            """Return the model to sample rollouts from in the policy's place; None by default."""
            return None

        def needs_roles(self) -> str | None:
            """Return the name of a field that needs a renderer with roles, or None."""
            return None

        def validate(
            self,
            *,
            field: str,
            group_size: int,
            temperature: float,
            max_rollout_tokens: int | None = None,
            policy_path: str | None = None,
        ) -> None:
            """Raise if the settings can't work, before any process starts.

            A subclass adds its checks after ``super(MyAlgorithm.Config, self).validate(...)``. A
            bare ``super()`` does not work: the decorator of a slotted dataclass makes a new class.

            Args:
                field: path of this config, such as "tasks.sum_digits.algorithm".
                group_size: number of rollouts of an example.
                temperature: sampling temperature of training rollouts.
                max_rollout_tokens: length of the longest sample; None if not known.
                policy_path: folder that the policy starts from; None if not known.

            Raises:
                ConfigError: names the field at fault, its value and the cure.
            """
            algorithm: type[Algorithm] = built_class(self)
            if algorithm.group_relative and group_size < 2:
                raise ConfigError(
                    f"{field}: group_size",
                    group_size,
                    f"{algorithm.__name__} compares the rollouts of a group, and one alone has "
                    "advantage 0: use 2 or more",
                )
            if algorithm.action_component == "ref_kl" and temperature != 1:
                raise ConfigError(
                    f"{field}: temperature",
                    temperature,
                    f"{algorithm.__name__} compares with reference log-probabilities at "
                    "temperature 1: sample at 1",
                )
            source = self.frozen_source()
            if source is not None and algorithm.action_component != "ce":
                raise ConfigError(
                    f"{field}: frozen source",
                    source,
                    f"{algorithm.__name__} needs an importance ratio, so the policy's own samples: "
                    "sample from the policy, or use an algorithm that feeds ce, such as SFT",
                )

    def check_example(
        self, example: DataSample, *, field: str, max_rollout_tokens: int, max_model_len: int
    ) -> None:
        """Raise if nothing can be learned from an example.

        The task's first example is checked before any process starts.

        Args:
            field: path of the task's config, such as "tasks.sum_digits".
            max_rollout_tokens: length of the longest sample.
            max_model_len: number of tokens that the generators can score at once, plus one.

        Raises:
            ConfigError: names the field at fault, its value and the cure.
        """

    async def setup(self, policy: PolicyClient) -> None:
        """Connect to the models that the algorithm needs, by ``policy.frozen(...)``.

        Called once, before the first rollout.
        """

    async def score_rollout(self, rollout: Rollout) -> None:
        """Give a rollout the credit that depends on it alone.

        Called when the rollout has its samples, and before it has a reward. Rollouts are scored
        concurrently. An error raised here ends this rollout as an error with its cause. Weights
        that are set here are checked at once: a ref_kl weight needs its ref_logprobs.
        """

    def score_group(self, group: RolloutGroup) -> None:
        """Give the rollouts of a group credit relative to each other.

        Called when all rollouts of the group have arrived and been rewarded, before filters.
        Statistics are over ``group.scored`` alone: rollouts without a reward are not trained on.
        """


TokenWeight = Annotated[float, Ge(0), Cure("a negative cost rewards length")]


class GroupRewards(Algorithm):
    """Base of algorithms that compare the rewards of a group, after a length penalty.

    The penalty applies to groups whose best reward R is above 0::

        r' = r·(1 + clamp(1 - cost / c̄, 0, 1))    for rollouts with r = R, whose mean cost is c̄
        r' = r                                    for the others

    It never lowers a reward, so it can't make a wrong answer the better one. A subclass defines
    `advantages`.
    """

    group_relative: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        length_penalty: Literal["none", "tokens", "turns"] = "none"
        """Cost of a rollout: its tokens, weighted, or its turns."""
        completion_token_weight: TokenWeight = 1.0
        """Cost of a sampled token, if the cost is "tokens"."""
        tool_token_weight: TokenWeight = 1.0
        """Cost of a token in a tool's response, if the cost is "tokens"."""

        def needs_roles(self) -> str | None:
            counts_tools = self.length_penalty == "tokens" and self.tool_token_weight > 0
            return "tool_token_weight" if counts_tools else None

        def validate(self, *, field: str, **task_fields) -> None:
            super(GroupRewards.Config, self).validate(field=field, **task_fields)
            if self.length_penalty == "tokens" and not (
                self.completion_token_weight or self.tool_token_weight
            ):
                raise ConfigError(
                    f"{field}.length_penalty",
                    self.length_penalty,
                    "both token weights are 0, so nothing has a cost: raise one",
                )

    config: Config

    def score_group(self, group: RolloutGroup) -> None:
        if not group.scored:
            return
        advantages = self.advantages(self.shaped_rewards(group))
        for rollout, advantage in zip(group.scored, advantages, strict=True):
            rollout.assign_advantages(float(advantage))

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return the advantages of a group's scored rollouts.

        Args:
            rewards: float64 [G], after the length penalty. G is at least 1.

        Returns:
            float64 [G].
        """
        raise NotImplementedError(f"{type(self).__name__}.advantages")

    def shaped_rewards(self, group: RolloutGroup) -> np.ndarray:
        """Return the rewards of the group's scored rollouts after the length penalty, float64 [G].

        The group has at least one scored rollout.
        """
        rewards = np.array(group.rewards)
        if self.config.length_penalty == "none":
            return rewards
        return shorten(rewards, np.array([self.cost(rollout) for rollout in group.scored]))

    def cost(self, rollout: Rollout) -> float:
        """Return the rollout's cost for the length penalty."""
        if self.config.length_penalty == "turns":
            return len(rollout.turns)
        completion = self.config.completion_token_weight * rollout.completion_tokens
        return completion + self.config.tool_token_weight * tool_response_tokens(rollout)


def centered(rewards: np.ndarray) -> np.ndarray:
    """Return r - mean(r), float64 [G], which is exactly 0 if rounding alone tells rewards apart.

    Otherwise a filter of zero advantages would miss the group, and a division by the standard
    deviation would make a signal of what the order of a sum has left.
    """
    if are_equal(rewards):
        return np.zeros_like(rewards)
    shifted = rewards - rewards[0]
    return shifted - shifted.mean()


def shorten(rewards: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the rewards [G] with the length bonus of `GroupRewards`.

    They stay as they are if none is above 0, or if the best ones cost nothing.
    """
    best = equal_to(rewards, rewards.max())
    mean_cost = costs[best].mean()
    if rewards.max() <= 0 or mean_cost <= 0:
        return rewards
    bonus = np.clip(1 - costs / mean_cost, 0, 1)
    return np.where(best, rewards * (1 + bonus), rewards)


def tool_response_tokens(rollout: Rollout) -> int:
    """Return the number of content tokens of the tool messages that the rollout was given.

    If a prompt starts a sample of its own, the tool messages in it count again.
    """
    count = 0
    for turn, span in turn_spans(rollout.turns):
        added = slice(span.new, span.completion)
        is_tool = turn.prompt_role_ids[added] == ROLE_IDS["tool"]
        count += int(np.sum(is_tool & turn.prompt_is_content[added]))
    return count


Teacher = Annotated[
    ModelReference, Cure("name a FrozenModel (a server) or a HostedModel (a checkpoint)")
]


def check_frozen(
    model: ModelReference, *, field: str, why: str, max_rollout_tokens: int | None
) -> None:
    """Raise if a reference names no frozen model, or one that can't score the longest sample.

    Args:
        why: what would go wrong with the policy in the frozen model's place.

    Raises:
        ConfigError: names the field, its value and the cure.
    """
    if not isinstance(model, FrozenModel | HostedModel):
        raise ConfigError(
            field, model, f"{why}: name a FrozenModel (a server) or a HostedModel (a checkpoint)"
        )
    model.validate(field=field)
    if (
        isinstance(model, HostedModel)
        and max_rollout_tokens is not None
        and model.engine.max_model_len <= max_rollout_tokens
    ):
        cure = (
            f"must be above the task's env.max_rollout_tokens = {max_rollout_tokens}, to score a "
            "sample of that length"
        )
        raise ConfigError(f"{field}.engine.max_model_len", model.engine.max_model_len, cure)


async def connect(policy: PolicyClient, model: ModelReference) -> ModelClient:
    """Return the client of a frozen model that has answered a request.

    A model that can't be reached ends the run before its first group.

    Raises:
        RunError: the model did not answer. Names the model.
    """
    client = policy.frozen(model)
    await client.score(np.array([0, 1], np.int32))
    return client


def set_ref_kl_streams(sample: TrainingSample, ref_logprobs: np.ndarray) -> None:
    """Give every sampled token a ref_kl weight of 1 and an rl weight of 0.

    Args:
        ref_logprobs: float32 [L]: log-probabilities of the sample's tokens under the reference.
            Values of tokens that were not sampled are not used.

    Raises:
        ValueError: ``ref_logprobs`` is not one number for each token.
    """
    ref_logprobs = checked_stream("ref_logprobs", ref_logprobs, len(sample))
    sample.ref_logprobs = np.where(sample.loss_mask, ref_logprobs, 0).astype(np.float32)
    sample.ref_kl_weights = sample.loss_mask.astype(np.float32)
    sample.rl_weights = np.zeros(len(sample), np.float32)
