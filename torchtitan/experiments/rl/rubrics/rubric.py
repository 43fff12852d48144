"""Rubrics: how rollouts become rewards.

A rubric weighs reward functions. Each gets ``(completion, example)``: the text of the last assistant message and the
``env_input`` of the data sample. A ``RewardFn`` adds a weight or a name to a function, and changes its arguments only where it
says so: with ``takes="rollout"`` the function gets ``(rollout, example)``. A group-level function gets a list in place of the
completion or the rollout. Each returns a number, group-level one number per rollout, and may be async. What an env itself
rewarded counts only where a rubric names it, with ``env_component(name)``.

A function that raises, hangs or returns anything but finite numbers makes its rollout an ERROR that names the function.
It never counts as a 0: a bug in the scoring must not look like a bad answer.
"""

import asyncio
import functools
import inspect
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.batching.sample_checks import finite_float
from torchtitan.experiments.rl.bounds import (
    Changeable,
    Cure,
    PositiveFloat,
    ProcessCount,
    check_fields,
)
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import ConfigError, RunError, users_traceback
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.sealed import copied_example, is_own, sealed_rollout
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.user_code.calls import (
    Threads,
    UserCodeError,
    call_bounded,
    call_user,
    cause_of,
    doing,
)
from torchtitan.experiments.rl.user_code.isolated import IsolatedCalls

__all__ = ["Reward", "RewardFn", "Rubric", "env_component", "env_components", "last_assistant_text"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reward:
    """What a rubric returns for one rollout."""

    reward: float | None
    """Weighted mean of the functions; None on a rollout excluded from its group."""
    components: dict[str, float] = field(default_factory=dict)
    """Each function's own value by name, unweighted, and env components that no function weighs as ``env/<name>``."""


@dataclass(slots=True)
class RewardFn:
    """A reward function and how a rubric uses it."""

    fn: Callable[..., Any]
    weight: Annotated[float, Ge(0), Cure("a penalty returns less than 0")] = 1.0
    """0 or more; a rubric's weights are normalised to sum to 1. With weight 0 a function is only logged."""
    name: str | None = None
    """None: the function's own name."""
    takes: Literal["completion", "rollout"] = "completion"
    """First argument of the function: the text that the model said last (what an agent returned, if it returned something), or
    the whole Rollout. A group-level function gets a list of them."""
    group_level: bool = False
    """True if the function is called once per group, with a list of the completions or rollouts that are to be scored. It
    returns a list, a tuple or an array [G] of numbers, in their order."""
    timeout_s: Changeable[PositiveFloat | None] = None
    """Per call; None: the rubric's."""
    isolate: bool = False
    """True if each call has a process of its own, of which nothing stays: for code that may hang or crash, and for functions
    that run what the model wrote. A late sync function that is not isolated keeps its thread for as long as it runs."""

    def to_dict(self) -> dict[str, Any]:
        """For the config that is saved with a run: the function by its path."""
        target = getattr(self.fn, "func", self.fn)
        path = f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"
        return {"fn": path} | {
            entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "fn"
        }


class Rubric(UserConfigurable):
    """Scores the rollouts of a group with weighted reward functions: the config's, or a subclass's ``register_funcs``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        reward_fns: list[RewardFn | Callable[..., Any]] = field(default_factory=list)
        """With none, every reward is 0: for algorithms that take no credit from rewards."""
        truncation_reward: float | None = None
        """Reward of truncated rollouts; None has the functions score them as far as they got. No number is a safe default:
        among rewards of -1 and 1, a 0 would make rambling on better than a wrong answer. A rollout whose opening prompt
        overflows is excluded."""
        error_reward: float | None = None
        """Reward of rollouts that failed; None excludes them. Never given for a failed reward function."""
        timeout_s: Changeable[PositiveFloat] = 30.0
        """For each call of a reward function without a limit."""
        isolated_workers: Changeable[ProcessCount] = 2
        """Calls of functions with isolate=True that run at once."""
        isolated_memory_gib: Changeable[PositiveFloat] = 4.0
        """Memory that such a call may take, with all processes that it starts."""

    def __init__(self, config: Config):
        check_fields(config, field="rubric")
        self.config = config
        named = [(entry.name or _name_of(entry.fn), entry) for entry in self._registered()]
        _check(named)
        total = math.fsum(entry.weight for _, entry in named)
        self._fns = {name: replace(entry, weight=entry.weight / total) for name, entry in named}
        self._isolated = IsolatedCalls(
            config.isolated_workers, memory_gib=config.isolated_memory_gib
        )
        self._isolated_threads = Threads(config.isolated_workers)
        self._warned_unweighed = False

    def _registered(self) -> list[RewardFn]:
        owner = f"{type(self).__name__}.register_funcs"
        try:
            with doing(owner):
                entries = self.register_funcs()
        except ConfigError:
            raise
        except BaseException as error:
            raise RunError(f"{owner}: {cause_of(error, folder=True)}") from error
        if not isinstance(entries, list | tuple) or not all(
            isinstance(entry, RewardFn) or callable(entry) for entry in entries
        ):
            raise TypeError(f"{owner} returned a {type(entries).__name__}, want a list of RewardFn")
        return [_as_reward_fn(entry) for entry in entries]

    def register_funcs(self) -> list[RewardFn]:
        """The reward functions; a subclass returns its own, and may add ``super().register_funcs()`` for the config's."""
        return [_as_reward_fn(entry) for entry in self.config.reward_fns]

    @property
    def names(self) -> list[str]:
        """Of its reward functions."""
        return list(self._fns)

    @property
    def functions(self) -> dict[str, RewardFn]:
        """Reward functions by name, with weights that sum to 1."""
        return dict(self._fns)

    @property
    def compares_group(self) -> bool:
        """Whether a reward may depend on the other rollouts of the group."""
        own = type(self).score_group is not Rubric.score_group
        return own or any(entry.group_level for entry in self._fns.values())

    async def setup(self, policy: PolicyClient) -> None:
        """Before the first group: reach the models the rubric's functions need, such as a judge: ``policy.frozen(...)``."""

    async def score_group(self, rollouts: Sequence[Rollout], env_input: Any) -> list[Reward]:
        """One Reward per rollout, in order. Sets status and error of a rollout whose reward function failed."""
        rewards = [Reward(self._fixed_reward(rollout)) for rollout in rollouts]
        pending = [
            pair for pair in zip(rollouts, rewards, strict=True) if self._needs_scoring(pair[0])
        ]
        scored = [rollout for rollout, _ in pending]
        columns = await asyncio.gather(
            *(self._column(entry, scored, env_input) for entry in self._fns.values() if scored)
        )
        for position, (rollout, reward) in enumerate(pending):
            values = {
                name: column[position] for name, column in zip(self._fns, columns, strict=True)
            }
            failed = {
                name: value for name, value in values.items() if isinstance(value, UserCodeError)
            }
            reward.components = {
                name: value
                for name, value in values.items()
                if not isinstance(value, UserCodeError)
            }
            if failed:
                causes = [f"reward function {name!r}: {error}" for name, error in failed.items()]
                rollout.status, rollout.error = RolloutStatus.ERROR, "; ".join(causes)
                rollout.traceback = "\n".join(
                    dict.fromkeys(filter(None, map(users_traceback, failed.values())))
                )
            else:
                reward.reward = math.fsum(
                    entry.weight * reward.components[name] for name, entry in self._fns.items()
                )
        self._log_env_components(rollouts, rewards)
        return rewards

    def _needs_scoring(self, rollout: Rollout) -> bool:
        if rollout.status.is_truncated():
            return bool(rollout.turns) and self.config.truncation_reward is None
        return not rollout.status.is_error()

    def _fixed_reward(self, rollout: Rollout) -> float | None:
        if rollout.status.is_error():
            return self.config.error_reward
        # An opening prompt that overflows does not measure the policy, which sampled nothing.
        return (
            self.config.truncation_reward
            if rollout.status.is_truncated() and rollout.turns
            else None
        )

    async def _column(
        self, entry: RewardFn, rollouts: list[Rollout], env_input: Any
    ) -> list[float | UserCodeError]:
        """Return one function's value for each rollout, or why there is none."""
        if not entry.group_level:
            return await asyncio.gather(
                *(self._value(entry, rollout, env_input) for rollout in rollouts)
            )
        try:
            values = await self._call(entry, rollouts, env_input)
        except UserCodeError as error:
            return [error] * len(rollouts)
        sequence = isinstance(values, list | tuple) or (
            isinstance(values, np.ndarray) and values.ndim == 1
        )
        try:
            answers = list(values) if sequence else None
        except BaseException as error:  # a list of the user's own class
            unread = UserCodeError(
                f"returned a {type(values).__name__} that can't be read: {cause_of(error)}"
            )
            unread.traceback = users_traceback(error)
            return [unread] * len(rollouts)
        if answers is None or len(answers) != len(rollouts):
            size = f" of {len(answers)}" if answers is not None else ""
            wanted = (
                f"returned a {type(values).__name__}{size}, want a list of {len(rollouts)} numbers"
            )
            return [UserCodeError(wanted)] * len(rollouts)
        return [_number(value) for value in answers]

    async def _value(
        self, entry: RewardFn, rollout: Rollout, env_input: Any
    ) -> float | UserCodeError:
        try:
            return _number(await self._call(entry, rollout, env_input))
        except UserCodeError as error:
            return error

    async def _call(
        self, entry: RewardFn, rollouts: Rollout | list[Rollout], env_input: Any
    ) -> Any:
        """Call a function with what it takes of one rollout, or of a list of them."""
        subject: Any = rollouts
        if entry.takes == "completion":
            subject = (
                [*map(completion_of, rollouts)]
                if isinstance(rollouts, list)
                else completion_of(rollouts)
            )
        timeout_s = self.config.timeout_s if entry.timeout_s is None else entry.timeout_s
        if entry.isolate:  # the child has the time limit; waiting for a free one doesn't count
            call = functools.partial(
                self._isolated.call, entry.fn, (subject, env_input), timeout_s=timeout_s
            )
            return await call_bounded(
                lambda: self._isolated_threads.call(call, timeout_s=None), timeout_s=None
            )
        if not is_own(entry.fn):
            if entry.takes == "completion":
                subject = copied_example(subject)
            else:
                subject = (
                    [*map(sealed_rollout, rollouts)]
                    if isinstance(rollouts, list)
                    else sealed_rollout(rollouts)
                )
            env_input = copied_example(env_input)
        return await call_user(entry.fn, subject, env_input, timeout_s=timeout_s)

    def _log_env_components(self, rollouts: Sequence[Rollout], rewards: list[Reward]) -> None:
        for rollout, reward in zip(rollouts, rewards, strict=True):
            unweighed = {
                name: value
                for name, value in env_components(rollout).items()
                if name not in self._fns
            }
            reward.components.update({f"env/{name}": value for name, value in unweighed.items()})
            if unweighed and not self._fns and not self._warned_unweighed:
                self._warned_unweighed = True
                logger.warning(
                    "task %s: the env rewards %s but the rubric has no function, so every reward is 0; add env_component(%r)",
                    rollout.task_name, sorted(unweighed), min(unweighed),
                )  # fmt: skip


def env_components(rollout: Rollout) -> dict[str, float]:
    """What the env rewarded, by name, summed over the turns."""
    sums: dict[str, float] = {}
    for turn in rollout.turns:
        for name, value in turn.reward_components.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def env_component(name: str, *, weight: float = 1.0, default: float | None = None) -> RewardFn:
    """A reward function that takes what the env itself rewarded under ``name``, summed over the turns.

    ``default`` stands for a component the env never gave. Without one, a rollout that ended early has earned 0 and a completed
    rollout is an error, which is how a misspelt name shows.
    """
    component = functools.partial(_env_component, component=name, default=default)
    return RewardFn(component, weight=weight, name=name, takes="rollout")


async def _env_component(
    rollout: Rollout, env_input: Any, *, component: str, default: float | None
) -> float:
    earned = env_components(rollout)
    if component in earned:
        return earned[component]
    if default is None and rollout.status is RolloutStatus.COMPLETED:
        raise RunError(
            f"the env gave no reward component {component!r}; it gave {sorted(earned) or 'none'}; where it gives it only "
            f"sometimes, write env_component({component!r}, default=0)"
        )
    return default or 0.0


def _as_reward_fn(entry: RewardFn | Callable[..., Any]) -> RewardFn:
    return entry if isinstance(entry, RewardFn) else RewardFn(entry)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _number(value: Any) -> float | UserCodeError:
    """The value as a float, or what is wrong with it."""
    if (number := finite_float(value)) is not None:
        return number
    return UserCodeError(
        f"returned {text_of(value)} ({type(value).__name__}), want a finite number that float32 holds"
    )


def _check(named: list[tuple[str, RewardFn]]) -> None:
    names = [name for name, _ in named]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            "rubric.reward_fns",
            names,
            f"two functions named {twice[0]!r}: give one RewardFn(..., name=...)",
        )
    for name, entry in named:
        check_fields(entry, field=f"reward function {name!r}")
        _check_arguments(entry, name)
    if named and not any(entry.weight for _, entry in named):
        raise ConfigError(
            "rubric.reward_fns", names, "every weight is 0: give at least one a weight"
        )


def completion_of(rollout: Rollout) -> Any:
    """Return what a reward function of the completion is given: the content of the last assistant message, without its
    reasoning, or what the agent returned where it returned something."""
    return last_assistant_text(rollout) if rollout.answer is None else rollout.answer


def _check_arguments(entry: RewardFn, name: str) -> None:
    """
    Raises:
        ConfigError: the function can't be called with two arguments, or names the first a rollout and is given a completion.
    """
    try:
        signature = inspect.signature(entry.fn)
    except (TypeError, ValueError):  # a builtin without one
        return
    names = [*signature.parameters]
    if "completions" in names and not (entry.group_level and names[0] == "completions"):
        cure = (
            "TRL's form? Here a function gets one completion and its row and returns one number: want fn(completion, example); "
            "RewardFn(fn, group_level=True) takes fn(completions, example) of a group and a list of numbers"
        )
        raise ConfigError("rubric.reward_fns", f"{name}{signature}", cure)
    try:
        signature.bind(None, None)
    except TypeError as error:
        wanted = f"want fn({entry.takes}{'s' * entry.group_level}, example)"
        if entry.takes == "completion":
            wanted += ', or RewardFn(fn, takes="rollout") where it takes the rollout'
        raise ConfigError("rubric.reward_fns", f"{name}{signature}", f"{error}; {wanted}") from None
    first = next(iter(signature.parameters), "")
    if first in ("rollout", "rollouts") and entry.takes == "completion":
        cure = f'its argument {first!r} would be given the text of the completion: write RewardFn(fn, takes="rollout")'
        raise ConfigError("rubric.reward_fns", f"{name}{signature}", cure)


def looks_for_thoughts(entry: RewardFn) -> bool:
    """Return whether a function that is given the completion names ``<think>``, in a text or a pattern that it uses."""
    function = inspect.unwrap(getattr(entry.fn, "func", entry.fn))
    code = getattr(function, "__code__", None)
    if entry.takes != "completion" or code is None:
        return False
    known = getattr(function, "__globals__", {})
    used = [*code.co_consts, *(known.get(name) for name in code.co_names)]
    texts = [value.pattern if isinstance(value, re.Pattern) else value for value in used]
    return any(
        "<think" in text for text in texts if isinstance(text, str) and text != function.__doc__
    )


def last_assistant_text(rollout: Rollout) -> str:
    """Content of the rollout's last assistant message, without its reasoning; "" if there is none."""
    return rollout.turns[-1].assistant_message["content"] if rollout.turns else ""


async def win_shares(count: int, prefers: Callable[[int, int], Awaitable[float]]) -> list[float]:
    """For each of ``count`` answers, the mean of its comparisons with the others: 1 where it won all, 0.5 where all tie.

    Each pair is compared in both orders, so that a judge's liking for a place cancels. One answer alone has 0.5.

    Args:
        prefers: of the answers at two indices, 1.0 where the first is better, 0.0 where the second is, 0.5 where neither is.
    """
    if count == 1:
        return [0.5]
    pairs = list(permutations(range(count), 2))
    wins = [0.0] * count
    for (first, second), verdict in zip(
        pairs, await asyncio.gather(*(prefers(*pair) for pair in pairs)), strict=True
    ):
        wins[first] += verdict
        wins[second] += 1.0 - verdict
    return [share / (2 * (count - 1)) for share in wins]
