"""A task: a dataset, an env for each example, a rubric and an algorithm. The controller gets groups from it.

What becomes of a group, in order:

1. ``run_group`` opens a session with the policy, or with the algorithm's frozen source, for each rollout, makes the envs, and
   runs the rollouts side by side. A rollout that ends in ERROR or TIMEOUT is run again, with a new env and seed, up to
   ``max_retries`` times.
2. Each rollout that arrives becomes training samples, and ``Algorithm.score_rollout`` sees it.
3. ``score_group`` has the rubric give rewards, then ``Algorithm.score_group`` credit.

User code that fails on the way ends in a rollout's status; nothing but cancellation is raised.
"""

import asyncio
import functools
import time
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from renderers import Renderer

from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.bounds import (
    Changeable,
    Cure,
    Matches,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor, sampler_seed
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer import attributes_roles
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, PolicySession, SamplingConfig, Temperature
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup, counted_in
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.group import GroupRun, first_use, give_credit, score_rewards, score_rollout
from torchtitan.experiments.rl.user_code.calls import HOLD_S, UserCodeError, call_bounded

MIN_TRAINING_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, but for those under 1e-5, at which it samples greedily."""
AdapterName = Annotated[str, Matches(r"[\w-]*", "letters, digits, _ and -: it names a folder")]


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    every: NonNegativeInt = 10
    """Steps between two evaluations; before the first step and after the last there always is one. 0 turns all off."""
    examples: PositiveInt = 128
    """Examples of the validation set, from its start; all of a smaller set."""
    attempts: PositiveInt = 1
    """Rollouts of each example: the k of avg@k and pass@k."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    max_concurrency: PositiveInt = 64
    """Rollouts at once while training goes on: the engine serves requests in turn, and training's have to get theirs. The first
    and the last evaluation have the generators to themselves and no limit."""
    pass_reward: float = 1.0
    """Reward from which an attempt has passed."""

    def validate(self, *, field: str) -> None:
        """
        Raises:
            ConfigError: naming the field at fault, its value and the cure.
        """
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError(f"{field}.attempts", self.attempts, f"greedy attempts are all alike: set {field}.temperature")


class Task(UserConfigurable):
    """Subclass it and define ``make_env`` (or ``make_envs``)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        algorithm: Algorithm.Config
        dataset: Annotated[Dataset.Config, Cure("for rows in memory: RowDataset.Config(rows=MemoryRows([...]))")]
        validation: Changeable[Dataset.Config | None] = None
        """Examples the policy is measured on and never trained on."""
        validation_schedule: Changeable[ValidationConfig | None] = None
        """When and how; None: the run's `validation`."""
        rubric: Annotated[Rubric.Config, Cure("write Rubric.Config(reward_fns=[...])")] = field(default_factory=Rubric.Config)
        sampler: SampleStrategy.Config = field(default_factory=ShuffledCursor.Config)
        env: RendererEnvConfig = field(default_factory=RendererEnvConfig)
        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        group_size: PositiveInt = 8
        """Rollouts per data sample. Where nothing compares them, each is a group of its own."""
        max_retries: NonNegativeInt = 1
        """Times a rollout that failed is run again."""
        min_group_size: PositiveInt = 2
        """A group with fewer scored rollouts is dropped."""
        weight: PositiveFloat = 1.0
        """Share of the groups, relative to the other tasks."""
        adapter: AdapterName = ""
        """Name of the adapter that the task samples with and trains, where tasks of a run have several: with ``trainer.lora``,
        each of the run's tasks names one. "": the tasks train one together."""

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            """Refuse what can't work, before any process starts: fields out of bounds, and fields that don't fit together.

            Args:
                field: path of this config, such as "tasks.sum_digits".
                policy_path: folder the policy starts from; None: not known.

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """
            sampling = self.sampling
            check_fields(self, field=field)
            if self.group_size > 1 and self.min_group_size > self.group_size:
                raise ConfigError(f"{field}.min_group_size", self.min_group_size, f"groups have {self.group_size}: lower it")
            for part, dataset in (("dataset", self.dataset), ("validation", self.validation)):
                if dataset is None:
                    continue
                dataset.validate(field=f"{field}.{part}")
                if dataset.turns_needed > self.env.max_turns:
                    cure = f"an example of {field}.{part} may take {dataset.turns_needed} turns: raise this"
                    raise ConfigError(f"{field}.env.max_turns", self.env.max_turns, cure)
            if self.validation_schedule is not None:
                self.validation_schedule.validate(field=f"{field}.validation_schedule")
            self.sampler.validate(field=f"{field}.sampler")
            # A frozen model's samples have no ratio to bias.
            frozen = self.algorithm.frozen_source() is not None
            if not (sampling.temperature >= MIN_TRAINING_TEMPERATURE or frozen):
                cure = f"training needs one above 0, and vLLM samples at none below {MIN_TRAINING_TEMPERATURE}: raise it"
                raise ConfigError(f"{field}.sampling.temperature", sampling.temperature, cure)
            for name, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, -1)):
                if value != off and not frozen:
                    raise ConfigError(f"{field}.sampling.{name}", value, f"it biases the ratio: train with {off}")
            self.algorithm.validate(
                field=f"{field}.algorithm",
                group_size=self.group_size,
                temperature=sampling.temperature,
                max_rollout_tokens=self.env.max_rollout_tokens,
                policy_path=policy_path,
            )

        def check_present(self, *, field: str) -> None:
            """Refuse what this machine lacks. Raises as ``Dataset.Config.check_present`` does."""
            self.dataset.check_present(field=f"{field}.dataset")
            if self.validation is not None:
                self.validation.check_present(field=f"{field}.validation")

    def __init__(self, config: Config, *, name: str, renderer: Renderer, seed: int = 0):
        if type(self).make_env is Task.make_env and type(self).make_envs is Task.make_envs:
            raise TypeError(f"{type(self).__name__} makes no env: define make_env(sample) or make_envs(sample, n)")
        needs_roles = config.algorithm.needs_roles()
        if needs_roles is not None and not attributes_roles(renderer):
            cure = (
                "has no effect, because the renderer does not say whose message a token belongs to: name a renderer of the "
                "model's family (renderer.name), or train without it"
            )
            raise ConfigError(f"algorithm.{needs_roles}", getattr(config.algorithm, needs_roles, None), cure)
        self.config = config
        self.name = name
        self.examples_warning: str | None = None
        """What a person should know of the examples, in one line; ``check_examples`` sets it."""
        self.vocab_size: int | None = None
        """Token ids that the policy's model has; the run sets it. None: prompts and completions may hold any."""
        self.renderer = renderer
        self.dataset: Dataset = config.dataset.build()
        self.validation: Dataset | None = config.validation.build() if config.validation else None
        self.sampler: SampleStrategy = config.sampler.build(dataset=self.dataset, seed=sampler_seed(seed, name))
        self.rubric: Rubric = config.rubric.build()
        self.algorithm: Algorithm = config.algorithm.build()
        self.algorithm.renderer = renderer

    in_lockstep: ClassVar[bool] = True
    """Whether a rollout asks the policy as soon as it has been answered. An agent may think as long as it likes."""
    repeats_example: ClassVar[bool] = True
    """Whether rollouts that share a slot are of one example."""

    # ---- what a user overrides

    def make_env(self, sample: DataSample) -> MessageEnv:
        """A fresh env for one rollout of ``sample``. Runs on the event loop: what takes long belongs in the env's ``reset``."""
        raise NotImplementedError(f"{type(self).__name__}.make_env")

    async def make_envs(self, sample: DataSample, n: int) -> list[MessageEnv]:
        """One env for each of ``n`` rollouts of ``sample``, fresh or from a pool. Each is closed once, by its rollout.

        May take ``env.rollout_timeout_s``.
        """
        envs: list[MessageEnv] = []
        try:
            for _ in range(n):
                began = time.monotonic()
                envs.append(self.make_env(sample))
                if time.monotonic() - began > HOLD_S:
                    await asyncio.sleep(HOLD_S)  # others run between two envs that take long to make
        except BaseException:  # one failed, or all together took too long
            for env in filter(first_use, (env for env in envs if isinstance(env, MessageEnv))):
                await RendererEnv(message_env=env, renderer=self.renderer, config=self.config.env).close()
            raise
        return envs

    async def run_rollout(self, env: RendererEnv, policy: PolicySession) -> None:
        """The turn loop: sample and step until the status is terminal. May take ``env.rollout_timeout_s``.

        An override that stops earlier calls ``env.finish(status)``.
        """
        await env.initial_prompt()
        while (prompt := env.prompt_token_ids) is not None:
            completion = await policy.generate(prompt, max_tokens=env.max_completion_tokens)
            await env.step_completion(completion)

    async def setup(self, policy: PolicyClient) -> None:
        """Before the first group. An override calls ``super().setup(policy)``."""
        for part in (self.rubric, self.algorithm):
            owner = f"{type(part).__name__}.setup"
            try:
                await call_bounded(functools.partial(part.setup, policy), timeout_s=None, owner=owner)  # its caller has a limit
            except UserCodeError as error:
                raise RunError(f"{owner}: {error}") from error

    async def close(self) -> None:
        """After the last group: release what make_envs draws from."""

    def check_examples(self, *, field: str) -> None:
        """Refuse examples that can't be used, before any process starts.

        Args:
            field: path of this task's config, such as "tasks.sum_digits".

        Raises:
            ConfigError: naming the field at fault; its ``lines`` name the examples.
        """

    # ---- what the controller calls

    @property
    def needs_group(self) -> bool:
        """Whether the rollouts of an example wait for each other: their algorithm or a reward compares them, or the task has a
        ``run_group`` or ``score_group`` of its own. If not, each is a group of its own, scored and trained on when it ends."""
        algorithm = type(self.algorithm)
        own = type(self).run_group is not Task.run_group or type(self).score_group is not Task.score_group
        compares = algorithm.needs_group or algorithm.score_group is not Algorithm.score_group
        return own or compares or self.rubric.compares_group

    @property
    def goes_stale(self) -> bool:
        """Whether what it trains on is sampled from the policy."""
        return self.frozen_source is None

    @property
    def frozen_source(self) -> FrozenModel | HostedModel | None:
        """The model that training rollouts are sampled from; None: the policy."""
        return self.config.algorithm.frozen_source()

    async def run_group(
        self,
        sample: DataSample,
        policy: PolicyClient,
        *,
        group_id: str,
        seed: int,
        sampling: SamplingConfig | None = None,
        group_size: int | None = None,
        credit: bool = True,
    ) -> RolloutGroup:
        """Run the rollouts of one data sample; every one has a terminal status then.

        Its sessions are open before it first awaits: the deterministic mode depends on the order in which sessions are opened.

        Args:
            seed: of the run; each rollout derives its own from it, the group, its index and the attempt.
            sampling: the task's when None.
            group_size: the task's when None.
            credit: False: the algorithm doesn't see the rollouts, which are the policy's; call ``score_rewards`` next, and
                ``credit_group`` unless it is for validation.
        """
        size = group_size or self.config.group_size
        group = RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=[
                Rollout(group_id=group_id, index_in_group=index, task_name=self.name, data_sample=sample)
                for index in range(size)
            ],
            admitted_version=policy.version,
        )
        # Validation measures the policy, whoever it learns from.
        source = policy.frozen(self.frozen_source) if credit and self.frozen_source is not None else policy
        run = GroupRun(self, group, source, seed=seed, sampling=sampling or self.config.sampling, credit=credit)
        with counted_in(group.costs):
            await run.run()
        return group

    async def score_rewards(self, group: RolloutGroup) -> None:
        """Have the rubric give each rollout its reward and components; without credit, as validation wants it.

        A rollout that failed, or whose reward function failed, keeps the reward None.
        """
        with counted_in(group.costs):
            await score_rewards(self.rubric, group, timeout_s=self.config.env.rollout_timeout_s)

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Rewards, then credit. Sets ``group.failure``, and returns it, where the group can't be trained on: too few rollouts
        were scored, or the algorithm failed. A rollout without a reward is never trained on."""
        await self.score_rewards(group)
        return await self._give_credit(group)

    async def credit_group(self, group: RolloutGroup) -> str | None:
        """Credit for a group that was run without, and rewarded. Sets and returns ``group.failure`` as ``score_group`` does."""
        limit_s = self.config.env.rollout_timeout_s
        scores = (score_rollout(self.algorithm, rollout, group, timeout_s=limit_s) for rollout in group.rollouts)
        await asyncio.gather(*scores)
        return await self._give_credit(group)

    async def _give_credit(self, group: RolloutGroup) -> str | None:
        # Again after credit: a rollout that its algorithm gave none has lost its reward.
        limit_s = self.config.env.rollout_timeout_s
        group.failure = self._too_few_scored(group) or await give_credit(self.algorithm, group, timeout_s=limit_s)
        group.failure = group.failure or self._too_few_scored(group)
        return group.failure

    def _too_few_scored(self, group: RolloutGroup) -> str | None:
        # A group of one rollout needs one.
        needed = min(self.config.min_group_size, len(group.rollouts))
        if len(group.scored) >= needed:
            return None
        causes = [rollout.error for rollout in group.rollouts if rollout.error]
        first = f": {causes[0]}" if causes else ""
        return f"{len(group.scored)} of {len(group.rollouts)} rollouts scored, {needed} needed{first}"
