"""Tries each task once, in this process and without a model, before a run spawns any other.

One group of the first example goes the way of every group, with a scripted policy in place of the
model (`tasks/scripted_policy.py`):

1. `Task.setup`.
2. `Task.run_group` runs one rollout. Its prompts are compared with what the env gave
   (`prompt_check.py`), its first prompt with that of a second env, and copies of it make the group.
3. `Task.score_rewards`, also of a group as large as those of a validation
   (``validation.attempts``). Every other reward is changed then, so that there is something to
   compare.
4. `Task.give_credit`, and the filters.
5. Further replies, which only warn (`reply_checks.py`).
6. `Task.close`.

User code that fails on the way refuses the config. A task that takes longer than
``user_code.preflight_timeout_s`` is a warning, and the run begins. Code that ends the process
leaves its last words (`last_words.py`).
"""

import asyncio
import contextlib
import copy
import functools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.command.build import PolicyTokenizer
from torchtitan.experiments.rl.command.last_words import LastWords
from torchtitan.experiments.rl.command.prompt_check import check_prompt
from torchtitan.experiments.rl.command.reply_checks import REPLY, ReplyChecks
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.configurable import build_with
from torchtitan.experiments.rl.envs.message_env import MessageEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv
from torchtitan.experiments.rl.errors import (
    ConfigError,
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    user_code,
    users_traceback,
)
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.rollouts.filters import matches_of
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup, RolloutStatus
from torchtitan.experiments.rl.tasks.group_run import prompts_cure
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy
from torchtitan.experiments.rl.tasks.task import Task

MAX_TURNS = 4
"""Maximum number of turns of a rollout: the scripted model gives the same reply in each."""
SHOWN_CHARACTERS = 40
"""Number of characters that an error shows of each of two prompts that differ."""
GRACE_S = 3.0
"""Seconds beyond the limit after which a thread that blocks without awaiting is abandoned."""
CURE = "user_code.preflight_timeout_s = 0 leaves this check out"


@dataclass(kw_only=True, slots=True)
class PreflightResult:
    """Findings of the preflight on one task, filled in on the way until the task hangs."""

    prompt: str = ""
    """First prompt, with its special tokens; "" if there was none."""
    prompt_token_ids: Sequence[int] | np.ndarray = ()
    """int32 [P]. Tokens of the first prompt."""
    lacks_answers: bool = False
    """True if the task knows where a row's answer stands, and no row that was tried has one."""
    warnings: list[str] = field(default_factory=list)
    """Lines that a person should read before the run."""


def run_preflight(
    config: RunConfig, tasks: Mapping[str, Task], policy: PolicyTokenizer | None
) -> dict[str, PreflightResult]:
    """Try each of ``tasks``, which were built for these checks alone.

    Args:
        policy: tokenizer and renderer that the tasks were built with; None if there are no tasks.

    Returns:
        What was seen, by task; empty if ``user_code.preflight_timeout_s`` is 0.

    Raises:
        ConfigError: an env, a reward function, an algorithm, a filter or a setup failed; the error
            names its field.
    """
    limit_s = config.user_code.preflight_timeout_s
    if limit_s == 0 or policy is None:
        return {}
    results = {}
    with LastWords() as last_words:
        for name, task in tasks.items():
            preflight = Preflight(config=config, task=task, policy=policy, last_words=last_words)
            preflight.run_within(limit_s)
            results[name] = preflight.result
    return results


class Preflight:
    """Preflight of one task."""

    def __init__(
        self, *, config: RunConfig, task: Task, policy: PolicyTokenizer, last_words: LastWords
    ):
        env = task.config.env
        turns = min(env.max_turns, MAX_TURNS)  # nobody but the preflight has this task
        task.config = replace(task.config, env=replace(env, max_turns=turns))
        self.result = PreflightResult()
        self._config = config
        self._task = task
        self._field = f"tasks.{task.name}"
        self._context = policy.context
        self._policy = ScriptedPolicy(policy.tokenizer, lambda rollout, turn: REPLY)
        self._replies = ReplyChecks(
            task=task,
            field=self._field,
            tokenizer=policy.tokenizer,
            seed=config.seed,
            announce=self._announce,
        )
        self._last_words = last_words
        self._asks_a_model = False
        """True if the rewards came from a frozen model, in whose place the scripted policy was."""
        self._step = ""
        """Step of the preflight that is tried now, for errors."""

    def run_within(self, limit_s: float) -> None:
        """Try the task, in an event loop and a thread of its own, which is abandoned if it hangs.

        Raises:
            ConfigError: code of the task failed; the error names its field.
        """
        ended: Future[None] = Future()

        async def run() -> None:
            try:
                await ask(self._run, timeout_s=limit_s)
            except BaseException as error:  # noqa: BLE001 - code may cancel all tasks of its loop
                ended.set_exception(error)
            else:
                # Before the loop is closed, which waits for threads that the code may have left.
                ended.set_result(None)

        threading.Thread(target=lambda: asyncio.run(run()), name="preflight", daemon=True).start()
        failure: BaseException | None
        try:
            failure = ended.exception(limit_s + GRACE_S)
        except TimeoutError:
            failure = UserCodeTimeout(
                f"no answer within {limit_s:g} s: it blocks the event loop without awaiting"
            )
        if failure is None:
            return
        if isinstance(failure.__cause__, ConfigError):
            raise failure.__cause__
        if not isinstance(failure, UserCodeTimeout):
            raise self._refusal(sentence(failure), traceback=users_traceback(failure)) from None
        self._warn(
            f"{self._field} was not tried to its end ({self._step}: {sentence(failure)}): the run "
            "begins all the same; user_code.preflight_timeout_s sets this limit"
        )

    def _announce(self, step: str) -> None:
        """Note what is tried from now on, for errors and for the last words."""
        self._step = step
        words = self._refusal("the command was killed, or this code called os._exit or crashed")
        self._last_words.set(f"error: {words}")

    async def _run(self) -> None:
        task = self._task
        self._announce("its setup")
        await ask(task.setup, self._policy, timeout_s=None)
        try:
            group = await self._run_group()
            if group is not None:
                of_validation = self._validation_group(group)
                await self._score(group)
                if of_validation is not None:
                    await self._score_validation(of_validation)
                self._filter(group)
                await self._try_replies(group)
        except BaseException:
            with contextlib.suppress(UserCodeError):  # the first failure is the cause
                await ask(task.close, timeout_s=None)
            raise
        self._announce("its close")
        await ask(task.close, timeout_s=None)

    async def _run_group(self) -> RolloutGroup | None:
        """Return a group of copies of one rollout; None if the prompt leaves no room for a reply.

        A task with its own ``run_group``, which may not take a size, has a whole group of its own.
        """
        task = self._task
        runs_itself = type(task).run_group is not Task.run_group
        options: dict[str, Any] = {} if runs_itself else {"group_size": 1}
        self._announce("the rollout of the first example")
        group = await task.run_group(
            task.dataset[0],
            self._policy,
            group_id="preflight",
            seed=self._config.seed,
            **options,
        )
        rollout = group.rollouts[0]
        self._check_ended(rollout)
        if rollout.static:
            return group
        if not rollout.turns:
            self._warn(
                f"{self._field}.env.max_rollout_tokens = {task.config.env.max_rollout_tokens}: the "
                "prompt of the first example leaves no room for a completion; raise it"
            )
            return None
        self._read_prompts(rollout)
        self._warn(task.check_tools(list(rollout.turns[0].tools or ()), field=self._field))
        if not runs_itself:
            await self._compare_prompts(rollout)
            group.rollouts = [_copy(rollout, index) for index in range(task.config.group_size)]
        return group

    def _check_ended(self, rollout: Rollout) -> None:
        """Refuse the config if the rollout failed.

        Raises:
            UserCodeTimeout: the rollout took longer than its own limit.
            ConfigError: it failed otherwise. The algorithm sees each rollout as it ends, and is
                named if the failure is its own.
        """
        if rollout.status is RolloutStatus.TIMEOUT:
            raise UserCodeTimeout(str(rollout.error))
        if rollout.status.is_error():
            cause = str(rollout.error)
            algorithm = f"task {self._task.name}: {type(self._task.algorithm).__name__}."
            part = "algorithm" if cause.startswith(algorithm) else ""
            raise self._refusal(cause, part, traceback=rollout.traceback)

    def _read_prompts(self, rollout: Rollout) -> None:
        """Check the prompts of all turns, and keep the first."""
        tokenizer = self._policy.tokenizer
        prompts = [str(tokenizer.decode(turn.prompt_token_ids)) for turn in rollout.turns]
        for prompt, turn in zip(prompts, rollout.turns, strict=True):
            check_prompt(prompt, turn, self._task.renderer, field=self._field)
        self.result.prompt = prompts[0]
        self.result.prompt_token_ids = rollout.turns[0].prompt_token_ids

    async def _compare_prompts(self, rollout: Rollout) -> None:
        """Refuse a task whose second env of an example asks another thing than its first.

        Raises:
            ConfigError: the rollouts of a group would be compared, and can't be.
        """
        task = self._task
        if not task.needs_group or task.config.group_size == 1 or task.config.prompts_may_differ:
            return
        self._announce("the first prompt of a second env of the first example")
        made = await ask(functools.partial(task.make_envs, task.dataset[0], 1), timeout_s=None)
        message_env = made[0]
        if not isinstance(message_env, MessageEnv):
            return  # an agent writes its own prompts
        env = RendererEnv(message_env=message_env, renderer=task.renderer, config=task.config.env)
        try:
            await env.initial_prompt()
            prompt = env.prompt_token_ids
        finally:
            await env.close()
        if prompt is None:
            self._warn(f"{self._field}: {self._step} was not made: {env.error or env.status.value}")
            return
        first = rollout.turns[0].prompt_token_ids
        if np.array_equal(prompt, first):
            return
        decode = self._policy.tokenizer.decode
        texts = _where_they_differ(str(decode(first)), str(decode(prompt)))
        raise ConfigError(
            self._field,
            type(message_env).__name__,
            f"two envs of the first example begin with different prompts, {texts}, and the "
            f"rollouts of a group are compared with each other: {prompts_cure(task.name)}",
        )

    async def _score(self, group: RolloutGroup) -> None:
        """Have the task give the group its rewards and its credit.

        A group with too few scored rollouts is no fault of the config: no model wrote the replies.
        """
        task = self._task
        if type(task).score_group is not Task.score_group:
            self._announce("score_group of a group of scripted replies")
            await task.score_group(group)
            self._check_scored(group)
            return
        functions = ", ".join(task.rubric.names) or type(task.rubric).__name__
        self._announce(f"the rewards of the reply {REPLY!r} by {functions}")
        self._policy.stands_in = False
        await task.score_rewards(group)
        self._asks_a_model = self._policy.stands_in
        self._check_scored(group, "rubric")
        for rollout in group.scored[1::2]:
            rollout.amend(reward=0.0 if rollout.reward else 1.0)
        self._announce("the credit of a group of scripted replies")
        await task.give_credit(group)
        self._check_scored(group, "algorithm")

    def _validation_group(self, group: RolloutGroup) -> RolloutGroup | None:
        """Return a group as the task's validation scores them, of copies of a rollout.

        Return None if the task has no validation, if it runs groups in its own way, or if scoring
        ``group`` tries the same: no reward depends on the size of a group, or both sizes are equal.
        """
        task = self._task
        schedule = task.config.validation_schedule or self._config.validation
        is_measured = task.validation is not None and schedule.every > 0
        if not is_measured or type(task).run_group is not Task.run_group:
            return None
        scores_rewards = type(task).score_group is Task.score_group
        has_that_size = schedule.attempts == len(group.rollouts)
        rubric = task.validation_rubric
        if rubric is None and scores_rewards and (has_that_size or not task.rubric.compares_group):
            return None
        copies = [_copy(group.rollouts[0], index) for index in range(schedule.attempts)]
        return replace(group, rollouts=copies)

    async def _score_validation(self, group: RolloutGroup) -> None:
        """Have the task reward a group as large as those of its validation."""
        attempts = len(group.rollouts)
        self._announce(
            f"the rewards of the reply {REPLY!r} in a group of the validation, whose size is "
            f"validation.attempts = {attempts}"
        )
        task = self._task
        if task.validation_rubric is None:
            await task.score_rewards(group)
            self._check_scored(group, "rubric")
        else:
            await task.score_rewards(group, rubric=task.validation_rubric)
            self._check_scored(group, "validation_rubric")

    def _check_scored(self, group: RolloutGroup, part: str = "") -> None:
        """Refuse the config if a rollout of the group failed while it was scored.

        Args:
            part: part of the task that scored it; "" for the task itself.
        """
        for rollout in group.rollouts:
            if rollout.status is RolloutStatus.ERROR:
                raise self._refusal(str(rollout.error), part, traceback=rollout.traceback)

    def _filter(self, group: RolloutGroup) -> None:
        self._announce("the filters")
        for path, entry in self._config.filters():
            kind = built_class(entry).__name__
            with user_code(path, kind, "it failed on a group of scripted replies"):
                matches_of(build_with(entry, self._context), group)

    async def _try_replies(self, group: RolloutGroup) -> None:
        """Try further replies, and keep the warnings about them."""
        task = self._task
        replies = self._replies
        self._warn(replies.thoughts_warning(self.result.prompt_token_ids))
        # A scripted verdict says nothing of a row's answer.
        answers = None if self._asks_a_model else await replies.try_answers()
        if answers is not None:
            knows_answers = type(task).known_answer is not Task.known_answer
            self.result.lacks_answers = knows_answers and answers.count == 0
            self._warn(replies.answers_warning(answers))
        turns = group.rollouts[0].turns
        if not turns:
            return
        try:
            self._warn(await replies.tool_warning(turns[0]))
        except Exception as error:  # noqa: BLE001 - only this check makes such a call
            self._warn(f"{self._field}: no tool was tried: {cause_of(error)}")

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self.result.warnings.append(warning)

    def _refusal(self, cause: str, part: str = "", *, traceback: str = "") -> ConfigError:
        """Return the error that refuses the config because of what was tried.

        Args:
            part: part of the task at fault; "" for the task itself.
            traceback: frames of the user's code.
        """
        task = self._task
        kind = type(getattr(task, part) if part else task).__name__
        path = f"{self._field}.{part}" if part else self._field
        fault = f"{self._step}: {cause.removeprefix(f'task {task.name}: ')}"
        if part == "rubric" and "KeyError: " in cause:
            fault += self._columns_of_first_row()
        if not traceback:
            return ConfigError(path, kind, f"{fault}; {CURE}")
        # Beside the fault, and before its traceback, the cure would read as if this check were at
        # fault.
        return ConfigError(path, kind, fault, lines=[*traceback.splitlines(), f"({CURE})"])

    def _columns_of_first_row(self) -> str:
        """Return the end of an error about a missing column; "" if the row has no columns."""
        try:
            row = self._task.dataset[0].env_input
        except Exception:  # noqa: BLE001 - of a user's dataset
            return ""
        if not isinstance(row, dict) or not row:
            return ""
        return f"; the row has {', '.join(repr(text_of(name)) for name in row)}"


def _where_they_differ(first: str, second: str) -> str:
    """Return the parts of two texts in which they differ, with a few characters around them."""
    start = len(os.path.commonprefix([first, second]))
    start = max(start - 12, 0)
    parts = [f"'{text_of(text[start : start + SHOWN_CHARACTERS])}'" for text in (first, second)]
    return " and ".join(parts)


def _copy(rollout: Rollout, index: int) -> Rollout:
    """Return a copy of the rollout that has another index in its group."""
    turns, samples = copy.deepcopy((rollout.turns, rollout.samples))
    copied = replace(rollout, index_in_group=index, turns=turns, samples=samples)
    for sample in samples:
        sample.rollout_id = copied.rollout_id
    return copied
