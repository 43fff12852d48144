"""What an algorithm is: who gets credit for what, and which loss component the sampled tokens feed.

``GroupRewards`` is the base of those that compare a group's rewards, with a length penalty for short answers among right ones.
At the end is what algorithms share that compare with a reference model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge
from renderers import Renderer

from torchtitan.config import Configurable
from torchtitan.experiments.rl.batching.sample_checks import checked_stream
from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel, ModelReference
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicyClient
from torchtitan.experiments.rl.rollouts.samples import turn_spans
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.types import ROLE_IDS, TrainingSample


class Algorithm(UserConfigurable):
    """Gives credit to the tokens of a task's rollouts, by writing to the streams of their training samples.

    One instance per task. Rollouts arrive one by one, then as a whole group; the base does nothing with either. The trainer
    depends on no algorithm: it reads advantages, component weights and reference log-probabilities.
    """

    action_component: ClassVar[str] = "rl"
    """Which loss component the sampled tokens feed: "rl", "ce" or "ref_kl"."""
    group_relative: ClassVar[bool] = False
    """Whether credit compares the rollouts of a group, so that a group of one teaches nothing."""

    needs_group: ClassVar[bool] = True
    """Whether a rollout's credit waits for its group. One that does not, and defines no ``score_group``, has its rollouts
    trained as they finish (``Task.needs_group``)."""

    asks_models: ClassVar[bool] = False
    """Whether ``score_rollout`` asks models, and sets no advantages. Of an algorithm that does not need its group it then comes
    after the filters before the batch, where these read no credit: what they drop costs no model's time."""

    batch_normalized: ClassVar[bool] = False
    """Whether its advantages are meant to be normalised over the step: ``trainer.loss.normalize_advantages``."""

    replaces: ClassVar[tuple[str, ...]] = ()
    """Fields of a training sample, beside its credit, that ``score_rollout`` replaces. A change of any other is an error."""

    renderer: Renderer
    """The task's, set by the task when it is built: for algorithms that write a prompt of their own."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        def frozen_source(self) -> FrozenModel | HostedModel | None:
            """The model that training rollouts are sampled from in the policy's place; None: from the policy."""
            return None

        def needs_roles(self) -> str | None:
            """The field that has no effect with a renderer that attributes no roles; None: there is none."""
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
            """Refuse what can't work, before any process starts.

            A subclass adds its checks after ``super(MyAlgorithm.Config, self).validate(...)``: a slotted dataclass is made
            anew by its decorator, which a bare ``super()`` doesn't know.

            Args:
                field: path of this config, such as "tasks.sum_digits.algorithm".
                group_size: rollouts per data sample.
                temperature: sampling temperature of training rollouts.
                max_rollout_tokens: longest sample there will be; None: not known.
                policy_path: folder the policy starts from; None: not known.

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """
            algorithm: type[Algorithm] = built_class(self)
            if algorithm.group_relative and group_size < 2:
                raise ConfigError(
                    f"{field}: group_size",
                    group_size,
                    f"{algorithm.__name__} compares the rollouts of a group, and one alone has advantage 0: use 2 or more",
                )
            if algorithm.action_component == "ref_kl" and temperature != 1:
                raise ConfigError(
                    f"{field}: temperature",
                    temperature,
                    f"{algorithm.__name__} compares with reference log-probabilities at temperature 1: sample at 1",
                )
            source = self.frozen_source()
            if source is not None and algorithm.action_component != "ce":
                raise ConfigError(
                    f"{field}: frozen source",
                    source,
                    f"{algorithm.__name__} needs an importance ratio, so the policy's own samples: sample from the policy, or "
                    "use an algorithm that feeds ce, such as SFT",
                )

    def check_example(
        self, example: DataSample, *, field: str, max_rollout_tokens: int, max_model_len: int
    ) -> None:
        """Refuse an example that nothing can be learned from. Called with the task's first, before any process starts.

        Args:
            field: path of the task's config, such as "tasks.sum_digits".
            max_rollout_tokens: longest sample there will be.
            max_model_len: tokens that the generators can score at once, and one more.

        Raises:
            ConfigError: naming the field at fault, its value and the cure.
        """

    async def setup(self, policy: PolicyClient) -> None:
        """Before the first rollout: reach the models the algorithm needs, ``policy.frozen(...)``."""

    async def score_rollout(self, rollout: Rollout) -> None:
        """When one rollout has arrived, with its samples and before it has a reward: rollout-local credit, calls to models.

        Rollouts are scored side by side. What is raised here ends this rollout as an error with its cause. Weights that are set
        here are checked here: a ref_kl weight needs its ref_logprobs at once.
        """

    def score_group(self, group: RolloutGroup) -> None:
        """When all of a group has arrived and been rewarded, before filters: credit relative to the group.

        Statistics are of ``group.scored`` alone. Rollouts without a reward are not trained on.
        """


TokenWeight = Annotated[float, Ge(0), Cure("a negative cost rewards length")]


class GroupRewards(Algorithm):
    """Compares the rewards of a group, after a length penalty in groups where the best reward R is above 0:

        r' = r·(1 + clamp(1 - cost / c̄, 0, 1))    for rollouts with r = R, of which c̄ is the mean cost;  r' = r for others

    It never lowers a reward, so it can't make a wrong answer the better one. A subclass computes advantages of
    ``shaped_rewards``.
    """

    group_relative: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        length_penalty: Literal["none", "tokens", "turns"] = "none"
        """What a rollout costs: weighted tokens, or its turns."""
        completion_token_weight: TokenWeight = 1.0
        """Cost of a sampled token, for "tokens"."""
        tool_token_weight: TokenWeight = 1.0
        """Cost of a token in a tool's response, for "tokens"."""

        def needs_roles(self) -> str | None:
            return (
                "tool_token_weight"
                if self.length_penalty == "tokens" and self.tool_token_weight > 0
                else None
            )

        def validate(self, *, field: str, **context) -> None:
            super(GroupRewards.Config, self).validate(field=field, **context)
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
        if group.scored:
            for rollout, advantage in zip(
                group.scored, self.advantages(self.shaped_rewards(group)), strict=True
            ):
                rollout.assign_advantages(float(advantage))

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """float64 [G], one for each scored rollout, of which there is at least one: of their rewards, float64 [G]."""
        raise NotImplementedError(f"{type(self).__name__}.advantages")

    def shaped_rewards(self, group: RolloutGroup) -> np.ndarray:
        """r': float64 [G], one for each scored rollout, of which there is at least one."""
        rewards = np.array(group.rewards)
        if self.config.length_penalty == "none":
            return rewards
        return shorten(rewards, np.array([self.cost(rollout) for rollout in group.scored]))

    def cost(self, rollout: Rollout) -> float:
        """What the length penalty counts: turns, or weighted tokens."""
        if self.config.length_penalty == "turns":
            return len(rollout.turns)
        completion = self.config.completion_token_weight * rollout.completion_tokens
        return completion + self.config.tool_token_weight * tool_response_tokens(rollout)


def centered(rewards: np.ndarray) -> np.ndarray:
    """r - mean(r), float64 [G]; exactly 0 where all are equal.

    Shifted first: the mean of equal floats may differ from them in the last bit, and a zero-advantage filter would miss it.
    """
    shifted = rewards - rewards[0]
    return shifted - shifted.mean()


def shorten(rewards: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Rewards [G] with the length bonus of the GRPO docstring; the same rewards where none is above 0 or nothing has a cost."""
    best = rewards == rewards.max()
    mean_cost = costs[best].mean()
    if rewards.max() <= 0 or mean_cost <= 0:
        return rewards
    bonus = np.clip(1 - costs / mean_cost, 0, 1)
    return np.where(best, rewards * (1 + bonus), rewards)


def tool_response_tokens(rollout: Rollout) -> int:
    """Body tokens of tool messages the rollout was given. A prompt that starts a sample of its own counts its tools again."""
    count = 0
    for turn, span in turn_spans(rollout.turns):
        added = slice(span.new, span.completion)
        count += int(
            np.sum(
                (turn.prompt_role_ids[added] == ROLE_IDS["tool"]) & turn.prompt_is_content[added]
            )
        )
    return count


Teacher = Annotated[
    ModelReference, Cure("name a FrozenModel (a server) or a HostedModel (a checkpoint)")
]


def check_frozen(
    model: ModelReference, *, field: str, why: str, max_rollout_tokens: int | None
) -> None:
    """Refuse a reference that names no frozen model, or one that can't score the longest sample.

    Args:
        why: what goes wrong with the policy in the frozen model's place.

    Raises:
        ConfigError: by field, value and cure.
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
        cure = f"must be above the task's env.max_rollout_tokens = {max_rollout_tokens}, to score a sample of that length"
        raise ConfigError(f"{field}.engine.max_model_len", model.engine.max_model_len, cure)


async def connect(policy: PolicyClient, model: ModelReference) -> ModelClient:
    """The frozen model's client, after one answered request: a model that can't be reached ends the run before the first group.

    Raises:
        RunError: it did not answer; names the model.
    """
    client = policy.frozen(model)
    await client.score(np.array([0, 1], np.int32))
    return client


def set_ref_kl_streams(sample: TrainingSample, ref_logprobs: np.ndarray) -> None:
    """Give every sampled token a ref_kl weight of 1 and an rl weight of 0.

    Args:
        ref_logprobs: float32 [L], of the sample's tokens under the reference; what lies on other tokens is not used.

    Raises:
        ValueError: not one number for each token.
    """
    ref_logprobs = checked_stream("ref_logprobs", ref_logprobs, len(sample))
    sample.ref_logprobs = np.where(sample.loss_mask, ref_logprobs, 0).astype(np.float32)
    sample.ref_kl_weights = sample.loss_mask.astype(np.float32)
    sample.rl_weights = np.zeros(len(sample), np.float32)
