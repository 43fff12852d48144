"""One group of a task: runs its rollouts to their statuses, then gives them rewards and credit.

Whatever user code does, every env and every session is closed exactly once, and what it returns is checked.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from renderers import Renderer

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.batching.sample_checks import check_weights, missing_credit
from torchtitan.experiments.rl.envs.conversation import GroupPrompts, Line, yield_queue
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.messages import checked_rewards
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv
from torchtitan.experiments.rl.gateway.session import AgentRollout
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import check_completion, samples_from_turns
from torchtitan.experiments.rl.rollouts.sealed import copied_example, is_own, sealed_group, sealed_rollout, take_samples
from torchtitan.experiments.rl.rollouts.streams import check_streams, check_trainable, finite_float
from torchtitan.experiments.rl.rollouts.types import Completion, DataSample, Rollout, RolloutGroup, RolloutStatus, add_cost
from torchtitan.experiments.rl.rubrics.rubric import Reward, Rubric
from torchtitan.experiments.rl.types import STREAMS, TrainingSample
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, call_bounded, cause_of

logger = logging.getLogger(__name__)


class CheckedSession:
    """Implements rollouts.policy.PolicySession. An engine may be the user's own."""

    def __init__(
        self,
        session: PolicySession,
        *,
        vocab_size: int | None = None,
        branch: Callable[[str], PolicySession] | None = None,
    ):
        """
        Args:
            vocab_size: ids that the model has; None: not known.
            branch: opens another session of the same rollout.
        """
        self._session, self._vocab_size, self._branch = session, vocab_size, branch
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

    def branch(self, key: str) -> "CheckedSession":
        """Another session of this rollout, for a chain of its own. Its seed follows from the rollout's and the key."""
        assert self._branch is not None, "the group's run says how to open one"
        return CheckedSession(self._branch(key), vocab_size=self._vocab_size)

    def close(self) -> None:
        """See PolicySession.close."""
        self._session.close()


USED = "_used_by_rollout"
"""What an env that a rollout had carries."""


def first_use(env: MessageEnv) -> bool:
    """Note that a rollout has the env. False: another had it before, in any group of this process."""
    seen, vars(env)[USED] = vars(env).get(USED), id(env)  # the id: a copy of a used env is another
    return seen != id(env)


OpenRollout = RendererEnv | AgentRollout
"""What a rollout is run with: has turns, a status and its cause, and is closed."""

RETRIED = (RolloutStatus.ERROR, RolloutStatus.TIMEOUT)


class SharedEnv(UserCodeError):
    """A task gave an env to several rollouts. They are not run again: that would hide a fault of the task."""


def derive_seed(seed: int, group_id: str, index_in_group: int, attempt: int, branch: str = "") -> int:
    """Seed of one attempt at one rollout, or a branch of it: 63 bits, equal in every process (``hash`` of a string is not)."""
    key = f"{seed}/{group_id}/{index_in_group}/{attempt}{branch and '/'}{branch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class RolloutTask(Protocol):
    """What a group's run needs of its task: `tasks/task.py` describes each member."""

    algorithm: Algorithm
    config: Any
    renderer: Renderer
    vocab_size: int | None

    async def make_envs(self, sample: DataSample, n: int) -> Any: ...

    async def run_rollout(self, env: Any, policy: Any) -> None: ...


class GroupRun:
    """One run of the rollouts of a group. Construction opens a session for each; ``run`` does the rest."""

    def __init__(
        self, task: RolloutTask, group: RolloutGroup, source: ModelClient, *, seed: int, sampling: SamplingConfig, credit: bool
    ):
        self._task = task
        self._group = group
        self._source = source
        self._seed = seed
        self._sampling = sampling
        self._credit = credit
        self._open_sessions: list[PolicySession] = []
        self._envs: list[OpenRollout] = []
        self._prompts = GroupPrompts()
        self._stop_token_ids = task.renderer.get_stop_token_ids()
        self._first_sessions = [self._open_session(rollout, attempt=0) for rollout in group.rollouts]

    async def run(self) -> None:
        """Give every rollout of the group a terminal status, its turns and its samples. Raises nothing but CancelledError."""
        try:
            await yield_queue().wait(Line.NEW_GROUP)
            envs = await self._make_envs(len(self._group.rollouts))
            triples = zip(self._group.rollouts, envs, self._first_sessions, strict=True)
            await asyncio.gather(*(self._traced(*triple) for triple in triples))
        finally:
            # Rollouts close their own; what is left belongs to rollouts that never began.
            for session in list(self._open_sessions):
                self._close_session(session)
            for env in self._envs:
                await env.close()

    async def _traced(self, rollout: Rollout, env: OpenRollout | UserCodeError, session: PolicySession) -> None:
        with trace.lane("rollout", rollout=rollout.rollout_id):
            await self._run_to_status(rollout, env, session)

    async def _run_to_status(self, rollout: Rollout, env: OpenRollout | UserCodeError, session: PolicySession) -> None:
        for attempt in range(self._task.config.max_retries + 1):
            if attempt:
                logger.info("rollout %s: %s; running it again", rollout.rollout_id, rollout.error)
                session = self._open_session(rollout, attempt=attempt)
                (env,) = await self._make_envs(1)
            await self._attempt(rollout, env, session, attempt)
            if rollout.status not in RETRIED or isinstance(env, SharedEnv):
                break
        rollout.samples = samples_from_turns(
            rollout.turns,
            task_name=rollout.task_name,
            rollout_id=rollout.rollout_id,
            temperature=self._sampling.temperature,
        )
        for name, count in (rollout.calls | {"samples": len(rollout.samples)} if rollout.calls else {}).items():
            add_cost(f"agent/{rollout.task_name}/{name}", count)
        if self._credit:
            limit_s = self._task.config.env.rollout_timeout_s
            await score_rollout(self._task.algorithm, rollout, self._group, timeout_s=limit_s)

    async def _attempt(self, rollout: Rollout, env: OpenRollout | UserCodeError, session: PolicySession, attempt: int) -> None:
        limit_s = self._task.config.env.rollout_timeout_s
        name = f"{type(self._task).__name__}.run_rollout"
        branches: list[PolicySession] = []

        def branch(key: str) -> PolicySession:
            branches.append(self._open_session(rollout, attempt=attempt, branch=key))
            return branches[-1]

        checked = CheckedSession(session, vocab_size=self._task.vocab_size, branch=branch)
        try:
            if isinstance(env, UserCodeError):
                raise env
            await call_bounded(lambda: self._task.run_rollout(env, checked), timeout_s=limit_s)
            await env.close()  # its metadata may fail
            rollout.status, rollout.error = env.status, env.error
            if not rollout.status.is_terminal():
                rollout.status = RolloutStatus.ERROR
                rollout.error = f"{name} returned while the rollout was ongoing; to stop early call env.finish(status)"
        except UserCodeError as error:
            rollout.status, cause = RolloutStatus.ERROR, str(error)
            if isinstance(error, UserCodeTimeout):
                waits_in = "" if not error.where else f"; it waits in {error.where}"
                waits = ", waiting for the generator" if checked.waits else waits_in
                rollout.status, cause = RolloutStatus.TIMEOUT, f"the rollout took longer than {limit_s:g} s{waits}"
            rollout.error = str(error) if error is env else f"{name}: {cause}"
            # An env that had failed before the loop raised, or was late, is the cause.
            if isinstance(env, OpenRollout) and env.status in RETRIED:
                rollout.status, rollout.error = env.status, env.error
        finally:
            if isinstance(env, OpenRollout):
                await env.close()
                if isinstance(env, RendererEnv):
                    rollout.metadata = env.metadata
            for opened in (session, *branches):
                self._close_session(opened)
        rollout.turns = env.turns if isinstance(env, OpenRollout) else []
        if isinstance(env, AgentRollout):
            rollout.answer, rollout.calls = env.answer, dict(+env.counts)

    async def _make_envs(self, n: int) -> list[OpenRollout | UserCodeError]:
        """``n`` envs, or ``n`` times the reason there are none."""
        task, name = self._task, f"{type(self._task).__name__}.make_envs"

        async def make() -> tuple[list[OpenRollout], list, int]:
            made = await task.make_envs(self._group.data_sample, n)
            made = list(made) if isinstance(made, list | tuple) else [made]
            envs: list[OpenRollout] = []
            for env in made:
                if isinstance(env, AgentRollout):
                    envs.append(env)
                # An env that several rollouts are given is closed by the first of them.
                if isinstance(env, MessageEnv) and first_use(env):
                    envs.append(
                        RendererEnv(message_env=env, renderer=task.renderer, config=task.config.env, group=self._prompts)
                    )
            self._envs += envs  # here, so that envs that come too late, or after a cancellation, are closed too
            return envs, made, sum(isinstance(env, MessageEnv) for env in made)

        try:
            envs, made, message_envs = await call_bounded(make, timeout_s=task.config.env.rollout_timeout_s)
        except UserCodeError as error:
            return [type(error)(f"{name}: {error}")] * n
        if len(envs) == len(made) == n:
            return list(envs)
        if message_envs == len(made) == n:
            kind = ", ".join(sorted({type(env).__name__ for env in made}))
            cause = (
                f"returned the same {kind} for several rollouts: make a new env for each, because each rollout closes its own"
            )
            return [SharedEnv(f"{name} {cause}")] * n
        kinds = ", ".join(sorted({type(env).__name__ for env in made})) or "nothing"
        return [UserCodeError(f"{name} returned {len(made)} of {kinds}, want a list of {n} MessageEnv")] * n

    def _open_session(self, rollout: Rollout, *, attempt: int, branch: str = "") -> PolicySession:
        session = self._source.session(
            rollout_id=f"{rollout.rollout_id}~{attempt}" if attempt else rollout.rollout_id,
            seed=derive_seed(self._seed, rollout.group_id, rollout.index_in_group, attempt, branch),
            sampling=self._sampling,
            stop_token_ids=self._stop_token_ids,  # one list for all: a message then holds it once
        )
        self._open_sessions.append(session)
        return session

    def _close_session(self, session: PolicySession) -> None:
        if any(session is known for known in self._open_sessions):
            self._open_sessions = [known for known in self._open_sessions if known is not session]
            session.close()


async def score_rewards(rubric: Rubric, group: RolloutGroup, *, timeout_s: float) -> None:
    """Have the rubric give each rollout its reward and components. A rubric that fails fails every rollout of the group.

    Args:
        timeout_s: limit of a rubric that scores in its own way.
    """
    name = f"{type(rubric).__name__}.score_group"
    given, env_input, limit_s = group.rollouts, group.data_sample.env_input, None
    own = type(rubric).score_group is not Rubric.score_group
    if own:  # Rubric limits each of its functions
        given, env_input, limit_s = [sealed_rollout(r, for_rubric=True) for r in given], copied_example(env_input), timeout_s
    try:
        with trace.span(name):
            rewards = await call_bounded(lambda: rubric.score_group(list(given), env_input), timeout_s=limit_s)
        checked = _checked(rewards, group.rollouts)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # what a rubric returned may be of its own classes
        return fail(group.rollouts, f"{name}: {cause_of(error)}")
    for rollout, seen, (reward, components) in zip(group.rollouts, given, checked, strict=True):
        rollout.reward, rollout.reward_components = reward, components
        if own and seen.status is not rollout.status:
            # The status that is recorded has to agree with training: a rubric may fail a rollout, and nothing else.
            rollout.status, rollout.error, rollout.reward = RolloutStatus.ERROR, seen.error, None
            if not (isinstance(seen.status, RolloutStatus) and seen.status.is_error()):
                rollout.error = f"{name} set the status of a rollout that has ended to {shown(seen.status)}"


async def score_rollout(algorithm: Algorithm, rollout: Rollout, group: RolloutGroup, *, timeout_s: float) -> None:
    """Have the algorithm's ``score_rollout`` see a rollout that has ended well. What fails there fails the rollout.

    Args:
        group: of the rollout; the time is counted there.
    """
    if rollout.status.is_error() or type(algorithm).score_rollout is Algorithm.score_rollout:
        return
    name = f"{type(algorithm).__name__}.score_rollout"
    lent, began = sealed_rollout(rollout, lends_samples=True), time.perf_counter()
    try:
        with trace.span(name):
            await call_bounded(lambda: algorithm.score_rollout(lent), timeout_s=timeout_s)
        take_samples(rollout, lent, _check_early, allowed=type(algorithm).replaces)
    except (UserCodeError, ValueError) as error:
        rollout.status, rollout.reward = RolloutStatus.ERROR, None
        rollout.error = f"task {rollout.task_name}: {name}: {error}"
    finally:
        group.credit_s += time.perf_counter() - began


async def give_credit(algorithm: Algorithm, group: RolloutGroup, *, timeout_s: float) -> str | None:
    """Have the algorithm give credit to a group that was rewarded. Returns the cause where that failed; every rollout has
    failed then.

    Args:
        timeout_s: limit of the algorithm, which the event loop waits for.
    """
    kind = type(algorithm)
    if kind.score_group is Algorithm.score_group and kind.score_rollout is Algorithm.score_rollout:
        return None  # gives no credit at all: for groups that are scored and not trained on
    given = group if is_own(algorithm) else sealed_group(group, lends_samples=True)
    lent, began = list(given.rollouts), time.perf_counter()

    async def score() -> None:
        algorithm.score_group(given)

    try:
        with trace.span(f"{kind.__name__}.score_group"):
            await call_bounded(score, timeout_s=timeout_s)
        for rollout, written in zip(group.rollouts, lent, strict=True):
            # The rubric's `error_reward`, and an algorithm whose ``score_rollout`` has not seen a rollout that failed.
            if rollout.status.is_error() and any(missing_credit(sample) for sample in written.samples):
                rollout.reward = None
            if rollout.reward is not None:
                take_samples(rollout, written, _check_credit)
    except (UserCodeError, ValueError) as error:
        cause = f"task {group.task_name}: {kind.__name__}.score_group: {cause_of(error)}"
        fail(group.rollouts, cause)
        return cause
    finally:
        group.credit_s += time.perf_counter() - began
    return None


def fail(rollouts: Sequence[Rollout], cause: str) -> None:
    """Take the rewards of rollouts, and end those that had not failed as ERROR."""
    for rollout in rollouts:
        rollout.reward = None
        if not rollout.status.is_error():
            rollout.status, rollout.error = RolloutStatus.ERROR, cause


def _checked(rewards: Any, rollouts: Sequence[Rollout]) -> list[tuple[float | None, dict[str, float]]]:
    """Reward and components of each rollout, as a rubric returned them.

    Raises:
        TypeError, ValueError: not one Reward for each rollout, of finite numbers; names the rollout.
    """
    if not isinstance(rewards, list | tuple) or len(rewards) != len(rollouts):
        size = f" of {len(rewards)}" if isinstance(rewards, list | tuple) else ""
        raise TypeError(f"returned a {type(rewards).__name__}{size}, want a list of {len(rollouts)} Reward")
    checked = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        of = f"of rollout {rollout.rollout_id}"
        if not isinstance(reward, Reward):
            raise TypeError(f"the reward {of} is a {type(reward).__name__}, want a Reward")
        value = reward.reward
        number = finite_float(value)
        if value is not None and number is None:
            raise ValueError(f"the reward {of} is {shown(value)}, want None or a finite number that float32 holds")
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
