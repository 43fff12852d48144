"""A task: a dataset, an env for each example, a rubric and an algorithm.

What becomes of a group, in order:

1. ``run_group`` opens a session with the policy, or with the algorithm's frozen source, for each
   rollout, makes the envs, and runs the rollouts side by side (`tasks/group_run.py`). A rollout
   that ends in ERROR or TIMEOUT is run again, with a new env and seed, up to ``max_retries`` times.
2. Each rollout that ends becomes training samples, and ``Algorithm.score_rollout`` sees it.
3. ``score_group`` has the rubric give rewards, then ``Algorithm.score_group`` credit.

A task has a method for each of the user's functions. `tasks/scoring.py` does their work::

    credit_rollout       Algorithm.score_rollout    as each rollout ends
    score_group
      score_rewards      Rubric.score_group         when all have ended
      give_credit        Algorithm.score_group      after that

Where credit is expensive, groups run and are rewarded without it (``run_group(credit=False)``,
``score_rewards``), and ``give_credit(late=True)`` makes the two calls of the algorithm for those
that filters keep.

User code that fails on the way ends in a rollout's status, and is named there; nothing but
cancellation is raised. A rollout is read-only (`frozen.py`) before the algorithm or the rubric sees
it for the first time.
"""

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from renderers import Renderer, ToolSpec

from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.ask.call import ask
from torchtitan.experiments.rl.ask.lag import HOLD_S
from torchtitan.experiments.rl.bounds import (
    Changeable,
    Cure,
    Matches,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.configurable import (
    BuildContext,
    UserConfigurable,
    build_with,
    takes_context,
)
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor, sampler_seed
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer import attributes_roles
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.errors import (
    ConfigError,
    RunError,
    UserCodeError,
    user_code,
)
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel
from torchtitan.experiments.rl.rollouts.costs import counted_in
from torchtitan.experiments.rl.rollouts.policy import (
    PolicyClient,
    PolicySession,
    SamplingConfig,
    Temperature,
    TopK,
    TopP,
)
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks import scoring
from torchtitan.experiments.rl.tasks.group_run import GroupRun, claim, derive_seed

__all__ = [
    "MIN_TRAINING_TEMPERATURE",
    "Task",
    "ValidationConfig",
    "build_algorithm",
    "build_part",
    "claim",
    "derive_seed",
    "part_at_fault",
]

logger = logging.getLogger(__name__)

MIN_TRAINING_TEMPERATURE = 0.01
"""Lowest sampling temperature of training. vLLM raises lower ones to this, but for those under
1e-5, at which it samples greedily."""
PARTS = ("dataset", "validation", "rubric", "validation_rubric", "algorithm", "sampler")
"""Fields of a task's config that the task builds."""
GroupSize = Annotated[
    int, Ge(1), Le(4096), Cure("all rollouts of a group are in memory until the last has ended")
]
AdapterName = Annotated[str, Matches(r"[\w-]*", "letters, digits, _ and -: it names a folder")]


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """When and how the policy is measured on a task's validation examples."""

    every: NonNegativeInt = 10
    """Steps between two evaluations. There always is one before the first step and one after the
    last, unless this is 0, which turns all off."""
    examples: PositiveInt = 128
    """Examples of the validation set, from its start; all of a smaller set."""
    attempts: GroupSize = 1
    """Rollouts of each example: the k of avg@k and pass@k."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_p: TopP | None = None
    """Share of the probability to sample from; None for the task's ``sampling.top_p``, which is all
    of it in training. Evaluations take no loss, so it biases nothing."""
    top_k: TopK | None = None
    """Number of most likely tokens to sample from; -1 and 0 for all, None for the task's."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens of a turn; None for the task's ``sampling.max_tokens``. The task's
    env.max_rollout_tokens bounds the rollout all the same."""
    max_concurrency: PositiveInt = 64
    """Rollouts at once while training goes on: the engine serves requests in turn, and those of
    training have to get theirs. The first and the last evaluation have no limit: no step waits for
    rollouts meanwhile."""
    pass_reward: float = 1.0
    """Reward from which an attempt has passed."""

    def sampling(self, of_task: SamplingConfig) -> SamplingConfig:
        """Return how the attempts of a task are sampled."""
        return replace(
            of_task,
            temperature=self.temperature,
            top_p=of_task.top_p if self.top_p is None else self.top_p,
            top_k=of_task.top_k if self.top_k is None else self.top_k,
            max_tokens=of_task.max_tokens if self.max_tokens is None else self.max_tokens,
        )

    @property
    def passes(self) -> list[int]:
        """Each k of pass@k: ``attempts``, and the powers of two below it."""
        return sorted({self.attempts, *(2**n for n in range(self.attempts.bit_length()))})

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation that people choose by, behind the task's name."""
        of_rewards = ["reward", f"avg@{self.attempts}", *(f"pass@{k}" for k in self.passes)]
        return [*of_rewards, "failed", "truncated", "completion_tokens"]

    def validate(self, *, field: str) -> None:
        """Refuse fields that don't fit together.

        Raises:
            ConfigError: naming the field at fault, its value and the cure.
        """
        if self.attempts > 1 and self.temperature == 0:
            raise ConfigError(
                f"{field}.attempts",
                self.attempts,
                f"greedy attempts are all alike: set {field}.temperature",
            )


@contextmanager
def part_at_fault(part: str, name: str, what: str) -> Iterator[None]:
    """Refuse a part of a task if the code in the block fails; see `errors.user_code`.

    A ConfigError of the block keeps its value and cure. Its field becomes a path in the task:
    "dataset.rows" stays, but for the validation set, which is a dataset too, it becomes
    "validation.rows". A field that begins with no part of `PARTS` gets the part, its class and
    ``what`` before it.

    Args:
        part: field of the task's config, one of `PARTS`.
        name: class of the part.
        what: what went wrong, such as "it can't be built".

    Raises:
        ConfigError: the field is relative to the task.
    """
    with user_code(part, name, what):
        try:
            yield
        except ConfigError as error:
            first, dot, rest = error.field.partition(".")
            field = error.field if first in PARTS else f"{part} {name}: {what}: {error.field}"
            if part == "validation" and first == "dataset":
                field = part + dot + rest
            raise ConfigError(field, error.value, error.cure) from error


def build_part(part: str, config: Any, **arguments: Any) -> Any:  # noqa: ANN401 - any component
    """Build a component of a task, and raise as `part_at_fault` does if its constructor fails."""
    with part_at_fault(part, built_class(config).__name__, "it can't be built"):
        return config.build(**arguments)


def build_algorithm(config: Algorithm.Config, context: BuildContext) -> Algorithm:
    """Build the algorithm of a task, and raise as `part_at_fault` does if its constructor fails."""
    with part_at_fault("algorithm", built_class(config).__name__, "it can't be built"):
        return build_with(config, context)


class Task(UserConfigurable):
    """Base class of tasks. A subclass defines ``make_env`` or ``make_envs``.

    Example::

        from torchtitan.experiments.rl.algorithms import GRPO
        from torchtitan.experiments.rl.tasks import *

        class Doubles(Task):
            def make_env(self, sample):
                return QuestionEnv(f"What is twice {sample.env_input['number']}?")

        task = Doubles.Config(
            algorithm=GRPO.Config(),
            dataset=RowDataset.Config(rows=MemoryRows([{"number": 21, "answer": "42"}])),
            rubric=Rubric.Config(reward_fns=[right_answer]),
        )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        algorithm: Algorithm.Config
        dataset: Annotated[
            Dataset.Config, Cure("for rows in memory: RowDataset.Config(rows=MemoryRows([...]))")
        ]
        validation: Changeable[Dataset.Config | None] = None
        """Examples that the policy is measured on and never trained on."""
        validation_schedule: Changeable[ValidationConfig | None] = None
        """When and how the policy is measured; None for the run's `validation`."""
        rubric: Annotated[Rubric.Config, Cure("write Rubric.Config(reward_fns=[...])")] = field(
            default_factory=Rubric.Config
        )
        validation_rubric: Changeable[Rubric.Config | None] = None
        """Rubric of evaluations, if another than ``rubric`` is to measure the policy. None takes
        ``rubric``."""
        sampler: SampleStrategy.Config = field(default_factory=ShuffledCursor.Config)
        env: RendererEnvConfig = field(default_factory=RendererEnvConfig)
        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        group_size: GroupSize = 8
        """Rollouts per data sample. If nothing compares them, each is a group by itself."""
        prompts_may_differ: Changeable[bool] = False
        """True if the envs of one example may begin with different prompts. Otherwise a task whose
        rollouts are compared is refused if they do: a rollout that was asked the easier question
        would look like the better one."""
        max_retries: NonNegativeInt = 1
        """Number of times that a rollout which failed is run again."""
        min_group_size: PositiveInt = 2
        """Minimum number of scored rollouts of a group; a group with fewer is dropped. A group of
        one rollout needs one."""
        weight: Annotated[PositiveFloat, Cure("to leave a task out, remove it")] = 1.0
        """Share of the groups, relative to the other tasks."""
        adapter: AdapterName = ""
        """Name of the adapter that the task samples with and trains, if tasks of a run have several
        (``trainer.lora``): then each of the run's tasks names one. If "", the tasks train one
        together."""

        def build(self, **arguments: Any) -> Any:  # noqa: ANN401 - as the base class declares it
            """Build the task: ``build(name=..., context=...)``.

            ``name`` is the key of this config among the run's tasks, and ``context`` a
            `BuildContext`, such as ``build_context`` (`envs/renderer.py`) returns.

            Raises:
                TypeError: the context is not given, or the constructor does not take it.
                ConfigError: a part can't be built; the field is relative to the task.
            """
            task = built_class(self)
            if "context" not in arguments or not takes_context(task):
                raise TypeError(
                    f"{task.__name__} is built from a context, which holds renderer, vocab_size "
                    "and seed: build(name=..., context=BuildContext(...)), "
                    "__init__(self, config, *, name, context)"
                )
            return super(Task.Config, self).build(**arguments)

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            """Refuse fields out of bounds, and fields that don't fit together.

            Args:
                field: path of this config, such as "tasks.sum_digits".
                policy_path: folder that the policy starts from; None if not known.

            Raises:
                ConfigError: naming the field at fault, its value and the cure.
            """
            check_fields(self, field=field)
            if self.group_size > 1 and self.min_group_size > self.group_size:
                raise ConfigError(
                    f"{field}.min_group_size",
                    self.min_group_size,
                    f"groups have {self.group_size}: lower it",
                )
            self._validate_dataset(self.dataset, field=field, part="dataset")
            if self.validation is not None:
                self._validate_dataset(self.validation, field=field, part="validation")
            if self.validation_schedule is not None:
                self.validation_schedule.validate(field=f"{field}.validation_schedule")
            self.sampler.validate(field=f"{field}.sampler")
            if self.algorithm.frozen_source() is None:
                # A frozen model's samples have no importance ratio that could be biased.
                self._validate_sampling(f"{field}.sampling")
            self.algorithm.validate(
                field=f"{field}.algorithm",
                group_size=self.group_size,
                temperature=self.sampling.temperature,
                max_rollout_tokens=self.env.max_rollout_tokens,
                policy_path=policy_path,
            )

        def _validate_dataset(self, dataset: Dataset.Config, *, field: str, part: str) -> None:
            dataset.validate(field=f"{field}.{part}")
            if dataset.turns_needed > self.env.max_turns:
                raise ConfigError(
                    f"{field}.env.max_turns",
                    self.env.max_turns,
                    f"an example of {field}.{part} may take {dataset.turns_needed} turns: "
                    "raise this",
                )

        def _validate_sampling(self, field: str) -> None:
            sampling = self.sampling
            if not sampling.temperature >= MIN_TRAINING_TEMPERATURE:
                raise ConfigError(
                    f"{field}.temperature",
                    sampling.temperature,
                    "training needs one above 0, and vLLM samples at none below "
                    f"{MIN_TRAINING_TEMPERATURE}: raise it",
                )
            for name, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, -1)):
                if value != off:
                    cure = f"it biases the ratio: train with {off}"
                    raise ConfigError(f"{field}.{name}", value, cure)

        def check_present(self, *, field: str) -> None:
            """Refuse what this machine lacks. Raises as ``Dataset.Config.check_present`` does."""
            self.dataset.check_present(field=f"{field}.dataset")
            if self.validation is not None:
                self.validation.check_present(field=f"{field}.validation")

    in_lockstep: ClassVar[bool] = True
    """True if every open rollout asks the policy before long. A synchronous run then waits for all
    of them, and sends their requests together. An agent may do other things for as long as it
    likes."""
    repeats_example: ClassVar[bool] = True
    """True if a task that needs no group starts all rollouts of one pick of the task mix with the
    same example. If False, each has an example of its own."""

    def __init__(self, config: Config, *, name: str, context: BuildContext):
        if type(self).make_env is Task.make_env and type(self).make_envs is Task.make_envs:
            raise TypeError(
                f"{type(self).__name__} makes no env: define make_env(sample) or "
                "make_envs(sample, n)"
            )
        self._check_roles(config, context.renderer)
        self.config = config
        self.name = name
        self.examples_warning: str | None = None
        """Warning of odd examples in one line, which ``check_examples`` sets; None without one."""
        self.vocab_size = context.vocab_size
        self.renderer = context.renderer
        self.dataset: Dataset = build_part("dataset", config.dataset)
        self.validation: Dataset | None = None
        if config.validation:
            self.validation = build_part("validation", config.validation)
        kind = type(self.dataset).__name__
        with part_at_fault("dataset", kind, "its __len__ failed"):
            len(self.dataset)
        self.sampler: SampleStrategy = build_part(
            "sampler", config.sampler, dataset=self.dataset, seed=sampler_seed(context.seed, name)
        )
        self.rubric: Rubric = build_part("rubric", config.rubric)
        self.validation_rubric: Rubric | None = None
        if config.validation_rubric is not None:
            self._check_takes_rubric()
            self.validation_rubric = build_part("validation_rubric", config.validation_rubric)
        self.algorithm: Algorithm = build_algorithm(config.algorithm, context)

    @staticmethod
    def _check_roles(config: Config, renderer: Renderer) -> None:
        needs_roles = config.algorithm.needs_roles()
        if needs_roles is not None and not attributes_roles(renderer):
            raise ConfigError(
                f"algorithm.{needs_roles}",
                getattr(config.algorithm, needs_roles, None),
                "has no effect, because the renderer does not say whose message a token belongs "
                "to: name a renderer of the model's family (renderer.name), or train without it",
            )

    def _check_takes_rubric(self) -> None:
        """Refuse a rubric of evaluations that an override of ``score_rewards`` would not be given.

        Raises:
            ConfigError: the override has no parameter ``rubric``.
        """
        if "rubric" not in inspect.signature(type(self).score_rewards).parameters:
            cure = (
                f"{type(self).__name__}.score_rewards takes none: define score_rewards(self, "
                "group, *, rubric=None), and hand it on to super()"
            )
            raise ConfigError("validation_rubric", "Rubric", cure)

    # ---- what a user overrides

    def make_env(self, sample: DataSample) -> MessageEnv:
        """Return a fresh env for one rollout of ``sample``.

        It runs on the event loop: what takes long belongs in the env's ``reset``. The sample is
        read-only, because the rollouts of a group share it.
        """
        raise NotImplementedError(f"{type(self).__name__}.make_env")

    async def make_envs(self, sample: DataSample, n: int) -> list[MessageEnv]:
        """Return a new env for each of ``n`` rollouts of ``sample``.

        Each is closed once, by its rollout. What takes long to build may come from a pool, to which
        the env's ``close`` returns it. The call may take ``env.rollout_timeout_s``.
        """
        envs: list[MessageEnv] = []
        try:
            for _ in range(n):
                began = time.monotonic()
                envs.append(self.make_env(sample))
                if time.monotonic() - began > HOLD_S:
                    # Let others run between two envs that take long to make.
                    await asyncio.sleep(HOLD_S)
        except BaseException:  # one failed, or all together took too long
            made = [env for env in envs if isinstance(env, MessageEnv)]
            for env in filter(claim, made):
                await RendererEnv(
                    message_env=env, renderer=self.renderer, config=self.config.env
                ).close()
            raise
        return envs

    async def run_rollout(self, env: RendererEnv, policy: PolicySession) -> None:
        """Sample and step until the status is terminal: the turn loop of a rollout.

        It may take ``env.rollout_timeout_s``. An override that stops earlier calls
        ``env.finish(status)``, such as ``env.finish(RolloutStatus.TRUNCATED_MAX_TURNS)``.
        """
        await env.initial_prompt()
        while (prompt := env.prompt_token_ids) is not None:
            completion = await policy.generate(prompt, max_tokens=env.max_completion_tokens)
            await env.step_completion(completion)

    async def setup(self, policy: PolicyClient) -> None:
        """Prepare the task before its first group.

        An override calls ``super().setup(policy)``.

        Raises:
            RunError: the setup of the rubric or the algorithm failed.
        """
        parts: list[Rubric | Algorithm] = [self.rubric, self.algorithm]
        if self.validation_rubric is not None:
            parts.append(self.validation_rubric)
        for part in parts:
            owner = f"{type(part).__name__}.setup"
            try:
                await ask(part.setup, policy, timeout_s=None, owner=owner)  # its caller has a limit
            except UserCodeError as error:
                raise RunError(str(error)) from error

    async def close(self) -> None:
        """Release what ``make_envs`` draws from, after the last group."""

    def check_examples(self, *, field: str) -> None:
        """Refuse examples that can't be used, before any process starts.

        Args:
            field: path of this task's config, such as "tasks.sum_digits".

        Raises:
            ConfigError: naming the field at fault, and in its ``lines`` the examples.
        """

    def known_answer(self, sample: DataSample) -> str | None:
        """Return the right answer to a sample, which the preflight tries as the reply.

        None if no answer is known.
        """
        return None

    def check_control_tokens(self, tokens: Collection[str], *, field: str) -> None:
        """Refuse examples in which the tokenizer would read a text as a control token.

        Args:
            tokens: texts of the tokenizer's special tokens, such as "<|im_end|>".
            field: path of this task's config.

        Raises:
            ConfigError: naming the example.
        """

    def check_tools(self, tools: list[ToolSpec], *, field: str) -> str | None:
        """Return a warning of examples that do not fit beside the tools; None if all do.

        The preflight calls it with the tools that the first example's env offers.

        Args:
            field: path of this task's config.
        """
        return None

    # ---- what the controller calls

    @property
    def needs_group(self) -> bool:
        """True if the rollouts of an example wait for each other.

        They do if their algorithm or a reward compares them, or if the task overrides ``run_group``
        or ``score_group``. If not, each is a group by itself, scored and trained on when it ends.
        """
        algorithm = type(self.algorithm)
        overrides = (
            type(self).run_group is not Task.run_group
            or type(self).score_group is not Task.score_group
        )
        compares = algorithm.needs_group or algorithm.score_group is not Algorithm.score_group
        return overrides or compares or self.rubric.compares_group

    @property
    def trains_on_policy_samples(self) -> bool:
        """True if the task trains on samples of the policy, whose version grows old."""
        return self.frozen_source is None

    @property
    def frozen_source(self) -> FrozenModel | HostedModel | None:
        """Model that training rollouts are sampled from; None for the policy."""
        return self.config.algorithm.frozen_source()

    async def run_group(  # noqa: PLR0913 - the contract with tasks that override it
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

        Their sessions are open before the call first awaits: the deterministic mode depends on the
        order in which sessions are opened.

        Args:
            sample: example that the envs are made from; they are given a read-only copy.
            seed: seed of the run. Each rollout derives its own from it, the group, its index and
                the attempt.
            sampling: sampling settings; None for the task's.
            group_size: number of rollouts; None for the task's.
            credit: if False, the rollouts are sampled from the policy even if the algorithm has a
                frozen source, and ``Algorithm.score_rollout`` is not called. Call ``score_rewards``
                next, and then ``give_credit(late=True)``, but not for a validation.

        Raises:
            UserCodeError: the example contains itself (`frozen_sample`).
        """
        sample = frozen_sample(sample)
        rollouts = [
            Rollout(
                group_id=group_id, index_in_group=index, task_name=self.name, data_sample=sample
            )
            for index in range(group_size or self.config.group_size)
        ]
        group = RolloutGroup(
            group_id=group_id,
            task_name=self.name,
            data_sample=sample,
            rollouts=rollouts,
            admitted_version=policy.version,
        )
        # Validation measures the policy, whoever it learns from.
        frozen_source = self.frozen_source if credit else None
        run = GroupRun(
            task=self,
            group=group,
            source=policy if frozen_source is None else policy.frozen(frozen_source),
            seed=seed,
            sampling=sampling or self.config.sampling,
            credit=credit,
        )
        with counted_in(group.costs):
            await run.run()
        return group

    @property
    def _limit_s(self) -> float:
        """Time limit of a rollout, and of a rubric or an algorithm that scores in its own way."""
        return self.config.env.rollout_timeout_s

    async def score_rewards(self, group: RolloutGroup, *, rubric: Rubric | None = None) -> None:
        """Have the rubric give each rollout its reward and components; without credit.

        The group becomes read-only first. A rollout that had failed before gets the rubric's
        ``error_reward``, which is None by default; one whose reward function fails keeps None. A
        rubric that fails, fails every rollout.

        Args:
            rubric: rubric in place of the task's own, as an evaluation may have one.
        """
        rubric = self.rubric if rubric is None else rubric
        await scoring.reward_group(rubric, group, timeout_s=self._limit_s)

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Give rewards, then credit.

        If the group can't be trained on, set ``group.failure`` to the reason and return it.
        """
        await self.score_rewards(group)
        return await self.give_credit(group)

    async def give_credit(self, group: RolloutGroup, *, late: bool = False) -> str | None:
        """Have the algorithm give credit to a group that was rewarded.

        If the group can't be trained on, because too few rollouts were scored or the algorithm
        failed, set ``group.failure`` to the reason and return it. A rollout without a reward is
        never trained on.

        Args:
            late: True if the group was run without credit, so that ``score_rollout`` has not seen
                its rollouts yet.
        """
        group.freeze()
        needed = self.config.min_group_size
        with scoring.counting_costs(group):
            if late:
                await asyncio.gather(
                    *(self.credit_rollout(rollout, group) for rollout in group.rollouts)
                )
            failure = scoring.too_few_scored(group, needed)
            if failure is None:
                failure = await scoring.credit_group(self.algorithm, group, timeout_s=self._limit_s)
        # Count again: a rollout that its algorithm gave no credit has lost its reward.
        group.amend(failure=failure or scoring.too_few_scored(group, needed))
        return group.failure

    async def credit_rollout(self, rollout: Rollout, group: RolloutGroup) -> None:
        """Have the algorithm's ``score_rollout`` see a rollout of the group that has ended well.

        If the algorithm fails, the rollout fails.
        """
        await scoring.credit_rollout(self.algorithm, rollout, group, timeout_s=self._limit_s)


def frozen_sample(sample: DataSample) -> DataSample:
    """Return a read-only copy of an example, which its group may share.

    Objects that JSON does not have are shared with the dataset: they may be large.

    Raises:
        UserCodeError: the example contains itself, so no copy of it is whole.
    """
    try:
        return sample if sample.frozen else copy.copy(sample).freeze()
    except RecursionError:
        raise UserCodeError(
            f"example {sample.sample_id}: its env_input or info contains itself, or is nested too "
            "deep"
        ) from None
