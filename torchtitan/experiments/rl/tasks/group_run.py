"""Runs one group's rollouts to their statuses. Whatever user code does, every env and every session is closed exactly once."""

import asyncio
import hashlib
import logging
from typing import Any, Protocol

from renderers import Renderer

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.envs.group_prompts import GroupPrompts
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.policy import ModelClient, PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.samples import samples_from_turns
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.rollouts.yield_queue import Line, yield_queue
from torchtitan.experiments.rl.tasks.checked_session import CheckedSession
from torchtitan.experiments.rl.tasks.group_score import score_rollout
from torchtitan.experiments.rl.tasks.used_envs import first_use
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, call_bounded

logger = logging.getLogger(__name__)

RETRIED = (RolloutStatus.ERROR, RolloutStatus.TIMEOUT)


class SharedEnv(UserCodeError):
    """A task gave an env to several rollouts. They are not run again: that would hide a fault of the task."""


def derive_seed(seed: int, group_id: str, index_in_group: int, attempt: int) -> int:
    """Seed of one attempt at one rollout: 63 bits, the same in every process (``hash`` of a string is not)."""
    key = f"{seed}/{group_id}/{index_in_group}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class RolloutTask(Protocol):
    """What a group's run needs of its task: `tasks/task.py` describes each member."""

    algorithm: Algorithm
    config: Any
    renderer: Renderer
    vocab_size: int | None

    async def make_envs(self, sample: DataSample, n: int) -> list[MessageEnv]: ...

    async def run_rollout(self, env: RendererEnv, policy: PolicySession) -> None: ...


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
        self._envs: list[RendererEnv] = []
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

    async def _traced(self, rollout: Rollout, env: RendererEnv | UserCodeError, session: PolicySession) -> None:
        with trace.lane("rollout", rollout=rollout.rollout_id):
            await self._run_to_status(rollout, env, session)

    async def _run_to_status(self, rollout: Rollout, env: RendererEnv | UserCodeError, session: PolicySession) -> None:
        for attempt in range(self._task.config.max_retries + 1):
            if attempt:
                logger.info("rollout %s: %s; running it again", rollout.rollout_id, rollout.error)
                session = self._open_session(rollout, attempt=attempt)
                (env,) = await self._make_envs(1)
            await self._attempt(rollout, env, session)
            if rollout.status not in RETRIED or isinstance(env, SharedEnv):
                break
        rollout.samples = samples_from_turns(
            rollout.turns,
            task_name=rollout.task_name,
            rollout_id=rollout.rollout_id,
            temperature=self._sampling.temperature,
        )
        if self._credit:
            limit_s = self._task.config.env.rollout_timeout_s
            await score_rollout(self._task.algorithm, rollout, self._group, timeout_s=limit_s)

    async def _attempt(self, rollout: Rollout, env: RendererEnv | UserCodeError, session: PolicySession) -> None:
        limit_s = self._task.config.env.rollout_timeout_s
        name = f"{type(self._task).__name__}.run_rollout"
        checked = CheckedSession(session, vocab_size=self._task.vocab_size)
        try:
            if isinstance(env, UserCodeError):
                raise env
            await call_bounded(lambda: self._task.run_rollout(env, checked), timeout_s=limit_s)
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
            if isinstance(env, RendererEnv) and env.status in RETRIED:
                rollout.status, rollout.error = env.status, env.error
        finally:
            self._close_session(session)
            if isinstance(env, RendererEnv):
                await env.close()
        rollout.turns = env.turns if isinstance(env, RendererEnv) else []

    async def _make_envs(self, n: int) -> list[RendererEnv | UserCodeError]:
        """``n`` envs, or ``n`` times the reason there are none."""
        task, name = self._task, f"{type(self._task).__name__}.make_envs"

        async def make() -> tuple[list[RendererEnv], list, int]:
            made = await task.make_envs(self._group.data_sample, n)
            made = list(made) if isinstance(made, list | tuple) else [made]
            envs = []
            for env in made:
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

    def _open_session(self, rollout: Rollout, *, attempt: int) -> PolicySession:
        session = self._source.session(
            rollout_id=f"{rollout.rollout_id}~{attempt}" if attempt else rollout.rollout_id,
            seed=derive_seed(self._seed, rollout.group_id, rollout.index_in_group, attempt),
            sampling=self._sampling,
            stop_token_ids=self._stop_token_ids,  # one list for all: a message then holds it once
        )
        self._open_sessions.append(session)
        return session

    def _close_session(self, session: PolicySession) -> None:
        if any(session is known for known in self._open_sessions):
            self._open_sessions = [known for known in self._open_sessions if known is not session]
            session.close()
