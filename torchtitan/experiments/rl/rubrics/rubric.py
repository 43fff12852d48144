"""Rubrics: how rollouts become rewards.

A rubric weighs reward functions. Each gets ``(completion, example)``: the text that the policy said
last, or what an agent returned, and the ``env_input`` of the data sample. A ``RewardFn`` gives a
function a weight or a name. With ``takes="rollout"`` its function gets ``(rollout, example)``, and
with ``group_level=True`` a list of the group's completions or rollouts as the first argument. A
function returns a number, a group-level one a number for each rollout; either may be async. None in
place of a number leaves the rollout to the other functions. A function with an argument named
``policy_version`` is given that too. What an env itself rewarded counts only if a rubric names it,
with ``env_component(name)``.

A function that raises, hangs or returns anything but finite numbers makes its rollout an ERROR that
names the function. It never counts as a 0: a bug in the scoring must not look like a bad answer.
"""

import ast
import asyncio
import functools
import inspect
import logging
import math
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.ask.call import ask_each, sentence
from torchtitan.experiments.rl.ask.child import IsolatedCalls, pickled
from torchtitan.experiments.rl.ask.threads import CallResult
from torchtitan.experiments.rl.bounds import (
    Changeable,
    Cure,
    PositiveFloat,
    ProcessCount,
    check_fields,
)
from torchtitan.experiments.rl.configurable import UserConfigurable
from torchtitan.experiments.rl.errors import (
    ConfigError,
    RunError,
    UserCodeError,
    cause_of,
    users_traceback,
)
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.types import finite_float

__all__ = ["Reward", "RewardFn", "Rubric", "env_component", "env_components", "last_assistant_text"]

logger = logging.getLogger(__name__)

VERSION_ARGUMENT = "policy_version"
"""Name of the argument by which a reward function asks for the policy version."""
_policy_version: ContextVar[int] = ContextVar("policy_version", default=0)

Judgement = float | UserCodeError | None
"""What a function says of a rollout: a value, why it failed, or None if it does not judge it."""


ENV_PREFIX = "env/"
"""Beginning of the name of a component that the env rewarded and no function weighs."""


@dataclass(slots=True)
class Reward:
    """Reward that a rubric gives one rollout."""

    reward: float | None
    """Weighted mean of the functions that judged the rollout; None on a rollout excluded from its
    group."""
    components: dict[str, float] = field(default_factory=dict)
    """Value of each function that judged the rollout, by name, unweighted; and as ``env/<name>``
    each component that the env rewarded and no function weighs."""


@dataclass(slots=True)
class RewardFn:
    """A reward function and how a rubric uses it.

    Example::

        from torchtitan.experiments.rl.tasks import *

        def shortest(rollouts, row):
            least = min(rollout.completion_tokens for rollout in rollouts)
            return [float(rollout.completion_tokens == least) for rollout in rollouts]

        task = question_task(
            [{"question": "6 * 7?", "answer": "42"}],
            right_answer,  # weight 1
            RewardFn(shortest, weight=0.25, takes="rollout", group_level=True),
        )
    """

    fn: Callable[..., Any]
    weight: Annotated[float, Ge(0), Cure("a penalty returns less than 0")] = 1.0
    """Weight of the function, 0 or more; a rubric's weights are normalised to sum to 1. With weight
    0 a function is only logged."""
    name: str | None = None
    """Name in metrics and errors; None for the function's own name."""
    takes: Literal["completion", "rollout"] = "completion"
    """First argument of the function: the text that the model said last (what an agent returned, if
    it returned something), or the whole Rollout. A group-level function gets a list of them."""
    group_level: bool = False
    """True if the function is called once per group, with a list of the completions or rollouts
    that are to be scored. It returns a list, a tuple or an array [G] of numbers, in their order."""
    timeout_s: Changeable[PositiveFloat | None] = None
    """Time limit of a call in seconds; None for the rubric's."""
    isolate: bool = False
    """True if each call has a process of its own, of which nothing stays: for code that may hang or
    crash, and for functions that run what the model wrote. A late sync function that is not
    isolated keeps its thread for as long as it runs."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for the config that is saved with a run, with the function's path."""
        target = getattr(self.fn, "func", self.fn)
        path = f"{target.__module__}.{getattr(target, '__qualname__', type(target).__qualname__)}"
        return {"fn": path} | {
            entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "fn"
        }


@contextmanager
def scored_at(version: int) -> Iterator[None]:
    """Have the rubrics that score in the block know the policy version of the group."""
    token = _policy_version.set(version)
    try:
        yield
    finally:
        _policy_version.reset(token)


class Rubric(UserConfigurable):
    """Scores the rollouts of a group with weighted reward functions.

    The functions are the config's, or those of a subclass's ``register_funcs``.

    Example::

        from torchtitan.experiments.rl.tasks import *

        async def brief(completion, row):
            return float(len(completion) <= 20)

        rubric = Rubric.Config(
            reward_fns=[right_answer, RewardFn(brief, weight=0.25)],  # shares of 0.8 and 0.2
            truncation_reward=0.0,
        )
        task = question_task([{"question": "6 * 7?", "answer": "42"}], rubric=rubric)
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        reward_fns: list[RewardFn | Callable[..., Any]] = field(default_factory=list)
        """Reward functions. Without any, every reward is 0: for algorithms that take no credit from
        rewards."""
        truncation_reward: float | None = None
        """Reward of truncated rollouts; None has the functions score them as far as they got. No
        number is a safe default: among rewards of -1 and 1, a 0 would make rambling on better than
        a wrong answer. A rollout whose opening prompt overflows is excluded."""
        error_reward: float | None = None
        """Reward of rollouts that failed; None excludes them. It is never given for a failed reward
        function."""
        timeout_s: Changeable[PositiveFloat] = 30.0
        """Time limit in seconds of each call of a reward function that has none of its own."""
        isolated_workers: Changeable[ProcessCount] = 2
        """Number of calls of functions with isolate=True that run at once."""
        isolated_memory_gib: Changeable[PositiveFloat] = 4.0
        """Memory that such a call may take, with all processes that it starts."""

    def __init__(self, config: Config):
        check_fields(config, field="rubric")
        self.config = config
        named = [(entry.name or _name_of(entry.fn), entry) for entry in self._registered()]
        inherited = type(self).register_funcs is Rubric.register_funcs
        field = "rubric.reward_fns" if inherited else "rubric.register_funcs"
        _check_functions(named, field=field)
        self._fns = dict(named)
        self._asks_version = {name for name, entry in named if _asks_version(entry.fn)}
        self._total_weight = math.fsum(entry.weight for _, entry in named)
        self._isolated = IsolatedCalls(
            config.isolated_workers, memory_gib=config.isolated_memory_gib
        )
        self._warned_unweighed = False
        for name, entry in named:
            _check_isolated(entry, name, field=field)

    def _registered(self) -> list[RewardFn]:
        """Return the reward functions, each as a RewardFn.

        Raises:
            ConfigError: ``register_funcs`` raised it.
            RunError: ``register_funcs`` raised another error.
            TypeError: ``register_funcs`` returned something else than functions.
        """
        owner = f"{type(self).__name__}.register_funcs"
        try:
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
        """Return the reward functions.

        A subclass returns its own, and may add ``super().register_funcs()`` for the config's.
        """
        return [_as_reward_fn(entry) for entry in self.config.reward_fns]

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return list(self._fns)

    @property
    def functions(self) -> dict[str, RewardFn]:
        """Reward functions by name, each with its share of the weights, which sum to 1."""
        total = self._total_weight
        return {
            name: replace(entry, weight=entry.weight / total) for name, entry in self._fns.items()
        }

    @property
    def compares_group(self) -> bool:
        """True if a reward may depend on the other rollouts of the group."""
        scores_by_itself = type(self).score_group is not Rubric.score_group
        return scores_by_itself or any(entry.group_level for entry in self._fns.values())

    async def setup(self, policy: PolicyClient) -> None:
        """Reach the models that the functions need, before the first group.

        A judge, for example, is ``policy.frozen(...)``.
        """

    async def score_group(
        self,
        rollouts: Sequence[Rollout],
        env_input: Any,  # noqa: ANN401 - the dataset's
    ) -> list[Reward]:
        """Return one Reward per rollout, in their order.

        Rollouts and example are read-only. A rollout that can't be scored is failed by
        ``rollout.fail(cause)``, as this does if a reward function fails.
        """
        rewards = [Reward(self._fixed_reward(rollout)) for rollout in rollouts]
        pending = [index for index, rollout in enumerate(rollouts) if self._needs_scoring(rollout)]
        scored = [rollouts[index] for index in pending]
        columns: list[list[Judgement]] = []
        if scored:
            columns = await asyncio.gather(
                *(self._column(self._bound(name), scored, env_input) for name in self._fns)
            )
        for position, index in enumerate(pending):
            values = [column[position] for column in columns]
            rewards[index] = self._reward(rollouts[index], values)
        self._add_env_components(rollouts, rewards)
        return rewards

    def _bound(self, name: str) -> RewardFn:
        """Return a function that is given the policy version, if it asks for that."""
        entry = self._fns[name]
        if name not in self._asks_version:
            return entry
        bound = functools.partial(entry.fn, **{VERSION_ARGUMENT: _policy_version.get()})
        return replace(entry, fn=bound)

    def _reward(self, rollout: Rollout, values: Sequence[Judgement]) -> Reward:
        """Return the reward of the functions' values.

        The rollout fails if a function failed, or if none of a weight judged it.
        """
        components: dict[str, float] = {}
        causes: list[str] = []
        tracebacks: dict[str, None] = {}  # each once, in their order
        for name, value in zip(self._fns, values, strict=True):
            if isinstance(value, UserCodeError):
                causes.append(f"reward function {name!r}: {sentence(value)}")
                tracebacks[users_traceback(value)] = None
            elif value is not None:
                components[name] = value
        if causes:
            rollout.fail("; ".join(causes), traceback="\n".join(filter(None, tracebacks)))
            return Reward(None, components)
        if not self._fns:
            return Reward(0.0, components)
        total = math.fsum(self._fns[name].weight for name in components)
        if total == 0:
            weighed = [name for name, entry in self._fns.items() if entry.weight]
            rollout.fail(
                f"reward function {', '.join(map(repr, weighed))}: returned None, so that none "
                "judged the rollout; return a number for such a row, or leave the row out"
            )
            return Reward(None, components)
        # Divided once: the shares of weights 1.0 and 0.3 sum to 0.9999999999999999, and a rollout
        # that is right in everything would have that reward.
        weighted = math.fsum(self._fns[name].weight * value for name, value in components.items())
        return Reward(weighted / total, components)

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
        self, entry: RewardFn, rollouts: list[Rollout], env_input: object
    ) -> list[Judgement]:
        """Return what one function says of each rollout."""
        view = completion_of if entry.takes == "completion" else _itself
        subjects = [view(rollout) for rollout in rollouts]
        timeout_s = self.config.timeout_s if entry.timeout_s is None else entry.timeout_s
        # A child process has the time limit itself; waiting for a free one doesn't count.
        ask_all = self._isolated.ask_each if entry.isolate else ask_each
        if not entry.group_level:
            arguments = [(subject, env_input) for subject in subjects]
            results = await ask_all(entry.fn, arguments, timeout_s=timeout_s)
            return [_judgement_of(result, entry.fn) for result in results]
        (result,) = await ask_all(entry.fn, [(subjects, env_input)], timeout_s=timeout_s)
        if isinstance(result.error, UserCodeError):
            return [result.error] * len(rollouts)
        values = result.value
        is_array = isinstance(values, np.ndarray) and values.ndim == 1
        answers = list(values) if is_array or isinstance(values, list | tuple) else None
        if answers is None or len(answers) != len(rollouts):
            size = f" of {len(answers)}" if answers is not None else ""
            cause = (
                f"returned a {type(values).__name__}{size}, want a list of {len(rollouts)} numbers"
            )
            return [UserCodeError(cause)] * len(rollouts)
        return [_judgement(value, entry.fn) for value in answers]

    def _add_env_components(self, rollouts: Sequence[Rollout], rewards: list[Reward]) -> None:
        """Add what the envs rewarded and no function weighs, as ``env/<name>``.

        If the rubric has no function at all, warn once that such rewards don't count.
        """
        for rollout, reward in zip(rollouts, rewards, strict=True):
            unweighed = {
                name: value
                for name, value in env_components(rollout).items()
                if name not in self._fns
            }
            reward.components.update(
                {f"{ENV_PREFIX}{name}": value for name, value in unweighed.items()}
            )
            if unweighed and not self._fns and not self._warned_unweighed:
                self._warned_unweighed = True
                logger.warning(
                    "task %s: the env rewards %s but the rubric has no function, so every reward "
                    "is 0; add env_component(%r)",
                    rollout.task_name,
                    sorted(unweighed),
                    min(unweighed),
                )


def env_components(rollout: Rollout) -> dict[str, float]:
    """Return what the env rewarded, by name, summed over the turns."""
    sums: dict[str, float] = {}
    for turn in rollout.turns:
        for name, value in turn.reward_components.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def env_component(name: str, *, weight: float = 1.0, default: float | None = None) -> RewardFn:
    """Return a reward function of what the env itself rewarded under a name.

    Its value is the sum over the turns.

    Args:
        default: value of a component that the env never gave. Without it, a rollout that ended
            early has earned 0, and a completed rollout is an error, which is how a misspelt name
            shows.
    """
    name = name.removeprefix("env/")  # as records and metrics name it
    component = functools.partial(_env_component, component=name, default=default)
    return RewardFn(component, weight=weight, name=name, takes="rollout")


async def _env_component(
    rollout: Rollout, env_input: object, *, component: str, default: float | None
) -> float:
    earned = env_components(rollout)
    if component in earned:
        return earned[component]
    if default is None and rollout.status is RolloutStatus.COMPLETED:
        raise RunError(
            f"the env gave no reward component {component!r}; it gave {sorted(earned) or 'none'}; "
            f"where it gives it only sometimes, write env_component({component!r}, default=0)"
        )
    return default or 0.0


def _as_reward_fn(entry: RewardFn | Callable[..., Any]) -> RewardFn:
    return entry if isinstance(entry, RewardFn) else RewardFn(entry)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__


def _asks_version(function: Callable[..., Any]) -> bool:
    """Return True if a function has an argument for the policy version that is not set yet."""
    try:
        parameter = inspect.signature(function).parameters.get(VERSION_ARGUMENT)
    except (TypeError, ValueError):  # a builtin without one
        return False
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


@functools.cache
def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Return True for a function whose source has no ``return`` with a value."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda in an expression
        return False
    return isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
        isinstance(node, ast.Return) and node.value is not None for node in ast.walk(definition)
    )


def _judgement_of(result: CallResult, function: Callable[..., Any]) -> Judgement:
    """Return the judgement that a call of a function ended in."""
    if isinstance(result.error, UserCodeError):
        return result.error
    return _judgement(result.value, function)


def _judgement(value: object, function: Callable[..., Any]) -> Judgement:
    """Return the value as a float, None for None, or what is wrong with it.

    None from a function that never returns anything else is a forgotten ``return``: nobody would
    see that the function judges nothing.
    """
    if value is None:
        if _returns_nothing(inspect.unwrap(getattr(function, "func", function))):
            return UserCodeError("returned None, and has no return with a value: return a number")
        return None
    number = finite_float(value)
    if number is not None:
        return number
    seen = repr(text_of(value)) if isinstance(value, str) else text_of(value)
    return UserCodeError(
        f"returned {seen} ({type(value).__name__}), want a finite number that float32 "
        "holds, or None where it does not judge the rollout"
    )


def _check_functions(named: list[tuple[str, RewardFn]], *, field: str) -> None:
    """Refuse reward functions that can't be called, or that have one name or no weight together.

    Args:
        field: field or method of the rubric that gave the functions, for errors.

    Raises:
        ConfigError: names the functions, or the one at fault, and the cure.
    """
    names = [name for name, _ in named]
    if twice := [name for name in names if names.count(name) > 1]:
        cure = f"two functions named {twice[0]!r}: give one RewardFn(..., name=...)"
        raise ConfigError(field, names, cure)
    for name, entry in named:
        check_fields(entry, field=f"reward function {name!r}")
        _check_arguments(entry, name, field=field)
    if named and not any(entry.weight for _, entry in named):
        raise ConfigError(field, names, "every weight is 0: give at least one a weight")


def _itself(rollout: Rollout) -> Rollout:
    return rollout


def completion_of(rollout: Rollout) -> Any:  # noqa: ANN401 - an agent returns anything
    """Return what a reward function of the completion is given.

    It is the content of what the policy said last, without its reasoning, or what the agent
    returned if it returned something.
    """
    return last_assistant_text(rollout) if rollout.answer is None else rollout.answer


def _check_arguments(entry: RewardFn, name: str, *, field: str) -> None:
    """Raise if a function does not take what it is given.

    Raises:
        ConfigError: the function can't be called with two arguments, or names the first a rollout
            and is given a completion.
    """
    try:
        signature = inspect.signature(entry.fn)
    except (TypeError, ValueError):  # a builtin without one
        return
    names = [*signature.parameters]
    if "completions" in names and not (entry.group_level and names[0] == "completions"):
        cure = (
            "TRL's form? Here a function gets one completion and its row and returns one number: "
            "want fn(completion, example); RewardFn(fn, group_level=True) takes "
            "fn(completions, example) of a group and a list of numbers. docs/coming_from.md has a "
            "wrapper for TRL's"
        )
        raise ConfigError(field, f"{name}{signature}", cure)
    try:
        version = {VERSION_ARGUMENT: 0} if _asks_version(entry.fn) else {}
        signature.bind(None, None, **version)
    except TypeError as error:
        wanted = f"want fn({entry.takes}{'s' * entry.group_level}, example)"
        if entry.takes == "completion":
            wanted += ', or RewardFn(fn, takes="rollout") where it takes the rollout'
        raise ConfigError(field, f"{name}{signature}", f"{error}; {wanted}") from None
    first = next(iter(signature.parameters), "")
    if first in ("rollout", "rollouts") and entry.takes == "completion":
        cure = (
            f"its argument {first!r} would be given the text of the completion: "
            'write RewardFn(fn, takes="rollout")'
        )
        raise ConfigError(field, f"{name}{signature}", cure)


def _check_isolated(entry: RewardFn, name: str, *, field: str) -> None:
    """Raise if a function that is to run in another process can't be sent there.

    Raises:
        ConfigError: it is a method of the rubric, or refers to what can't be pickled.
    """
    if not entry.isolate:
        return
    try:
        pickled(entry.fn)
    except UserCodeError as error:
        cure = (
            f"isolate=True: it {error}; want a function outside of the class, with the values that "
            "it needs as in functools.partial(score, limit=self.config.limit)"
        )
        raise ConfigError(field, name, cure) from error


def looks_for_thoughts(entry: RewardFn) -> bool:
    """Return True if a function that is given the completion names ``<think>``.

    Texts and patterns that the function uses are looked at.
    """
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
    """Return the content of what the policy said last, without its reasoning; "" if nothing."""
    turn = rollout.last_turn
    return turn.assistant_message["content"] if turn is not None else ""


async def win_shares(count: int, prefers: Callable[[int, int], Awaitable[float]]) -> list[float]:
    """Return for each of ``count`` answers the mean of its comparisons with the others.

    It is 1 if the answer won all, and 0.5 if all tie. Each pair is compared in both orders, so that
    a judge's liking for a place cancels. One answer alone has 0.5.

    Args:
        prefers: takes the indices of two answers, and returns 1.0 if the first is better, 0.0 if
            the second is, 0.5 if neither is.
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
