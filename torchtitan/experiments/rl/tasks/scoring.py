"""Gives a group that has run its rewards and its credit, and checks both.

    as each rollout ends   credit_rollout   Algorithm.score_rollout (late credit: after the rewards)
    when all have ended    reward_group     Rubric.score_group
                           credit_group     Algorithm.score_group

Rewards are a rubric's numbers for whole rollouts, and credit is what an algorithm makes of them for
each token: streams of the training samples, such as advantages. An algorithm writes credit to
drafts of the samples, which stand in their place meanwhile::

    with Drafts(rollouts) as drafts:       rollout.samples: drafts, which can be written
        Algorithm.score_group(group)       writes to the drafts
        drafts.check(rollout)              compares the drafts with the samples they were made of
        drafts.take(rollout)               the drafts become read-only, and stay

A rollout whose drafts were not taken gets its samples back: an algorithm that fails, or that
changes what it may not, leaves them as they were. After ``score_group`` drafts are taken only when
those of all rollouts with a reward have passed, so one bad draft fails the group.

An error of user code here fails the rollouts that it was given, and begins with the name of the
method that raised it.
"""

import asyncio
import inspect
import itertools
import operator
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Self, cast

import numpy as np

from torchtitan.experiments.rl.algorithms.base import Algorithm
from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.envs.messages import checked_rewards, require
from torchtitan.experiments.rl.errors import UserCodeError, cause_of, users_traceback
from torchtitan.experiments.rl.frozen import ReadOnlyList, read_only
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.rollouts.costs import counted_in
from torchtitan.experiments.rl.rollouts.samples import check_sample, check_weights, missing_credit
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics.rubric import Reward, Rubric, scored_at
from torchtitan.experiments.rl.types import (
    CREDIT_STREAMS,
    STREAMS,
    TrainingSample,
    checked_stream,
    finite_float,
    first_non_finite,
)

# ---- rewards


async def reward_group(rubric: Rubric, group: RolloutGroup, *, timeout_s: float) -> None:
    """Have the rubric give each rollout its reward and components.

    The group becomes read-only first. A rollout that had failed before gets the rubric's
    ``error_reward``, which is None by default; one whose reward function fails keeps None. A
    rubric that fails, fails every rollout.

    Args:
        timeout_s: limit of a rubric that scores in its own way. The Rubric of the library limits
            each of its functions.
    """
    name = f"{type(rubric).__name__}.score_group"
    scores_by_itself = type(rubric).score_group is not Rubric.score_group
    limit_s = timeout_s if scores_by_itself else None
    rollouts = list(group.rollouts)
    failed_before = [rollout.status.is_error() for rollout in rollouts]
    try:
        group.freeze()
        env_input = read_only(group.data_sample.env_input)
        with counting_costs(group), trace.span(name), scored_at(group.admitted_version):
            rewards = await ask(rubric.score_group, list(rollouts), env_input, timeout_s=limit_s)
        checked = _checked_rewards(rewards, rollouts)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - a rubric may return objects of any class
        _fail(group, f"{name}: {sentence(error)}", error)
        return
    for rollout, had_failed, (reward, components) in zip(
        rollouts, failed_before, checked, strict=True
    ):
        failed_now = rollout.status.is_error() and not had_failed
        rollout.amend(reward=None if failed_now else reward, reward_components=components)


def _checked_rewards(
    rewards: object, rollouts: list[Rollout]
) -> list[tuple[float | None, dict[str, float]]]:
    """Return reward and components of each rollout, as a rubric returned them.

    Raises:
        TypeError: the value is not one Reward for each rollout, of finite numbers; names the
            rollout.
    """
    if not isinstance(rewards, list | tuple) or len(rewards) != len(rollouts):
        size = f" of {len(rewards)}" if isinstance(rewards, list | tuple) else ""
        raise TypeError(
            f"returned a {type(rewards).__name__}{size}, want a list of {len(rollouts)} Reward"
        )
    checked = []
    for rollout, reward in zip(rollouts, rewards, strict=True):
        of = f"of rollout {rollout.rollout_id}"
        require(isinstance(reward, Reward), f"the reward {of} is", reward, "a Reward")
        number = finite_float(reward.reward)
        require(
            reward.reward is None or number is not None,
            f"the reward {of} is",
            reward.reward,
            "None or a finite number that float32 holds",
        )
        checked.append((number, checked_rewards(reward.components, f"the components {of}")))
    return checked


def too_few_scored(group: RolloutGroup, min_group_size: int) -> str | None:
    """Return why the group has too few rewards to be trained on; None if it has enough.

    A group of one rollout needs one.
    """
    needed = min(min_group_size, len(group.rollouts))
    if len(group.scored) >= needed:
        return None
    causes = [rollout.error for rollout in group.rollouts if rollout.error]
    first = f": {causes[0]}" if causes else ""
    return f"{len(group.scored)} of {len(group.rollouts)} rollouts scored, {needed} needed{first}"


# ---- credit


async def credit_rollout(
    algorithm: Algorithm, rollout: Rollout, group: RolloutGroup, *, timeout_s: float
) -> None:
    """Have the algorithm's ``score_rollout`` give credit to a rollout that has ended well.

    If the algorithm fails, the rollout fails.
    """
    kind = type(algorithm)
    if rollout.status.is_error() or kind.score_rollout is Algorithm.score_rollout:
        return
    name = f"{kind.__name__}.score_rollout"
    # A copy, because a call that exceeds its limit may go on in its thread: what it writes then
    # must not reach the drafts that ``score_group`` is given.
    seen = rollout.freeze().thawed()
    try:
        with _adding_time(group), Drafts([seen]) as drafts:
            with trace.span(name):
                await ask(algorithm.score_rollout, seen, timeout_s=timeout_s)
            drafts.check(seen, replaces=kind.replaces)
            for draft in seen.samples:
                check_streams(draft)
                check_weights(draft)
            drafts.take(seen)
        rollout.amend(samples=seen.samples)
        if seen.status.is_error():  # the algorithm called its ``fail``
            rollout.fail(str(seen.error), status=seen.status, traceback=seen.traceback)
    except (UserCodeError, ValueError) as error:
        cause = sentence(error) if isinstance(error, UserCodeError) else str(error)
        cause = f"task {group.task_name}: {name}: {cause}"
        rollout.fail(cause, traceback=users_traceback(error))
    except Exception as error:  # noqa: BLE001 - of what an algorithm wrote, such as a tensor
        cause = f"task {group.task_name}: {name}: {cause_of(error)}"
        rollout.fail(cause, traceback=users_traceback(error))


async def credit_group(
    algorithm: Algorithm, group: RolloutGroup, *, timeout_s: float
) -> str | None:
    """Have the algorithm's ``score_group`` give credit.

    Returns:
        The cause if that failed; every rollout has failed then.
    """
    kind = type(algorithm)
    if not gives_credit(algorithm):
        # There is no credit to check. Samples that a task made may have their weights already.
        return None

    # Async around a sync method, so that it runs on the event loop: a thread would take longer than
    # the arithmetic of an algorithm.
    async def score() -> None:
        answer = cast(Any, algorithm).score_group(group)
        if inspect.isawaitable(answer):  # an override may be async
            await answer

    name = f"{kind.__name__}.score_group"
    try:
        with _adding_time(group), Drafts(group.rollouts) as drafts:
            with trace.span(name):
                await ask(score, timeout_s=timeout_s)
            _take_credit(group, drafts)
    except Exception as error:  # noqa: BLE001 - it may write values of any class
        cause = f"task {group.task_name}: {name}: {sentence(error)}"
        _fail(group, cause, error)
        return cause
    return None


def gives_credit(algorithm: Algorithm) -> bool:
    """Return True if the algorithm has a method that gives credit."""
    kind = type(algorithm)
    has_own = (
        kind.score_group is not Algorithm.score_group,
        kind.score_rollout is not Algorithm.score_rollout,
    )
    return any(has_own)


def _take_credit(group: RolloutGroup, drafts: "Drafts") -> None:
    """Check the drafts of all rollouts, and then let each rollout keep its own.

    Raises:
        UserCodeError: a sample can't be trained on; names its rollout.
        ValueError: see `Drafts.check`.
    """
    credited = []
    for rollout in group.rollouts:
        if rollout.reward is None:
            continue
        drafts.check(rollout)
        if _has_credit(rollout):
            credited.append(rollout)
        else:
            rollout.amend(reward=None)
    for rollout in credited:
        drafts.take(rollout)


def _has_credit(rollout: Rollout) -> bool:
    """Check the drafts of a rollout with a reward.

    Returns:
        False if the rollout had failed and has no credit. It has a reward because the rubric has an
        `error_reward`, but ``score_rollout``, which gives credit, does not see failed rollouts.

    Raises:
        UserCodeError: a draft can't be trained on; names the rollout.
    """
    try:
        for draft in rollout.samples:
            check_streams(draft)
        if rollout.status.is_error() and any(map(missing_credit, rollout.samples)):
            return False
        for draft in rollout.samples:
            check_sample(draft)
    except ValueError as error:
        raise UserCodeError(f"rollout {rollout.rollout_id}: {error}") from None
    return True


def refuse_unfit(group: RolloutGroup, adapter: str) -> None:
    """Fail a group if a rollout with a reward has a sample that can't be trained on.

    This is the door for samples that a user's task has made, or given their credit.

    Args:
        adapter: name of the adapter that the group's task trains.
    """
    for rollout in group.scored:
        try:
            for sample in rollout.samples:
                check_sample(sample)
                check_finite(sample)
                _check_adapter(sample, adapter)
        except Exception as error:  # noqa: BLE001 - the samples may hold values of any class
            text = str(error) if isinstance(error, ValueError) else cause_of(error)
            cause = f"task {group.task_name}: rollout {rollout.rollout_id}: {text}"
            _fail(group, cause, error)
            group.amend(failure=cause)
            return


def _fail(group: RolloutGroup, cause: str, error: BaseException) -> None:
    """Set the rewards of all rollouts to None, and end those that had not failed as ERROR.

    Args:
        error: what was raised.
    """
    traceback = users_traceback(error)
    for rollout in group.rollouts:
        if rollout.status.is_error():
            rollout.amend(reward=None)
        else:
            rollout.fail(cause, traceback=traceback)


@contextmanager
def counting_costs(group: RolloutGroup) -> Iterator[None]:
    """Have `add_cost` add to the costs of a group that is read-only."""
    costs = dict(group.costs)
    try:
        with counted_in(costs):
            yield
    finally:
        group.amend(costs=costs)


@contextmanager
def _adding_time(group: RolloutGroup) -> Iterator[None]:
    """Add the time that the block takes to the time that the group's credit took."""
    began = time.perf_counter()
    try:
        yield
    finally:
        group.amend(credit_s=group.credit_s + time.perf_counter() - began)


# ---- drafts


class Drafts:
    """Context manager that puts drafts, which can be written, in the place of rollouts' samples.

    The constructor makes the rollouts read-only, for good: only their drafts can be written.
    """

    def __init__(self, rollouts: Sequence[Rollout]):
        self._rollouts = [rollout.freeze() for rollout in rollouts]
        self._samples = {rollout.rollout_id: rollout.samples for rollout in rollouts}
        """Samples that the drafts are made of, by the rollout's id, until the drafts are taken."""
        self._fields_set: dict[str, list[list[str]]] = {}
        """Fields that hold another object in each draft than in its sample, by the rollout's id."""

    def __enter__(self) -> Self:
        for rollout in self._rollouts:
            _set_samples(rollout, map(_draft, rollout.samples))
        return self

    def __exit__(self, *_: object) -> None:
        for rollout in self._rollouts:
            if rollout.rollout_id in self._samples:
                _set_samples(rollout, self._samples[rollout.rollout_id])

    def check(self, rollout: Rollout, *, replaces: Collection[str] = ()) -> None:
        """Raise if an algorithm has set a field that it may not set.

        Every field but the credit streams must be the same object as in the sample: an equal value
        is refused too. No array has to be compared for that, because those that a draft shares with
        its sample are read-only. `check_streams` checks the credit streams.

        Args:
            replaces: fields that the algorithm may set beside the credit streams
                (`Algorithm.replaces`); none for ``score_group``. Streams among them get their
                declared dtype.

        Raises:
            ValueError: the algorithm has set another field, or a stream among ``replaces`` is not
                one number for each token.
        """
        samples = self._samples[rollout.rollout_id]
        self._fields_set[rollout.rollout_id] = fields_set = []
        for index, (sample, draft) in enumerate(zip(samples, rollout.samples, strict=True)):
            is_set = map(operator.is_not, _VALUES(draft), _VALUES(sample))
            names = list(itertools.compress(_FIELDS, is_set))
            for name in names:
                if name not in CREDIT_STREAMS and name not in replaces:
                    raise ValueError(f"changed samples[{index}].{name} of a rollout that has ended")
            fields_set.append(names)
            for name in STREAMS.keys() & replaces:
                _convert(draft, name)

    def take(self, rollout: Rollout) -> None:
        """Make the drafts of a rollout, which have passed `check`, its read-only samples.

        Arrays that the algorithm has set are copied, because it may write to its own again.
        """
        fields_set = self._fields_set[rollout.rollout_id]
        for draft, names in zip(rollout.samples, fields_set, strict=True):
            for name in names:
                values = getattr(draft, name)
                if isinstance(values, np.ndarray):
                    setattr(draft, name, values.copy())
            draft.freeze(names)
        del self._samples[rollout.rollout_id]


_FIELDS = tuple(field.name for field in fields(TrainingSample))
_VALUES = operator.attrgetter(*_FIELDS)


def _set_samples(rollout: Rollout, samples: Iterable[TrainingSample]) -> None:
    # Not by `amend`, which would make the samples read-only.
    object.__setattr__(rollout, "samples", ReadOnlyList(samples))


def _draft(sample: TrainingSample) -> TrainingSample:
    """Return a copy of the sample. Its fields can be set, and its credit streams written in place.

    Its other arrays are those of the sample, which are read-only.
    """
    draft = sample.thawed()
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if isinstance(values, np.ndarray):
            setattr(draft, name, values.copy())
    return draft


# ---- checks of credit


def check_streams(sample: TrainingSample) -> None:
    """Give each stream that an algorithm has set its declared dtype.

    Raises:
        ValueError: a stream is not one number for each token, or is not finite on a token that
            trains on it.
    """
    for name in CREDIT_STREAMS:
        _convert(sample, name)
    check_finite(sample)


def _convert(sample: TrainingSample, name: str) -> None:
    values = getattr(sample, name)
    if values is not None:
        setattr(sample, name, checked_stream(name, values, len(sample)))


def check_finite(sample: TrainingSample) -> None:
    """Raise if a credit stream is not finite on a token that trains on it.

    Raises:
        ValueError: names the stream and the token.
    """
    for name in CREDIT_STREAMS:
        values = getattr(sample, name)
        if values is None or first_non_finite(values) is None:
            continue
        wrong = np.flatnonzero(_read_on(sample, name) & ~np.isfinite(values))
        if len(wrong):
            raise ValueError(
                f"{name} is {values[wrong[0]]} at token {wrong[0]}, want a finite number that "
                f"{values.dtype} holds"
            )


def _check_adapter(sample: TrainingSample, adapter: str) -> None:
    if sample.adapter != adapter:
        raise ValueError(
            f"a sample trains the adapter {sample.adapter!r}, and its task {adapter!r}: give "
            "samples_from_turns adapter=self.config.adapter"
        )


def _read_on(sample: TrainingSample, name: str) -> np.ndarray:
    """Return on which tokens a loss reads a credit stream, bool [L]."""
    if name == "advantages":
        weights = sample.rl_weights
        return sample.loss_mask if weights is None else sample.loss_mask & (weights != 0)
    if name == "ref_logprobs" and sample.ref_kl_weights is not None:
        return sample.ref_kl_weights != 0
    return np.ones(len(sample), bool)
