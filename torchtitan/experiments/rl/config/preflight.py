"""Tries each task once before a run begins: a rollout with a scripted reply, its rewards, its credit, and the run's filters.

In the command's own process, with the first example of the task's dataset and one env:

1. ``Task.setup``; ``make_envs`` for one env; a rollout in which every completion is ``REPLY``, of at most ``MOST_TURNS`` turns;
2. a group of ``group_size`` rollouts, all copies of that one: the rubric rewards it;
3. every other reward is changed, so that there is something to compare, and the algorithm gives credit;
4. the run's filters look at the group; ``Task.close``.

What fails refuses the config, by its field. Where code ends this process (``os._exit``, a segmentation fault), a shell that
outlives it says what was tried. What takes longer than ``user_code.preflight_timeout_s`` refuses nothing, because a sandbox may
take minutes to start: the command prints a warning, and the run begins.
"""

import asyncio
import contextlib
import copy
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from renderers import Renderer

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.user_faults import user_code
from torchtitan.experiments.rl.envs.renderer import renderer_name
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.rollouts.filters import matches_of
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutGroup, RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.tasks.group_score import give_credit
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.user_code.calls import UserCodeError, UserCodeTimeout, call_bounded, call_user
from torchtitan.experiments.rl.user_code.gate import sentence

REPLY = "The answer is 42."
MOST_TURNS = 4
GRACE_S = 3.0
"""Beyond the limit, after which code that blocks without awaiting is left alone."""


@dataclass(kw_only=True, slots=True)
class Tried:
    """What was seen of a task."""

    prompt: str = ""
    """The first prompt, with its special tokens; empty where there was none."""
    prompt_token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [P]."""
    warning: str | None = None
    """What could not be tried, in one line, and what to do about it."""


def try_tasks(config: RunConfig, tasks: Mapping[str, Task]) -> dict[str, Tried]:
    """Try each of ``tasks``, which were built for nothing else.

    Returns:
        What was seen, by task; empty where ``user_code.preflight_timeout_s`` is 0.

    Raises:
        ConfigError: an env, a reward function, an algorithm, a filter or a setup failed; the error names its field.
    """
    limit_s = config.user_code.preflight_timeout_s
    if limit_s == 0:
        return {}
    found = {}
    with _last_words() as words:
        for name, task in tasks.items():
            trial = _Trial(config, task, f"tasks.{name}", words)
            found[name] = _in_a_thread(trial, limit_s)
    return found


class _LastWords:
    """What a shell prints on stderr where this process ends before it has taken them back."""

    def __init__(self, shell: subprocess.Popen):
        assert shell.stdin is not None
        self._pipe = shell.stdin

    def are(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a shell that has ended repeats nothing
            self._pipe.write(printable_line(line).encode() + b"\n")
            self._pipe.flush()


@contextlib.contextmanager
def _last_words() -> Iterator[_LastWords]:
    script = 'while IFS= read -r line; do last=$line; done; [ -z "$last" ] || printf "%s\\n" "$last" >&2'
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE) as shell:
        words = _LastWords(shell)
        try:
            yield words
        finally:
            words.are("")


def _in_a_thread(trial: "_Trial", limit_s: float) -> Tried:
    """In an event loop of its own, in a thread that is abandoned where it hangs."""
    ended = threading.Event()
    failures: list[BaseException] = []

    async def run() -> None:
        try:
            await call_bounded(trial.run, timeout_s=limit_s)
        except BaseException as error:
            failures.append(error)
        ended.set()  # here: closing the loop waits for threads that the code may have left

    threading.Thread(target=lambda: asyncio.run(run()), name="preflight", daemon=True).start()
    if not ended.wait(limit_s + GRACE_S):
        failures.append(UserCodeTimeout(f"no answer within {limit_s:g} s: it blocks the event loop without awaiting"))
    for failure in failures:
        if isinstance(failure.__cause__, ConfigError):
            raise failure.__cause__
        if not isinstance(failure, UserCodeTimeout):
            raise ConfigError(trial.field, trial.name, f"{trial.doing}: {sentence(failure)}; {trial.cure}") from failure
        trial.found.warning = (
            f"{trial.field} was not tried to its end ({trial.doing}: {sentence(failure)}): the run begins all the same; "
            "user_code.preflight_timeout_s sets this limit"
        )
    return trial.found


class _Trial:
    """One task's."""

    cure = "user_code.preflight_timeout_s = 0 leaves this check out"

    def __init__(self, config: RunConfig, task: Task, field: str, words: _LastWords):
        self._config, self._task, self.field, self._words = config, task, field, words
        self.name = type(task).__name__
        self.found = Tried()
        self.doing = "its setup"
        env = replace(task.config.env, max_turns=min(task.config.env.max_turns, MOST_TURNS))
        task.config = replace(task.config, env=env)

    @property
    def doing(self) -> str:
        """What is being tried."""
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing = doing
        ended = "the command was killed, or this code called os._exit or crashed"
        self._words.are(f"error: {self.field} = {self.name!r}: {doing}: {ended}; {self.cure}")

    async def run(self) -> None:
        task = self._task
        policy = ScriptedPolicy(self._config.model.hf_assets_path, lambda rollout, turn: REPLY)
        await call_user(task.setup, policy, timeout_s=None)
        try:
            group = await self._rollout(policy)
            if group is not None:
                await self._score(group)
                self._filter(group, vocab_size=len(policy.tokenizer))
        except BaseException:
            with contextlib.suppress(UserCodeError):  # the first failure is the cause
                await call_user(task.close, timeout_s=None)
            raise
        self.doing = "its close"
        await call_user(task.close, timeout_s=None)

    async def _rollout(self, policy: ScriptedPolicy) -> RolloutGroup | None:
        """A group of copies of one rollout; None where nothing was sampled."""
        task = self._task
        own = type(task).run_group is not Task.run_group  # it may not take a size
        size: dict[str, Any] = {} if own else {"group_size": 1}
        self.doing = "the rollout of the first example"
        group = await task.run_group(task.dataset[0], policy, group_id="preflight", seed=self._config.seed, **size)
        rollout = group.rollouts[0]
        if rollout.status is RolloutStatus.TIMEOUT:
            raise UserCodeTimeout(str(rollout.error))
        if rollout.status.is_error():
            cause = str(rollout.error)
            algorithm = f"task {task.name}: {type(task.algorithm).__name__}."
            if cause.startswith(algorithm):
                self._refuse("algorithm", task.algorithm, cause.removeprefix(f"task {task.name}: "))
            raise ConfigError(self.field, self.name, f"{self.doing} failed: {cause}; {self.cure}")
        if rollout.static:
            return group
        if not rollout.turns:
            limit = f"{self.field}.env.max_rollout_tokens = {task.config.env.max_rollout_tokens}"
            self.found.warning = f"{limit}: the prompt of the first example leaves no room for a completion; raise it"
            return None
        for prompt, turn in zip(policy.prompts, rollout.turns, strict=False):
            check_prompt(prompt, turn, task.renderer, field=self.field)
        self.found.prompt = policy.prompts[0]
        self.found.prompt_token_ids = rollout.turns[0].prompt_token_ids
        if not own:
            group.rollouts = [_copy(rollout, index) for index in range(task.config.group_size)]
        return group

    async def _score(self, group: RolloutGroup) -> None:
        """Rewards, then credit."""
        task = self._task
        if type(task).score_group is not Task.score_group:
            self.doing = "score_group of a group of scripted replies"
            failure = await task.score_group(group)
            if failure is not None:
                raise ConfigError(self.field, self.name, f"{self.doing} failed: {failure}; {self.cure}")
            return
        self.doing = f"the rewards of the reply {REPLY!r} by {', '.join(task.rubric.names) or type(task.rubric).__name__}"
        await task.score_rewards(group)
        for rollout in group.rollouts:
            if rollout.status is RolloutStatus.ERROR:
                self._refuse("rubric", task.rubric, str(rollout.error))
        for rollout in group.scored[1::2]:
            rollout.reward = 0.0 if rollout.reward else 1.0
        self.doing = "the credit of a group of scripted replies"
        failure = give_credit(task.algorithm, group, timeout_s=task.config.env.rollout_timeout_s)
        if failure is not None:
            self._refuse("algorithm", task.algorithm, failure.removeprefix(f"task {task.name}: "))

    def _filter(self, group: RolloutGroup, *, vocab_size: int) -> None:
        self.doing = "the filters"
        for slot in ("pre_batch_filters", "post_batch_filters"):
            for index, entry in enumerate(getattr(self._config, slot)):
                with user_code(f"{slot}[{index}]", built_class(entry).__name__, "it failed on a group of scripted replies"):
                    built = entry.build()
                    built.vocab_size = vocab_size
                    matches_of(built, group)

    def _refuse(self, part: str, of: Any, cause: str) -> None:
        raise ConfigError(f"{self.field}.{part}", type(of).__name__, f"{self.doing}: {cause}; {self.cure}")


def _copy(rollout: Rollout, index: int) -> Rollout:
    turns, samples = copy.deepcopy((rollout.turns, rollout.samples))
    copied = replace(rollout, index_in_group=index, turns=turns, samples=samples)
    for sample in samples:
        sample.rollout_id = copied.rollout_id
    return copied


def check_prompt(prompt: str, turn: RolloutTurn, renderer: Renderer, *, field: str) -> None:
    """Refuse a renderer that leaves out of a prompt what the env gave.

    Args:
        prompt: as the model sees it.
        field: the task's.

    Raises:
        ConfigError: the text of a message, or the name of a tool, is not in the prompt, messages are in another order, or calls
            of tools can't be read from replies.
    """
    name = renderer_name(renderer)
    cure = "take a model whose template has a place for it, or name the renderer of the model's family"
    if turn.tools and not getattr(renderer, "supports_tools", True):
        seen = f"{field} offers tools, and this renderer reads no calls from replies"
        raise ConfigError(
            "renderer.name", name, f"{seen}: name the renderer of the model's family; a model without one can't call"
        )
    for tool in turn.tools or ():
        called = cast(dict, tool).get("function", tool)["name"]
        if called not in prompt:
            raise ConfigError("renderer.name", name, f"the prompt of {field} does not have its tool {called!r}: {cure}")
    at = 0
    for message in turn.prompt_messages:
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(content, str):  # what was sampled may be changed on purpose
            continue
        if (found := prompt.find(content.strip(), at)) < 0:
            what = "in another place" if content.strip() in prompt else "not"
            text = content.strip()[:40]
            raise ConfigError(
                "renderer.name", name, f"the prompt of {field} has the {message['role']}'s {text!r} {what}: {cure}"
            )
        at = found + len(content.strip())
