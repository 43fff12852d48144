"""Gives the rollouts of a group their rewards, then their credit; checks what the rubric and the algorithm made of them."""

import asyncio
import functools
import time
from collections.abc import Sequence
from typing import Any

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.batching.sample_checks import check_weights, missing_credit
from torchtitan.experiments.rl.envs.messages import checked_rewards
from torchtitan.experiments.rl.printable import shown
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.finished import FinishedGroup, FinishedRollout, make_read_only
from torchtitan.experiments.rl.rollouts.streams import check_streams, check_trainable, drop_unfit_credit, finite_float
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, Rubric
from torchtitan.experiments.rl.types import CREDIT_STREAMS
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded, call_plain, cause_of

LIBRARY = Algorithm.__module__.rpartition(".")[0]
"""Package of the library's own algorithms."""


async def score_rewards(rubric: Rubric, group: RolloutGroup, *, timeout_s: float) -> None:
    """Have the rubric give each rollout its reward and components. A rubric that fails fails every rollout of the group.

    Args:
        timeout_s: limit of a rubric that scores in its own way.
    """
    name = f"{type(rubric).__name__}.score_group"
    own = type(rubric).score_group is not Rubric.score_group
    # Rubric limits and watches each of its functions.
    finished = FinishedGroup(group) if own else None
    env_input = group.data_sample.env_input
    try:
        with trace.span(name):
            rewards = await call_bounded(
                lambda: rubric.score_group(list(group.rollouts), env_input), timeout_s=timeout_s if own else None
            )
        if finished is not None and (change := finished.change(allowed=("status", "error"))):
            raise UserCodeError(f"changed {change}")
        checked = _checked(rewards, group.rollouts)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # what a rubric returned may be of its own classes
        if finished is not None:
            finished.restore()
        return fail(group.rollouts, f"{name}: {cause_of(error)}")
    statuses = finished.statuses if finished is not None else [rollout.status for rollout in group.rollouts]
    for rollout, status, (reward, components) in zip(group.rollouts, statuses, checked, strict=True):
        rollout.reward, rollout.reward_components = reward, components
        if rollout.status is status:
            if finished is not None:  # an error belongs to a status that says so
                rollout.error = finished.errors[rollout.index_in_group]
            continue
        # The status that is recorded has to agree with training: a rubric may fail a rollout, and nothing else.
        given, rollout.status, rollout.reward = rollout.status, RolloutStatus.ERROR, None
        if not (isinstance(given, RolloutStatus) and given.is_error()):
            rollout.error = f"{name} set the status of a rollout that has ended to {shown(given)}"


async def score_rollout(algorithm: Algorithm, rollout: Rollout, group: RolloutGroup, *, timeout_s: float) -> None:
    """Have the algorithm's ``score_rollout`` see a rollout that has ended well. What fails there fails the rollout.

    Args:
        group: of the rollout; the time is counted there.
    """
    if rollout.status.is_error() or type(algorithm).score_rollout is Algorithm.score_rollout:
        return
    name = f"{type(algorithm).__name__}.score_rollout"
    finished, began = FinishedRollout(rollout), time.perf_counter()
    try:
        with trace.span(name):
            await call_bounded(lambda: algorithm.score_rollout(rollout), timeout_s=timeout_s)
        if change := finished.change(allowed=type(algorithm).replaces):
            raise ValueError(f"changed {change} of a rollout that has ended")
        for sample in rollout.samples:
            check_streams(sample)
            check_weights(sample)
    except (UserCodeError, ValueError) as error:
        finished.restore()
        for sample in rollout.samples:
            drop_unfit_credit(sample)
        rollout.status, rollout.reward = RolloutStatus.ERROR, None
        rollout.error = f"task {rollout.task_name}: {name}: {error}"
    finally:
        group.credit_s += time.perf_counter() - began


def give_credit(algorithm: Algorithm, group: RolloutGroup, *, timeout_s: float) -> str | None:
    """Have the algorithm give credit to a group that was rewarded. Returns the cause where that failed; every rollout has
    failed then.

    Args:
        timeout_s: limit of the algorithm, which the event loop waits for.
    """
    kind = type(algorithm)
    if kind.score_group is Algorithm.score_group and kind.score_rollout is Algorithm.score_rollout:
        return None  # gives no credit at all: for groups that are scored and not trained on
    # The library's own algorithms change nothing: remembering a rollout for them would cost 5 % of its path.
    finished = None if kind.__module__.startswith(f"{LIBRARY}.") else FinishedGroup(group)
    began = time.perf_counter()
    try:
        with trace.span(f"{kind.__name__}.score_group"):
            call_plain(functools.partial(algorithm.score_group, group), timeout_s=timeout_s)
        if finished is not None and (change := finished.change()):
            raise UserCodeError(f"changed {change}")
        for rollout in group.scored:
            _check_credit(rollout)
    except BaseException as error:  # it awaits nothing: whatever it raised is its own
        cause = f"task {group.task_name}: {kind.__name__}.score_group: {cause_of(error)}"
        if finished is not None:
            finished.restore()
        for sample in (sample for rollout in group.rollouts for sample in rollout.samples):
            drop_unfit_credit(sample)
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


def _check_credit(rollout: Rollout) -> None:
    """Refuse credit that can't be trained on. A failed rollout that has a reward and no credit loses its reward.

    Such a rollout has the rubric's `error_reward`, and an algorithm that gives credit in ``score_rollout``, which is called
    for rollouts that ended well.

    Raises:
        UserCodeError: names the rollout and the stream.
    """
    if rollout.status.is_error() and any(missing_credit(sample) for sample in rollout.samples):
        rollout.reward = None
        return
    make_read_only(rollout)
    for sample in rollout.samples:
        try:
            check_trainable(sample)
        except ValueError as error:
            raise UserCodeError(f"rollout {rollout.rollout_id}: {error}") from None
        for name in CREDIT_STREAMS:
            values = getattr(sample, name)
            if values is not None:
                values.setflags(write=False)
