"""Runs the rollouts of one group, each to a terminal status.

_open_session    a session with the model for each rollout, all of them first
_make_envs       the task's envs, in one call
_attempt         task.run_rollout, within its time limit; again if it failed (`max_retries`)
_make_samples    training samples of the last attempt's turns
credit_rollout   Algorithm.score_rollout, by the task
"""

import asyncio
import functools
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from renderers import Renderer

from torchtitan.experiments.rl.ask.call import ask, is_cancelled, sentence
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.prompt import GroupPrompts
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv
from torchtitan.experiments.rl.envs.stop_tokens import with_stop_texts
from torchtitan.experiments.rl.envs.yield_queue import Priority, yield_queue
from torchtitan.experiments.rl.errors import (
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    users_traceback,
)
from torchtitan.experiments.rl.gateway.rollout import AgentRollout
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.costs import add_cost
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import checked_completion, samples_from_turns
from torchtitan.experiments.rl.rollouts.types import (
    Completion,
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)

logger = logging.getLogger(__name__)

OpenRollout = RendererEnv | AgentRollout
"""Env or agent that runs a rollout: it has turns, a status and its cause, and is closed."""

RETRIED = (RolloutStatus.ERROR, RolloutStatus.TIMEOUT)
"""Statuses after which a rollout is run again."""


def several_prompts(task_name: str) -> str:
    """Return the name of the cost that counts groups whose rollouts began differently."""
    return f"rollout/{task_name}/groups_of_several_prompts"


def prompts_cure(task_name: str) -> str:
    """Return what to do about a task whose envs begin one example with different prompts."""
    return (
        "draw in the dataset, or from a seed in the row, and not in the env; if they may differ, "
        f"set tasks.{task_name}.prompts_may_differ = True"
    )


def derive_seed(
    seed: int, group_id: str, index_in_group: int, attempt: int, branch: str = ""
) -> int:
    """Return the seed of one attempt at one rollout, or of a branch of it.

    It has 63 bits, and is equal in every process, which the ``hash`` of a string is not.
    """
    key = f"{seed}/{group_id}/{index_in_group}/{attempt}"
    if branch:
        key = f"{key}/{branch}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class SharedEnv(UserCodeError):
    """A task gave an env to several rollouts.

    The rollouts are not run again: that would hide a fault of the task.
    """


_OWNER = "_used_by_rollout"
"""Attribute that an env carries once a rollout has it."""


def claim(env: MessageEnv) -> bool:
    """Mark the env as used by a rollout, and return True if none had it before.

    Returns False if one had: any rollout of any group of this process.
    """
    owner = vars(env).get(_OWNER)
    vars(env)[_OWNER] = id(env)  # the id, because a copy of a used env is another env
    return owner != id(env)


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
        if self._closed:
            raise UserCodeError("the rollout has ended: its session samples nothing more")
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


class TaskOfRollouts(Protocol):
    """Part of a task (`tasks.task.Task`) that the run of a group uses."""

    config: Any
    """A `Task.Config`."""
    renderer: Renderer
    vocab_size: int

    async def make_envs(self, sample: DataSample, n: int) -> list[MessageEnv]: ...

    async def run_rollout(self, env: RendererEnv, policy: PolicySession) -> None: ...

    async def credit_rollout(self, rollout: Rollout, group: RolloutGroup) -> None: ...


@dataclass(kw_only=True)
class GroupRun:
    """One run of the rollouts of a group.

    A session is opened for each rollout before ``run`` first awaits: the deterministic mode depends
    on the order in which sessions are opened.
    """

    task: TaskOfRollouts
    group: RolloutGroup
    source: ModelClient
    """Model that the rollouts are sampled from."""
    seed: int
    sampling: SamplingConfig
    credit: bool
    """True if ``Algorithm.score_rollout`` is called for each rollout that ends well, as it ends."""

    def __post_init__(self) -> None:
        self._sessions: list[CheckedSession] = []
        self._envs: list[OpenRollout] = []
        self._is_over = False
        """True once all envs have been closed: those that are made later close themselves."""
        self._prompts = GroupPrompts()
        self._stop_token_ids = self.task.renderer.get_stop_token_ids()
        self.sampling = with_stop_texts(self.sampling, self.task.renderer)

    async def run(self) -> None:
        """Give every rollout of the group a terminal status, its turns and its samples.

        Every env and every session is closed exactly once. Nothing but CancelledError is raised.
        """
        rollouts = self.group.rollouts
        try:
            sessions = [self._open_session(rollout, attempt=0) for rollout in rollouts]
            # Rollouts that are ready to render their first prompt go before a group that begins.
            await yield_queue().wait(Priority.NEW_GROUP)
            envs = await self._make_envs(len(rollouts))
            runs = map(self._run_to_status, rollouts, envs, sessions)
            # A gather that returns errors waits for all of them, also if it is cancelled: no env
            # is closed while another's code still unwinds.
            for error in await asyncio.gather(*runs, return_exceptions=True):
                if error is not None:
                    raise error
            self._count_first_prompts()
        finally:
            self._is_over = True
            # Rollouts close their own. The others belong to rollouts that never began, or are
            # branches of an agent's conversation.
            for session in self._sessions:
                session.close()
            await asyncio.gather(*(env.close() for env in self._envs))

    async def _run_to_status(
        self, rollout: Rollout, env: OpenRollout | UserCodeError, session: CheckedSession
    ) -> None:
        with trace.lane("rollout", rollout=rollout.rollout_id):
            await self._attempt(rollout, env, session)
            for attempt in range(1, self.task.config.max_retries + 1):
                if rollout.status not in RETRIED or isinstance(env, SharedEnv):
                    break
                logger.info("rollout %s: %s; running it again", rollout.rollout_id, rollout.error)
                session = self._open_session(rollout, attempt)
                (env,) = await self._make_envs(1)
                await self._attempt(rollout, env, session)
            self._make_samples(rollout)
            self._count_calls(rollout)
            if self.credit:
                await self.task.credit_rollout(rollout, self.group)

    def _count_first_prompts(self) -> None:
        """Note a group whose envs began with different prompts, if the task does not allow it.

        Agents write their own prompts, in which a folder or a date may differ.
        """
        if self.task.config.prompts_may_differ or any(
            isinstance(env, AgentRollout) for env in self._envs
        ):
            return
        first_turns = [rollout.turns[0] for rollout in self.group.rollouts if rollout.turns]
        prompts = [turn.prompt_token_ids for turn in first_turns]
        if any(not np.array_equal(prompt, prompts[0]) for prompt in prompts[1:]):
            add_cost(several_prompts(self.group.task_name), 1)

    def _make_samples(self, rollout: Rollout) -> None:
        """Make the training samples of a rollout; fail it if its completions don't fit together."""
        try:
            rollout.samples = samples_from_turns(
                rollout.turns,
                task_name=rollout.task_name,
                rollout_id=rollout.rollout_id,
                temperature=self.sampling.temperature,
                adapter=self.task.config.adapter,
            )
        except ValueError as error:
            rollout.fail(f"generator: {error}")

    def _count_calls(self, rollout: Rollout) -> None:
        """Add the calls of an agent's last attempt, by their outcome, to the costs of the group."""
        if not rollout.calls:
            return
        counts = rollout.calls | {"samples": len(rollout.samples)}
        for name, count in counts.items():
            add_cost(f"agent/{rollout.task_name}/{name}", count)

    async def _attempt(
        self, rollout: Rollout, env: OpenRollout | UserCodeError, session: CheckedSession
    ) -> None:
        """Run the turn loop in the env, and give the rollout its turns and its status.

        Args:
            env: error in place of the env if none could be made.
        """
        if isinstance(env, UserCodeError):
            session.close()
            self._fail_without_env(rollout, env)
            return
        failure: UserCodeError | None = None
        had_failed = False
        try:
            await ask(
                self._turn_loop,
                env,
                session,
                timeout_s=self.task.config.env.rollout_timeout_s,
            )
        except UserCodeError as error:
            failure = error
            # Then the env has its own cause of the failure.
            had_failed = env.status in RETRIED
            if error.was_abandoned:
                # The code still runs: it must find that its rollout is over.
                env.finish(RolloutStatus.TIMEOUT, str(error))
                if error.is_inner:
                    had_failed = env.status in RETRIED
        finally:
            await env.close()  # its metadata may fail, and set its status
            session.close()
        rollout.turns = list(env.turns)
        rollout.status = env.status
        rollout.error = env.error
        rollout.traceback = env.traceback
        if isinstance(env, AgentRollout):
            rollout.answer = env.answer
            rollout.calls = dict(+env.counts)
            rollout.refusals = dict(env.refusals)
        else:
            rollout.metadata = env.metadata
            for name in ("special_texts", "cut_answers"):
                if count := getattr(env, name):
                    add_cost(f"rollout/{rollout.task_name}/{name}", count)
        if failure is not None and not had_failed:
            self._set_failure(rollout, failure, session)
        elif failure is None and not env.status.is_terminal():
            rollout.status = RolloutStatus.ERROR
            rollout.error = (
                f"{self._loop_name} returned while the rollout was ongoing; to stop early call "
                "env.finish(status)"
            )

    def _fail_without_env(self, rollout: Rollout, cause: UserCodeError) -> None:
        """Fail a rollout that has no env, without anything that an earlier attempt gave it."""
        rollout.turns = []
        rollout.metadata = {}
        rollout.answer = None
        rollout.calls = {}
        rollout.refusals = {}
        timed_out = isinstance(cause, UserCodeTimeout)
        rollout.status = RolloutStatus.TIMEOUT if timed_out else RolloutStatus.ERROR
        rollout.error = sentence(cause)
        rollout.traceback = users_traceback(cause)

    async def _turn_loop(self, env: OpenRollout, session: CheckedSession) -> None:
        await self.task.run_rollout(cast(Any, env), session)

    @property
    def _loop_name(self) -> str:
        return f"{type(self.task).__name__}.run_rollout"

    def _set_failure(
        self, rollout: Rollout, failure: UserCodeError, session: CheckedSession
    ) -> None:
        """End a rollout whose turn loop raised, made a call that was late, or was late itself."""
        is_late = isinstance(failure, UserCodeTimeout)
        if failure.is_inner or not is_late:
            rollout.status = RolloutStatus.TIMEOUT if is_late else RolloutStatus.ERROR
            cause = sentence(failure) if is_late else str(failure)
            rollout.error = f"{self._loop_name}: {cause}"
            rollout.traceback = users_traceback(failure)
            return
        limit_s = self.task.config.env.rollout_timeout_s
        waits_for = ""
        if session.unanswered:
            waits_for = ", waiting for the generator"
        elif failure.where:
            waits_for = f"; it waits in {failure.where}"
        rollout.status = RolloutStatus.TIMEOUT
        rollout.error = f"{self._loop_name}: the rollout took longer than {limit_s:g} s{waits_for}"
        rollout.traceback = ""

    async def _make_envs(self, n: int) -> list[OpenRollout | UserCodeError]:
        """Return ``n`` envs, or ``n`` times the reason why there are none."""
        made: list[Any] = []
        envs: list[OpenRollout | UserCodeError] = []

        async def make() -> None:
            answer = await self.task.make_envs(self.group.data_sample, n)
            made.extend(answer if isinstance(answer, list | tuple) else [answer])
            for entry in made:
                # An env that several rollouts are given is closed by the first of them.
                is_new = isinstance(entry, MessageEnv) and claim(entry)
                env = self._renderer_env(entry) if is_new else entry
                if isinstance(env, OpenRollout):
                    # Here, so that envs that come too late, or after a cancellation, are closed.
                    self._envs.append(env)
                    envs.append(env)
            if self._is_over:
                await asyncio.gather(*(env.close() for env in self._envs))

        try:
            await ask(make, timeout_s=self.task.config.env.rollout_timeout_s)
        except UserCodeError as error:
            return [error.of(self._name_of_make_envs)] * n
        if len(envs) == len(made) == n:
            return envs
        return [self._fault_of_envs(made, n)] * n

    @property
    def _name_of_make_envs(self) -> str:
        return f"{type(self.task).__name__}.make_envs"

    def _fault_of_envs(self, made: list[Any], n: int) -> UserCodeError:
        """Return what is wrong with the value of ``make_envs``, which is not ``n`` new envs."""
        name = self._name_of_make_envs
        kinds = ", ".join(sorted({type(env).__name__ for env in made})) or "nothing"
        if len(made) != n or not all(isinstance(env, MessageEnv) for env in made):
            return UserCodeError(
                f"{name} returned {len(made)} of {kinds}, want a list of {n} MessageEnv"
            )
        if len({id(env) for env in made}) < n:
            return SharedEnv(
                f"{name} returned the same {kinds} for several rollouts: make a new env for each, "
                "because each rollout closes its own"
            )
        return SharedEnv(
            f"{name} returned a {kinds} that another rollout has had: make a new env for each, and "
            "keep what takes long to build in a pool, to which its close returns it"
        )

    def _renderer_env(self, env: MessageEnv) -> RendererEnv:
        return RendererEnv(
            message_env=env,
            renderer=self.task.renderer,
            config=self.task.config.env,
            group=self._prompts,
        )

    def _open_session(self, rollout: Rollout, attempt: int, branch: str = "") -> CheckedSession:
        """Open a session for an attempt at a rollout, or for a branch of its conversation."""
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
