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
from torchtitan.experiments.rl.rollouts.sealed import copied_example, is_own, sealed_group, sealed_rollout, take_samples
from torchtitan.experiments.rl.rollouts.streams import check_streams, check_trainable, finite_float
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import Reward, Rubric
from torchtitan.experiments.rl.types import STREAMS, TrainingSample
from torchtitan.experiments.rl.user_code.calls import UserCodeError, call_bounded, call_plain, cause_of


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


def give_credit(algorithm: Algorithm, group: RolloutGroup, *, timeout_s: float) -> str | None:
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
    try:
        with trace.span(f"{kind.__name__}.score_group"):
            call_plain(functools.partial(algorithm.score_group, given), timeout_s=timeout_s)
        for rollout, written in zip(group.rollouts, lent, strict=True):
            # The rubric's `error_reward`, and an algorithm whose ``score_rollout`` has not seen a rollout that failed.
            if rollout.status.is_error() and any(missing_credit(sample) for sample in written.samples):
                rollout.reward = None
            if rollout.reward is not None:
                take_samples(rollout, written, _check_credit)
    except BaseException as error:  # it awaits nothing: whatever it raised is its own
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
