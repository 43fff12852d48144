"""A task: a dataset, an env for each example, a rubric and an algorithm. The controller gets groups from it.

What becomes of a group, in order:

1. ``run_group`` opens a session with the policy, or with the algorithm's frozen source, for each rollout, makes the envs, and
   runs the rollouts side by side. A rollout that ends in ERROR or TIMEOUT is run again, with a new env and seed, up to
   ``max_retries`` times.
2. Each rollout that arrives becomes training samples, and ``Algorithm.score_rollout`` sees it.
3. ``score_group`` has the rubric give rewards, then ``Algorithm.score_group`` credit.

User code that fails on the way ends in a rollout's status; nothing but cancellation is raised. Whatever it does, every env and
every session is closed exactly once, and what it returns is checked.
"""

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from renderers import Renderer

from torchtitan.config import Configurable
from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.batching.sample_checks import (
    check_streams,
    check_trainable,
    check_weights,
    finite_float,
    missing_credit,
)
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
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.data.sampler import SampleStrategy, ShuffledCursor, sampler_seed
from torchtitan.experiments.rl.envs.conversation import GroupPrompts, Line, yield_queue
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.messages import checked_rewards, require
from torchtitan.experiments.rl.envs.renderer import attributes_roles
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, RunError, user_code, users_traceback
from torchtitan.experiments.rl.gateway.session import AgentRollout
from torchtitan.experiments.rl.generation.references import FrozenModel, HostedModel
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import (
    ModelClient,
    PolicyClient,
    PolicySession,
    SamplingConfig,
    Temperature,
)
from torchtitan.experiments.rl.rollouts.samples import check_completion, samples_from_turns
from torchtitan.experiments.rl.rollouts.sealed import (
    copied_example,
    is_own,
    sealed_group,
    sealed_rollout,
    take_samples,
)
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    add_cost,
    counted_in,
)
from torchtitan.experiments.rl.rubrics.rubric import Reward, Rubric
from torchtitan.experiments.rl.types import STREAMS, TrainingSample
from torchtitan.experiments.rl.user_code.calls import (
    HOLD_S,
    UserCodeError,
    UserCodeTimeout,
    call_bounded,
    cause_of,
    doing,
)

logger = logging.getLogger(__name__)

MIN_TRAINING_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this, but for those under 1e-5, at which it samples greedily."""
PARTS = ("dataset", "validation", "rubric", "algorithm", "sampler")
"""Fields of a task's config that the task builds."""
AdapterName = Annotated[str, Matches(r"[\w-]*", "letters, digits, _ and -: it names a folder")]


def derive_seed(
    seed: int, group_id: str, index_in_group: int, attempt: int, branch: str = ""
) -> int:
    """Seed of one attempt at one rollout, or a branch of it: 63 bits, equal in every process (``hash`` of a string is not)."""
    key = f"{seed}/{group_id}/{index_in_group}/{attempt}{branch and '/'}{branch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class CheckedSession:
    """Implements rollouts.policy.PolicySession. An engine may be the user's own."""

    def __init__(
        self,
        session: PolicySession,
        *,
        sampling: SamplingConfig,
        vocab_size: int | None,
        branch: Callable[[str], "CheckedSession"],
        branch_seed: Callable[[str], int],
    ):
        """
        Args:
            sampling: settings that the session was opened with.
            vocab_size: ids that the model has; None: not known.
            branch: opens another session of the rollout, for another chain. Its seed follows from the rollout's and the key.
            branch_seed: returns the seed that a branch with this key has.
        """
        self.sampling = sampling
        self.branch = branch
        self.branch_seed = branch_seed
        self._session = session
        self._vocab_size = vocab_size
        self._closed = False
        self.waits = 0
        """Completions that the generator has not answered."""

    @property
    def stops_at_texts(self) -> bool:
        """See PolicySession."""
        return self._session.stops_at_texts

    async def generate(
        self, prompt_token_ids: np.ndarray, *, max_tokens: int, **options: Any
    ) -> Completion:
        """See PolicySession.generate.

        Args:
            options: its other arguments, handed on.

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
                completion = await self._session.generate(prompt, max_tokens=max_tokens, **options)
            check_completion(completion)
            self._check_ids(completion.token_ids, "a completion has")
        except BaseException as error:
            running = asyncio.current_task()
            if (
                isinstance(error, asyncio.CancelledError)
                and running is not None
                and running.cancelling()
            ):
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
            raise UserCodeError(
                f"{what} the token id {highest}, and the model has {self._vocab_size:,} ids"
            )

    def close(self) -> None:
        """See PolicySession.close. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._session.close()


USED = "_used_by_rollout"
"""What an env that a rollout had carries."""


def first_use(env: MessageEnv) -> bool:
    """Note that a rollout has the env. False: another had it before, in any group of this process."""
    seen, vars(env)[USED] = vars(env).get(USED), id(env)  # the id: a copy of a used env is another
    return seen != id(env)


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
            raise ConfigError(
                f"{field}.attempts",
                self.attempts,
                f"greedy attempts are all alike: set {field}.temperature",
            )


@contextmanager
def part_at_fault(part: str, name: str, what: str) -> Iterator[None]:
    """Refuse ``part`` of a task if the code in the block fails; see ``user_code``. Parts name themselves in their errors by
    their place in a task, a validation set as "dataset".

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


def build_part(part: str, config: Any, **arguments: Any) -> Any:
    """Raises as ``part_at_fault`` does."""
    with part_at_fault(part, built_class(config).__name__, "it can't be built"):
        return config.build(**arguments)


class Task(UserConfigurable):
    """Subclass it and define ``make_env`` (or ``make_envs``)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        algorithm: Algorithm.Config
        dataset: Annotated[
            Dataset.Config, Cure("for rows in memory: RowDataset.Config(rows=MemoryRows([...]))")
        ]
        validation: Changeable[Dataset.Config | None] = None
        """Examples the policy is measured on and never trained on."""
        validation_schedule: Changeable[ValidationConfig | None] = None
        """When and how; None: the run's `validation`."""
        rubric: Annotated[Rubric.Config, Cure("write Rubric.Config(reward_fns=[...])")] = field(
            default_factory=Rubric.Config
        )
        sampler: SampleStrategy.Config = field(default_factory=ShuffledCursor.Config)
        env: RendererEnvConfig = field(default_factory=RendererEnvConfig)
        sampling: SamplingConfig = field(default_factory=SamplingConfig)
        group_size: PositiveInt = 8
        """Rollouts per data sample. Where nothing compares them, each is a group by itself."""
        max_retries: NonNegativeInt = 1
        """Times a rollout that failed is run again."""
        min_group_size: PositiveInt = 2
        """A group with fewer scored rollouts is dropped."""
        weight: Annotated[PositiveFloat, Cure("to leave a task out, remove it")] = 1.0
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
                raise ConfigError(
                    f"{field}.min_group_size",
                    self.min_group_size,
                    f"groups have {self.group_size}: lower it",
                )
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
                    raise ConfigError(
                        f"{field}.sampling.{name}", value, f"it biases the ratio: train with {off}"
                    )
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
            raise TypeError(
                f"{type(self).__name__} makes no env: define make_env(sample) or make_envs(sample, n)"
            )
        needs_roles = config.algorithm.needs_roles()
        if needs_roles is not None and not attributes_roles(renderer):
            cure = (
                "has no effect, because the renderer does not say whose message a token belongs to: name a renderer of the "
                "model's family (renderer.name), or train without it"
            )
            raise ConfigError(
                f"algorithm.{needs_roles}", getattr(config.algorithm, needs_roles, None), cure
            )
        self.config = config
        self.name = name
        self.examples_warning: str | None = None
        """What a person should know of the examples, in one line; ``check_examples`` sets it."""
        self.vocab_size: int | None = None
        """Token ids that the policy's model has; the run sets it. None: prompts and completions may hold any."""
        self.renderer = renderer
        self.dataset: Dataset = build_part("dataset", config.dataset)
        self.validation: Dataset | None = (
            build_part("validation", config.validation) if config.validation else None
        )
        kind = type(self.dataset).__name__
        with part_at_fault("dataset", kind, "its __len__ failed"), doing(f"{kind}.__len__"):
            len(self.dataset)
        sampler_arguments = {"dataset": self.dataset, "seed": sampler_seed(seed, name)}
        self.sampler: SampleStrategy = build_part("sampler", config.sampler, **sampler_arguments)
        self.rubric: Rubric = build_part("rubric", config.rubric)
        self.algorithm: Algorithm = build_part("algorithm", config.algorithm)
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
                    await asyncio.sleep(
                        HOLD_S
                    )  # others run between two envs that take long to make
        except BaseException:  # one failed, or all together took too long
            for env in filter(first_use, (env for env in envs if isinstance(env, MessageEnv))):
                await RendererEnv(
                    message_env=env, renderer=self.renderer, config=self.config.env
                ).close()
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
                await call_bounded(
                    functools.partial(part.setup, policy), timeout_s=None, owner=owner
                )  # its caller has a limit
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

    def known_answer(self, sample: DataSample) -> str | None:
        """Return the right answer to a sample, which the preflight tries as the reply; None where none is known."""
        return None

    def check_control_tokens(self, tokens: Collection[str], *, field: str) -> None:
        """Refuse examples in which the tokenizer would read a piece of text as a control token.

        Args:
            tokens: texts of the tokenizer's special tokens, such as "<|im_end|>".
            field: path of this task's config.

        Raises:
            ConfigError: naming the example.
        """

    # ---- what the controller calls

    @property
    def needs_group(self) -> bool:
        """Whether the rollouts of an example wait for each other: their algorithm or a reward compares them, or the task
        overrides ``run_group`` or ``score_group``. If not, each is a group by itself, scored and trained on when it ends."""
        algorithm = type(self.algorithm)
        own = (
            type(self).run_group is not Task.run_group
            or type(self).score_group is not Task.score_group
        )
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
                Rollout(
                    group_id=group_id, index_in_group=index, task_name=self.name, data_sample=sample
                )
                for index in range(size)
            ],
            admitted_version=policy.version,
        )
        # Validation measures the policy, whoever it learns from.
        source = (
            policy.frozen(self.frozen_source)
            if credit and self.frozen_source is not None
            else policy
        )
        sampling = sampling or self.config.sampling
        with counted_in(group.costs):
            await GroupRun(
                task=self, group=group, source=source, seed=seed, sampling=sampling, credit=credit
            ).run()
        return group

    @property
    def _limit_s(self) -> float:
        """Of a rollout, and of a rubric or an algorithm that scores in its own way."""
        return self.config.env.rollout_timeout_s

    async def score_rewards(self, group: RolloutGroup) -> None:
        """Have the rubric give each rollout its reward and components; without credit, as validation wants it.

        A rollout that failed, or whose reward function failed, keeps the reward None. A rubric that fails fails every rollout.
        """
        rubric, given, env_input, limit_s = (
            self.rubric,
            group.rollouts,
            group.data_sample.env_input,
            None,
        )
        name = f"{type(rubric).__name__}.score_group"
        own = type(rubric).score_group is not Rubric.score_group
        if own:  # Rubric limits each of its functions
            given = [sealed_rollout(rollout, for_rubric=True) for rollout in given]
            env_input, limit_s = copied_example(env_input), self._limit_s
        try:
            with counted_in(group.costs), trace.span(name):
                rewards = await call_bounded(
                    lambda: rubric.score_group(list(given), env_input), timeout_s=limit_s
                )
            checked = _checked(rewards, group.rollouts)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # what a rubric returned may be of any class
            _fail(group, f"{name}: {cause_of(error)}", error)
            return
        for rollout, seen, (reward, components) in zip(group.rollouts, given, checked, strict=True):
            rollout.reward, rollout.reward_components = reward, components
            if own and seen.status is not rollout.status:
                # The status that is recorded has to agree with training: a rubric may fail a rollout, and nothing else.
                rollout.status, rollout.error, rollout.reward = (
                    RolloutStatus.ERROR,
                    seen.error,
                    None,
                )
                rollout.traceback = seen.traceback
                if not (isinstance(seen.status, RolloutStatus) and seen.status.is_error()):
                    rollout.error = (
                        f"{name} set the status of a rollout that has ended to {shown(seen.status)}"
                    )

    async def score_group(self, group: RolloutGroup) -> str | None:
        """Rewards, then credit. Sets ``group.failure``, and returns it, where the group can't be trained on: too few rollouts
        were scored, or the algorithm failed. A rollout without a reward is never trained on."""
        await self.score_rewards(group)
        return await self._credit(group)

    async def credit_group(self, group: RolloutGroup) -> str | None:
        """Credit for a group that was run without, and rewarded. Sets and returns ``group.failure`` as ``score_group`` does."""
        await asyncio.gather(*(self.credit_rollout(rollout, group) for rollout in group.rollouts))
        return await self._credit(group)

    async def _credit(self, group: RolloutGroup) -> str | None:
        # Counted again after credit: a rollout that its algorithm gave none has lost its reward.
        group.failure = (
            self._too_few_scored(group)
            or await self.give_credit(group)
            or self._too_few_scored(group)
        )
        return group.failure

    def _too_few_scored(self, group: RolloutGroup) -> str | None:
        # A group of one rollout needs one.
        needed = min(self.config.min_group_size, len(group.rollouts))
        if len(group.scored) >= needed:
            return None
        causes = [rollout.error for rollout in group.rollouts if rollout.error]
        first = f": {causes[0]}" if causes else ""
        return (
            f"{len(group.scored)} of {len(group.rollouts)} rollouts scored, {needed} needed{first}"
        )

    async def credit_rollout(self, rollout: Rollout, group: RolloutGroup) -> None:
        """Have the algorithm's ``score_rollout`` see a rollout of the group that has ended well. What fails there fails the
        rollout."""
        algorithm = self.algorithm
        if rollout.status.is_error() or type(algorithm).score_rollout is Algorithm.score_rollout:
            return
        name = f"{type(algorithm).__name__}.score_rollout"
        lent, began = sealed_rollout(rollout, lends_samples=True), time.perf_counter()
        try:
            with trace.span(name):
                await call_bounded(lambda: algorithm.score_rollout(lent), timeout_s=self._limit_s)
            take_samples(rollout, lent, _check_early, allowed=type(algorithm).replaces)
        except (UserCodeError, ValueError) as error:
            rollout.status, rollout.reward = RolloutStatus.ERROR, None
            rollout.error, rollout.traceback = (
                f"task {self.name}: {name}: {error}",
                users_traceback(error),
            )
        finally:
            group.credit_s += time.perf_counter() - began

    async def give_credit(self, group: RolloutGroup) -> str | None:
        """Have the algorithm give credit to a group that was rewarded. Returns the cause where that failed; every rollout has
        failed then."""
        algorithm, kind = self.algorithm, type(self.algorithm)
        if (
            kind.score_group is Algorithm.score_group
            and kind.score_rollout is Algorithm.score_rollout
        ):
            return None  # gives no credit at all: for groups that are scored and not trained on
        given = group if is_own(algorithm) else sealed_group(group, lends_samples=True)
        lent, began = list(given.rollouts), time.perf_counter()

        async def score() -> None:
            algorithm.score_group(given)

        try:
            with trace.span(f"{kind.__name__}.score_group"):
                await call_bounded(score, timeout_s=self._limit_s)
            for rollout, written in zip(group.rollouts, lent, strict=True):
                # The rubric's `error_reward`, and an algorithm whose ``score_rollout`` has not seen a rollout that failed.
                if rollout.status.is_error() and any(
                    missing_credit(sample) for sample in written.samples
                ):
                    rollout.reward = None
                if rollout.reward is not None:
                    take_samples(rollout, written, _check_credit)
        except (UserCodeError, ValueError) as error:
            return _fail(
                group, f"task {self.name}: {kind.__name__}.score_group: {cause_of(error)}", error
            )
        finally:
            group.credit_s += time.perf_counter() - began
        return None


OpenRollout = RendererEnv | AgentRollout
"""What a rollout is run with: has turns, a status and its cause, and is closed."""

RETRIED = (RolloutStatus.ERROR, RolloutStatus.TIMEOUT)


class SharedEnv(UserCodeError):
    """A task gave an env to several rollouts. They are not run again: that would hide a fault of the task."""


@dataclass(kw_only=True)
class GroupRun:
    """One run of the rollouts of a group. A session is opened for each before ``run`` first awaits."""

    task: Task
    group: RolloutGroup
    source: ModelClient
    seed: int
    sampling: SamplingConfig
    credit: bool

    def __post_init__(self) -> None:
        self._sessions: list[CheckedSession] = []
        self._envs: list[OpenRollout] = []
        self._prompts = GroupPrompts()
        self._stop_token_ids = self.task.renderer.get_stop_token_ids()

    async def run(self) -> None:
        """Give every rollout of the group a terminal status, its turns and its samples. Raises nothing but CancelledError."""
        rollouts = self.group.rollouts
        try:
            sessions = [self._open_session(rollout, 0) for rollout in rollouts]
            await yield_queue().wait(Line.NEW_GROUP)
            envs = await self._make_envs(len(rollouts))
            await asyncio.gather(*map(self._run_to_status, rollouts, envs, sessions))
        finally:
            # Rollouts close their own; what is left belongs to rollouts that never began, and to branches.
            for session in self._sessions:
                session.close()
            for env in self._envs:
                await env.close()

    async def _run_to_status(
        self, rollout: Rollout, env: OpenRollout | UserCodeError, session: CheckedSession
    ) -> None:
        with trace.lane("rollout", rollout=rollout.rollout_id):
            for attempt in range(self.task.config.max_retries + 1):
                if attempt:
                    logger.info(
                        "rollout %s: %s; running it again", rollout.rollout_id, rollout.error
                    )
                    session = self._open_session(rollout, attempt)
                    (env,) = await self._make_envs(1)
                if isinstance(env, UserCodeError):
                    status = (
                        RolloutStatus.TIMEOUT
                        if isinstance(env, UserCodeTimeout)
                        else RolloutStatus.ERROR
                    )
                    rollout.turns, rollout.status, rollout.error = [], status, str(env)
                    rollout.traceback = users_traceback(env)
                    session.close()
                else:
                    await self._attempt(rollout, env, session)
                if rollout.status not in RETRIED or isinstance(env, SharedEnv):
                    break
            own = {"task_name": rollout.task_name, "rollout_id": rollout.rollout_id}
            rollout.samples = samples_from_turns(
                rollout.turns, temperature=self.sampling.temperature, **own
            )
            for name, count in (
                rollout.calls | {"samples": len(rollout.samples)} if rollout.calls else {}
            ).items():
                add_cost(f"agent/{rollout.task_name}/{name}", count)
            if self.credit:
                await self.task.credit_rollout(rollout, self.group)

    async def _attempt(self, rollout: Rollout, env: OpenRollout, session: CheckedSession) -> None:
        limit_s = self.task.config.env.rollout_timeout_s
        name = f"{type(self.task).__name__}.run_rollout"
        traceback = ""
        try:
            await call_bounded(
                lambda: self.task.run_rollout(cast(Any, env), session), timeout_s=limit_s
            )
            await env.close()  # its metadata may fail
            status, cause, traceback = env.status, env.error, env.traceback
            if not status.is_terminal():
                status = RolloutStatus.ERROR
                cause = f"{name} returned while the rollout was ongoing; to stop early call env.finish(status)"
        except UserCodeError as error:
            if env.status in RETRIED:  # it had failed before the loop raised, or was late
                status, cause, traceback = env.status, env.error, env.traceback
            elif isinstance(error, UserCodeTimeout):
                waits_in = f"; it waits in {error.where}" if error.where else ""
                waits = ", waiting for the generator" if session.waits else waits_in
                status, cause = (
                    RolloutStatus.TIMEOUT,
                    f"{name}: the rollout took longer than {limit_s:g} s{waits}",
                )
            else:
                status, cause, traceback = (
                    RolloutStatus.ERROR,
                    f"{name}: {error}",
                    users_traceback(error),
                )
        finally:
            await env.close()
            session.close()
        rollout.turns, rollout.status, rollout.error, rollout.traceback = (
            env.turns,
            status,
            cause,
            traceback,
        )
        if isinstance(env, AgentRollout):
            rollout.answer, rollout.calls = env.answer, dict(+env.counts)
        else:
            rollout.metadata = env.metadata

    async def _make_envs(self, n: int) -> list[OpenRollout | UserCodeError]:
        """``n`` envs, or ``n`` times the reason there are none."""
        task, name = self.task, f"{type(self.task).__name__}.make_envs"
        made: list[Any] = []
        envs: list[OpenRollout | UserCodeError] = []

        async def make() -> None:
            given = await task.make_envs(self.group.data_sample, n)
            made.extend(given if isinstance(given, list | tuple) else [given])
            for env in made:
                # An env that several rollouts are given is closed by the first of them.
                if isinstance(env, MessageEnv) and first_use(env):
                    env = RendererEnv(
                        message_env=env,
                        renderer=task.renderer,
                        config=task.config.env,
                        group=self._prompts,
                    )
                if isinstance(env, OpenRollout):
                    self._envs.append(
                        env
                    )  # here, so that envs that come too late, or after a cancellation, are closed too
                    envs.append(env)

        try:
            await call_bounded(make, timeout_s=task.config.env.rollout_timeout_s)
        except UserCodeError as error:
            return [error.of(name)] * n
        if len(envs) == len(made) == n:
            return envs
        kinds = ", ".join(sorted({type(env).__name__ for env in made})) or "nothing"
        if len(made) == n and all(isinstance(env, MessageEnv) for env in made):
            cure = "make a new env for each, because each rollout closes its own"
            return [SharedEnv(f"{name} returned the same {kinds} for several rollouts: {cure}")] * n
        return [
            UserCodeError(f"{name} returned {len(made)} of {kinds}, want a list of {n} MessageEnv")
        ] * n

    def _open_session(self, rollout: Rollout, attempt: int, branch: str = "") -> CheckedSession:
        seed = functools.partial(
            derive_seed, self.seed, rollout.group_id, rollout.index_in_group, attempt
        )
        session = self.source.session(
            rollout_id=f"{rollout.rollout_id}~{attempt}" if attempt else rollout.rollout_id,
            seed=seed(branch),
            sampling=self.sampling,
            stop_token_ids=self._stop_token_ids,  # one list for all: a message then holds it once
        )
        checked = CheckedSession(
            session,
            sampling=self.sampling,
            vocab_size=self.task.vocab_size,
            branch=functools.partial(self._open_session, rollout, attempt),
            branch_seed=seed,
        )
        self._sessions.append(checked)
        return checked


def _fail(group: RolloutGroup, cause: str, error: BaseException) -> str:
    """Take the rewards of the rollouts, and end those that had not failed as ERROR. Returns the cause.

    Args:
        error: what failed.
    """
    traceback = users_traceback(error)
    for rollout in group.rollouts:
        rollout.reward = None
        if not rollout.status.is_error():
            rollout.status, rollout.error, rollout.traceback = RolloutStatus.ERROR, cause, traceback
    return cause


def _checked(rewards: Any, rollouts: list[Rollout]) -> list[tuple[float | None, dict[str, float]]]:
    """Reward and components of each rollout, as a rubric returned them.

    Raises:
        TypeError: not one Reward for each rollout, of finite numbers; names the rollout.
    """
    size = f" of {len(rewards)}" if isinstance(rewards, list | tuple) else ""
    if size != f" of {len(rollouts)}":
        raise TypeError(
            f"returned a {type(rewards).__name__}{size}, want a list of {len(rollouts)} Reward"
        )
    checked = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        of = f"of rollout {rollout.rollout_id}"
        require(isinstance(reward, Reward), f"the reward {of} is", reward, "a Reward")
        number = finite_float(reward.reward)
        fits = reward.reward is None or number is not None
        require(
            fits, f"the reward {of} is", reward.reward, "None or a finite number that float32 holds"
        )
        checked.append((number, checked_rewards(reward.components, f"the components {of}")))
    return checked


def _check_early(sample: TrainingSample) -> None:
    check_streams(sample)
    check_weights(sample)


def _check_credit(sample: TrainingSample) -> None:
    try:
        check_trainable(sample)
    except ValueError as error:
        raise UserCodeError(f"rollout {sample.rollout_id}: {error}") from None
    for name in STREAMS:
        if (values := getattr(sample, name)) is not None:
            values.setflags(write=False)
