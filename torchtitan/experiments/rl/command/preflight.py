"""Builds once, before any process is spawned, what a run builds in its own process, and throws it away.

Rubrics, algorithms, samplers, datasets, filters, renderer and tokenizer check themselves when they are built. Built here, they
refuse a config by its field, also under ``--dry-run``.
"""

import asyncio
import contextlib
import copy
import json
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any, ClassVar, cast

import numpy as np
from renderers import Renderer

from torchtitan.experiments.rl.ask.call import ask, sentence
from torchtitan.experiments.rl.command.checks import call_part
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.configurable import BuildContext, build_with, takes_context
from torchtitan.experiments.rl.data.dataset import fault_of_example
from torchtitan.experiments.rl.data.rows import RowDataset
from torchtitan.experiments.rl.envs.renderer import (
    AUTO,
    build_context,
    control_tokens,
    load_tokenizer,
    renderer_name,
    template_turn_end,
)
from torchtitan.experiments.rl.envs.tool_calls import call_ids, example_call
from torchtitan.experiments.rl.errors import (
    ConfigError,
    UserCodeError,
    UserCodeTimeout,
    cause_of,
    inside,
    user_code,
    users_traceback,
)
from torchtitan.experiments.rl.observability.console import FEW_EXAMPLES, counted_examples
from torchtitan.experiments.rl.printable import printable_line, text_of
from torchtitan.experiments.rl.rollouts.filters import matches_of
from torchtitan.experiments.rl.rollouts.types import (
    DataSample,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RolloutTurn,
)
from torchtitan.experiments.rl.rubrics.rubric import Rubric, looks_for_thoughts
from torchtitan.experiments.rl.tasks.scripted_policy import ScriptedPolicy
from torchtitan.experiments.rl.tasks.task import Task, build_part, part_at_fault


def build_parts(config: RunConfig) -> None:
    """Build what needs neither the model's folder nor a dataset: batcher, filters, task mix, rubrics and algorithms.

    Raises:
        ConfigError: one can't be built; the error names its field.
    """
    _built("batcher", config.batcher, config.batcher.build)
    for field, entry in config.filters():
        if not takes_context(built_class(entry)):
            _built(field, entry, entry.build)
    weights = {name: task.weight for name, task in config.tasks.items()}
    mix = _built("task_mix", config.task_mix, partial(config.task_mix.build, weights=weights))
    if (first := call_part("task_mix", mix, "next")) not in config.tasks:
        raise ConfigError(
            "task_mix", type(mix).__name__, f"its next gave {first!r}, which is no task"
        )
    for name, task in config.tasks.items():
        with inside(f"tasks.{name}"):
            build_part("rubric", task.rubric)
            if not takes_context(built_class(task.algorithm)):
                build_part("algorithm", task.algorithm)


def _built(field: str, config: Any, build: Callable[[], Any]) -> Any:
    """Return what ``build`` makes of a config that users may have written."""
    with user_code(field, built_class(config).__name__, "it can't be built"), inside(field):
        return build()


def build_tasks(
    config: RunConfig, policy: "PolicyTokenizer", *, left_out: Collection[str] = ()
) -> dict[str, Task]:
    """Build the tasks, and take a first example of each.

    Args:
        left_out: names of tasks that lack something on this machine.

    Returns:
        The tasks, by name: for the preflight, not for the run.

    Raises:
        ConfigError: one can't be built; the error names its field.
    """
    for field, entry in config.filters():
        if takes_context(built_class(entry)):
            _built(field, entry, partial(build_with, entry, policy.context))
    tasks: dict[str, Task] = {}
    texts = control_tokens(policy.tokenizer)
    for name, task_config in config.tasks.items():
        if name in left_out:
            continue
        field = f"tasks.{name}"
        build = partial(task_config.build, name=name, context=policy.context)
        task = tasks[name] = _built(field, task_config, build)
        if (
            type(task.algorithm).group_relative
            and type(task.rubric) is Rubric
            and not task.rubric.config.reward_fns
        ):
            cure = f"{type(task.algorithm).__name__} compares rewards, and without a function all are 0: name one"
            raise ConfigError(
                f"{field}.rubric.reward_fns",
                [],
                f"{cure}, such as Rubric.Config(reward_fns=[exact])",
            )
        for part in ("dataset", "validation"):
            if (dataset := getattr(task, part)) is None:
                continue
            kind = type(dataset).__name__
            with inside(field), part_at_fault(part, kind, "its __len__ failed"):
                if len(dataset) == 0:
                    raise ConfigError(part, kind, "has no examples")
            _example(f"{field}.{part}", dataset, "__getitem__", 0)
        first = _example(f"{field}.sampler", task.sampler, "next")
        call_part(field, task, "check_examples", field=field)
        call_part(field, task, "check_control_tokens", texts, field=field)
        limits = {
            "max_rollout_tokens": task_config.env.max_rollout_tokens,
            "max_model_len": config.generator.engine.max_model_len,
        }
        call_part(
            f"{field}.algorithm", task.algorithm, "check_example", first, field=field, **limits
        )
    return tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokenizer:
    """Tokenizer of the policy and the renderer built of it, read once for all checks."""

    tokenizer: Any
    context: BuildContext
    """What the run builds its tasks and filters with."""

    @property
    def renderer(self) -> Renderer:
        return self.context.renderer


def read_policy_tokenizer(config: RunConfig) -> PolicyTokenizer:
    """Load the policy's tokenizer, build the renderer, and compare both with the model. Its folder has been checked.

    Raises:
        ConfigError: no such renderer, the tokenizer can't be loaded, nothing says where the model's turn ends, or the folder
            names ids that the model does not have.
    """
    path = config.model.hf_assets_path
    try:
        with user_code("model.hf_assets_path", path, "its tokenizer can't be loaded"):
            tokenizer = load_tokenizer(path)
            context = build_context(config.renderer, path, seed=config.seed, tokenizer=tokenizer)
            highest = max(tokenizer.get_vocab().values())
    except ConfigError as error:
        if error.field != "tokenizer_path":
            raise
        raise ConfigError("model.hf_assets_path", path, error.cure) from error
    renderer = context.renderer
    vocab_size = context.vocab_size
    for name, task in config.tasks.items():
        if (last := max(task.sampling.stop_token_ids, default=0)) >= vocab_size:
            raise ConfigError(
                f"tasks.{name}.sampling.stop_token_ids",
                last,
                f"the model has {vocab_size} ids: name one of those",
            )
    if (last := max(renderer.get_stop_token_ids())) >= vocab_size:
        cure = f"it ends a turn at the id {last}, and the model has {vocab_size} ids: see eos_token_id in its config files"
        raise ConfigError("model.hf_assets_path", path, cure)
    if highest >= vocab_size:
        cure = f"its tokenizer has the id {highest}, and the model a vocab_size of {vocab_size}: they are of different models"
        raise ConfigError("model.hf_assets_path", path, cure)
    return PolicyTokenizer(tokenizer=tokenizer, context=context)


def _example(field: str, owner: Any, method: str, *arguments: Any) -> DataSample:
    example = call_part(field, owner, method, *arguments)
    fault: str | None = f"a {type(example).__name__}, want a DataSample"
    if isinstance(example, DataSample):
        found = fault_of_example(example)
        fault = found and f"an example whose {found}"
    if fault:
        raise ConfigError(field, type(owner).__name__, f"its {method} returned {fault}")
    return example


REPLY = "The answer is 42."
THOUGHT = "<think>\nBy heart.\n</think>\n\n42"
ANSWERS = 100
"""Maximum number of rows whose answer is tried as the reply."""
ANSWERS_S = 3.0
"""Time after which no further row's answer is tried, so that a slow judge does not hold up the run."""
ANSWER_FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "Answer: {}")
SHOWN_ROWS = 5
MOST_TURNS = 4
GRACE_S = 3.0
"""Beyond the limit, after which code that blocks without awaiting is left alone."""


def try_tasks(
    config: RunConfig, tasks: Mapping[str, Task], policy: PolicyTokenizer | None
) -> dict[str, "Trial"]:
    """Try each of ``tasks``, which were built for nothing else.

    Args:
        policy: what the tasks were built with; None where there are none.

    Returns:
        What was seen, by task; empty where ``user_code.preflight_timeout_s`` is 0.

    Raises:
        ConfigError: an env, a reward function, an algorithm, a filter or a setup failed; the error names its field.
    """
    limit_s = config.user_code.preflight_timeout_s
    if limit_s == 0 or policy is None:
        return {}
    # Where this process ends before it has taken them back, the shell prints its last words.
    script = (
        'while IFS= read -r line; do last=$line; done; [ -z "$last" ] || printf "%s\\n" "$last" >&2'
    )
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, text=True) as shell:
        assert shell.stdin is not None
        found = {
            name: Trial(config, task, f"tasks.{name}", shell.stdin, policy)
            for name, task in tasks.items()
        }
        try:
            for trial in found.values():
                trial.run_in_a_thread(limit_s)
        finally:
            _write_line(shell.stdin, "")
    return found


def _write_line(pipe: IO[str], line: str) -> None:
    with contextlib.suppress(OSError):  # a shell that has ended repeats nothing
        pipe.write(printable_line(line) + "\n")
        pipe.flush()


@dataclass(eq=False, slots=True)
class Trial:
    """Preflight of one task."""

    config: RunConfig
    task: Task
    field: str
    words: IO[str]
    policy: PolicyTokenizer
    doing: str = ""
    """Name of the part that is tried now."""
    prompt: str = ""
    """The first prompt, with its special tokens; empty where there was none."""
    prompt_token_ids: Sequence[int] | np.ndarray = ()
    """int32 [P]."""
    warning: str | None = None
    """Line about a part that could not be tried, and what to do about it."""

    answers_tried: int | None = None
    """Number of rows whose own answer was tried as the reply; None where the task is none of which answers are tried."""
    answers_warning: str | None = None
    """Rows whose own answer earns no more than an empty reply, in one line."""
    tool_warning: str | None = None
    """Fault of a made-up call of the first tool, or the reason that none was tried, in one line; None where it was answered."""
    thoughts_warning: str | None = None
    """Reward functions that look for a thought where there is none, in one line."""

    cure: ClassVar[str] = "user_code.preflight_timeout_s = 0 leaves this check out"

    def __post_init__(self) -> None:
        env = self.task.config.env
        self.task.config = replace(
            self.task.config, env=replace(env, max_turns=min(env.max_turns, MOST_TURNS))
        )

    def warnings(self) -> list[str]:
        """Return what a person should know before the run, one line each."""
        lines = (self.warning, self.answers_warning, self.thoughts_warning, self.tool_warning)
        return [line for line in lines if line is not None]

    def run_in_a_thread(self, limit_s: float) -> None:
        """In an event loop of its own, in a thread that is abandoned where it hangs."""
        ended = threading.Event()
        failures: list[BaseException] = []

        async def run() -> None:
            try:
                await ask(self.run, timeout_s=limit_s)
            except BaseException as error:
                failures.append(error)
            ended.set()  # here: closing the loop waits for threads that the code may have left

        threading.Thread(target=lambda: asyncio.run(run()), name="preflight", daemon=True).start()
        if not ended.wait(limit_s + GRACE_S):
            failures.append(
                UserCodeTimeout(
                    f"no answer within {limit_s:g} s: it blocks the event loop without awaiting"
                )
            )
        for failure in failures:
            if isinstance(failure.__cause__, ConfigError):
                raise failure.__cause__
            if not isinstance(failure, UserCodeTimeout):
                traceback = users_traceback(failure)
                raise self._refusal(sentence(failure), traceback=traceback) from None
            self.warning = (
                f"{self.field} was not tried to its end ({self.doing}: {sentence(failure)}): the run begins all the same; "
                "user_code.preflight_timeout_s sets this limit"
            )

    def _try(self, doing: str) -> None:
        """``doing``: what is tried from now on."""
        self.doing = doing
        ended = self._refusal("the command was killed, or this code called os._exit or crashed")
        _write_line(self.words, f"error: {ended}")

    async def run(self) -> None:
        task = self.task
        self._try("its setup")
        policy = ScriptedPolicy(self.policy.tokenizer, lambda rollout, turn: REPLY)
        await ask(task.setup, policy, timeout_s=None)
        try:
            group = await self._rollout(policy)
            if group is not None:
                await self._score(group)
                self._filter(group)
                self.thoughts_warning = self._thoughts_fault(policy)
                self.answers_warning = await self._answers_fault(policy)
                try:
                    self.tool_warning = await self._tool_fault(policy, group)
                except (
                    Exception
                ) as error:  # of a call that nobody but this check has made: it refuses no run
                    self.tool_warning = f"{self.field}: no tool was tried: {cause_of(error)}"
        except BaseException:
            with contextlib.suppress(UserCodeError):  # the first failure is the cause
                await ask(task.close, timeout_s=None)
            raise
        self._try("its close")
        await ask(task.close, timeout_s=None)

    async def _rollout(self, policy: ScriptedPolicy) -> RolloutGroup | None:
        """A group of copies of one rollout; None where nothing was sampled."""
        task = self.task
        own = type(task).run_group is not Task.run_group  # it may not take a size
        size: dict[str, Any] = {} if own else {"group_size": 1}
        self._try("the rollout of the first example")
        group = await task.run_group(
            task.dataset[0], policy, group_id="preflight", seed=self.config.seed, **size
        )
        rollout = group.rollouts[0]
        if rollout.status is RolloutStatus.TIMEOUT:
            raise UserCodeTimeout(str(rollout.error))
        if rollout.status.is_error():
            cause = str(rollout.error)
            by_algorithm = cause.startswith(f"task {task.name}: {type(task.algorithm).__name__}.")
            raise self._refusal(
                cause, "algorithm" if by_algorithm else "", traceback=rollout.traceback
            )
        if rollout.static:
            return group
        if not rollout.turns:
            limit = f"{self.field}.env.max_rollout_tokens = {task.config.env.max_rollout_tokens}"
            self.warning = f"{limit}: the prompt of the first example leaves no room for a completion; raise it"
            return None
        prompts = [str(policy.tokenizer.decode(turn.prompt_token_ids)) for turn in rollout.turns]
        for prompt, turn in zip(prompts, rollout.turns, strict=True):
            check_prompt(prompt, turn, task.renderer, field=self.field)
        self.prompt = prompts[0]
        self.prompt_token_ids = rollout.turns[0].prompt_token_ids
        if not own:
            group.rollouts = [_copy(rollout, index) for index in range(task.config.group_size)]
        return group

    async def _score(self, group: RolloutGroup) -> None:
        """Rewards, then credit."""
        task = self.task
        if type(task).score_group is not Task.score_group:
            self._try("score_group of a group of scripted replies")
            if (failure := await task.score_group(group)) is not None:
                raise self._refusal(failure, traceback=_first_traceback(group))
            return
        self._try(
            f"the rewards of the reply {REPLY!r} by {', '.join(task.rubric.names) or type(task.rubric).__name__}"
        )
        await task.score_rewards(group)
        for rollout in group.rollouts:
            if rollout.status is RolloutStatus.ERROR:
                raise self._refusal(str(rollout.error), "rubric", traceback=rollout.traceback)
        for rollout in group.scored[1::2]:
            rollout.amend(reward=0.0 if rollout.reward else 1.0)
        self._try("the credit of a group of scripted replies")
        if (failure := await task.give_credit(group)) is not None:
            raise self._refusal(failure, "algorithm", traceback=_first_traceback(group))

    async def _tool_fault(self, policy: ScriptedPolicy, group: RolloutGroup) -> str | None:
        """Have the scripted model call the first tool once, and return what went wrong, or why that could not be tried.

        The arguments are made up, so what fails is only warned of: a model makes up arguments too.
        """
        task, turns = self.task, group.rollouts[0].turns
        if type(task).run_group is not Task.run_group or not turns or not turns[0].tools:
            return None
        tool = turns[0].tools[0]
        name, arguments = example_call(tool)
        call = f"{name}({printable_line(json.dumps(arguments))})"
        self._try(f"the call {call}")
        ids = call_ids(task.renderer, turns[0].prompt_messages, turns[0].tools, name, arguments)
        if ids is None:
            return f"{self.field}: no tool was tried: the renderer does not write the call {call} so that it is read again"
        reply = str(policy.tokenizer.decode(ids))
        scripted = copy.copy(policy)
        scripted.reply = lambda rollout, turn: REPLY if turn else reply
        called = await task.run_group(
            task.dataset[0], scripted, group_id="preflight", seed=self.config.seed, group_size=1
        )
        (rollout,) = called.rollouts
        if not rollout.status.is_error() and type(task).score_group is Task.score_group:
            await task.score_rewards(called)
        if rollout.status.is_error():
            cause = str(rollout.error).removeprefix(f"task {task.name}: ")
            return f"{self.field}: after the call {call} the rollout ended as {rollout.status.name}: {cause}"
        if rollout.status is RolloutStatus.TRUNCATED_LENGTH:
            return f"{self.field}: no tool was tried: the call {call} takes more tokens than an answer may have"
        turn = rollout.turns[0]
        if {"bad_calls", "failed_calls"} & turn.reward_components.keys():
            return f"{self.field}: the call {call} was answered with {text_of(turn.env_messages[0]['content'], 200)!r}"
        return None

    def _thoughts_fault(self, policy: ScriptedPolicy) -> str | None:
        """Return which reward functions look for a thought in the completion, if this renderer leaves none in it."""
        names = [
            name for name, entry in self.task.rubric.functions.items() if looks_for_thoughts(entry)
        ]
        if not names:
            return None
        reply = policy.tokenizer.encode(THOUGHT, add_special_tokens=False)
        parsed = self.task.renderer.parse_response(
            reply, prompt_ids=[int(token) for token in self.prompt_token_ids]
        )
        if "<think>" in parsed.content:
            return None
        return (
            f"{self.field}.rubric: {', '.join(names)}: looks for <think> in the completion, which is the reply without its "
            'thought: RewardFn(fn, takes="rollout") gives it the rollout, whose turns[-1].assistant_message has the thought as '
            '"reasoning_content"'
        )

    async def _answers_fault(self, policy: ScriptedPolicy) -> str | None:
        """Try the answer of each of the first rows as the reply, and return what is wrong with their rewards.

        Each should earn more than an empty reply does, written alone or in one of the usual forms.
        """
        task = self.task
        own = (
            type(task).run_group is not Task.run_group
            or type(task).score_group is not Task.score_group
        )
        if own or task.rubric.compares_group:
            return None
        end = asyncio.get_running_loop().time() + ANSWERS_S
        faults: dict[str, str] = {}
        tried = 0
        self.answers_tried = 0 if type(task).known_answer is not Task.known_answer else None
        for index in range(min(len(task.dataset), ANSWERS)):
            sample = task.dataset[index]
            answer = task.known_answer(sample)
            if answer is None:
                continue
            place = (
                task.dataset.rows.place(index)
                if isinstance(task.dataset, RowDataset)
                else f"row {index}"
            )
            self._try(f"the reward of the answer of {place}")
            if (fault := await self._answer_fault(policy, sample, answer)) is not None:
                faults[place] = fault
            self.answers_tried = tried = tried + 1
            if asyncio.get_running_loop().time() > end:
                break
        if not faults:
            return None
        places = ", ".join([*faults][:SHOWN_ROWS]) + ", ..." * (len(faults) > SHOWN_ROWS)
        first, cause = next(iter(faults.items()))
        functions = ", ".join(task.rubric.names) or type(task.rubric).__name__
        return (
            f"{self.field}.rubric: of the first {tried:,} rows {len(faults):,} are not rewarded for their own "
            f"answer ({places}); {first}: {cause}; see to the row's answer, and to how {functions} compares it with a text"
        )

    async def _answer_fault(
        self, policy: ScriptedPolicy, sample: DataSample, answer: str
    ) -> str | None:
        """Return why a reply that is the answer teaches nothing; None where it earns more than an empty one."""
        empty = await self._reward_of("", policy, sample)
        if isinstance(empty, str) or empty is None:
            return empty
        first: float | None = None
        for form in ANSWER_FORMS:
            reward = await self._reward_of(form.format(answer), policy, sample)
            if isinstance(reward, str):
                return reward
            if reward is None and first is None:  # the limits of the rollout cut it off
                return None
            if reward is not None and reward > empty:
                return None
            first = reward if first is None else first
        return f"the reply {text_of(answer)!r} earns {first:g}, and an empty reply {empty:g}"

    async def _reward_of(
        self, reply: str, policy: ScriptedPolicy, sample: DataSample
    ) -> float | str | None:
        """Return the reward of a reply, why it has none, or None where it was cut off."""
        scripted = copy.copy(policy)
        scripted.reply = lambda rollout, turn: reply
        group = await self.task.run_group(
            sample, scripted, group_id="preflight", seed=self.config.seed, group_size=1
        )
        await self.task.score_rewards(group)
        (rollout,) = group.rollouts
        if rollout.status.is_error():
            return str(rollout.error)
        return None if rollout.status.is_truncated() else rollout.reward

    def _filter(self, group: RolloutGroup) -> None:
        self._try("the filters")
        for field, entry in self.config.filters():
            with user_code(
                field, built_class(entry).__name__, "it failed on a group of scripted replies"
            ):
                matches_of(build_with(entry, self.policy.context), group)

    def _refusal(self, cause: str, part: str = "", *, traceback: str = "") -> ConfigError:
        """``part`` of the task is at fault; "": the task itself."""
        kind = type(getattr(self.task, part) if part else self.task).__name__
        cause = cause.removeprefix(f"task {self.task.name}: ")
        fault = f"{self.doing}: {cause}"
        if part == "rubric" and "KeyError: " in cause and (columns := self._columns()):
            fault += f"; the row has {columns}"
        field, lines = f"{self.field}.{part}".rstrip("."), traceback.splitlines()
        if not lines:
            return ConfigError(field, kind, f"{fault}; {self.cure}")
        # Beside the fault, and before its traceback, the hint would read as if the check were at fault.
        return ConfigError(field, kind, fault, lines=[*lines, f"({self.cure})"])

    def _columns(self) -> str:
        """Return the columns of the first row, as an error names them; empty where it is no row of columns."""
        with contextlib.suppress(Exception):  # of a user's dataset
            row = self.task.dataset[0].env_input
            if isinstance(row, dict):
                return ", ".join(repr(text_of(name)) for name in row)
        return ""


def _first_traceback(group: RolloutGroup) -> str:
    return next((rollout.traceback for rollout in group.rollouts if rollout.traceback), "")


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
    cure = (
        "take a model whose template has a place for it, or name the renderer of the model's family"
    )
    if turn.tools and not getattr(renderer, "supports_tools", True):
        seen = f"{field} offers tools, and this renderer reads no calls from replies"
        raise ConfigError(
            "renderer.name",
            name,
            f"{seen}: name the renderer of the model's family; a model without one can't call",
        )
    for tool in turn.tools or ():
        called = cast(dict, tool).get("function", tool)["name"]
        if called not in prompt:
            raise ConfigError(
                "renderer.name",
                name,
                f"the prompt of {field} does not have its tool {called!r}: {cure}",
            )
    at = 0
    for message in turn.prompt_messages:
        content = message["content"]
        if message["role"] == "assistant" or not isinstance(
            content, str
        ):  # what was sampled may be changed on purpose
            continue
        if (found := prompt.find(content.strip(), at)) < 0:
            what = "in another place" if content.strip() in prompt else "not"
            text = content.strip()[:40]
            raise ConfigError(
                "renderer.name",
                name,
                f"the prompt of {field} has the {message['role']}'s {text!r} {what}: {cure}",
            )
        at = found + len(content.strip())


PRETRAINED = 20_000_000
"""Parameters from which a model is one of the hub, not a tiny one that was made for tests."""
HIGHEST_RATE = 6e-5
ADAPTERS_RATE = 10
"""Times that of the whole model, for adapters."""
LOWEST_ADAPTERS_RATE = 5e-6
"""Rate below which adapters of a pretrained model hardly learn; 1e-6 is usual for the whole model."""


def learning_rate_warning(
    config: RunConfig, parameters: int, *, whole_model_rate: float | None = None
) -> str | None:
    """Return what a person should know of the learning rate, in one line.

    Args:
        whole_model_rate: at which the named config trains the whole model; None where it does not.
    """
    rate, adapters = config.trainer.optimizer.lr, config.trainer.lora is not None
    pretrained = parameters >= PRETRAINED
    too_low = rate == whole_model_rate or (pretrained and rate < LOWEST_ADAPTERS_RATE)
    if adapters and too_low:
        return (
            f"trainer.optimizer.lr = {rate:g}: that is a rate of full training, and adapters (trainer.lora) want about "
            f"{ADAPTERS_RATE} times as much: --trainer.optimizer.lr {ADAPTERS_RATE * rate:g}"
        )
    if not pretrained:
        return None
    if rate <= HIGHEST_RATE * (ADAPTERS_RATE if adapters else 1):
        return None
    return (
        f"trainer.optimizer.lr = {rate:g}: at such a rate a pretrained model of {parameters / 1e6:,.0f}M parameters forgets "
        "what it knows; 1e-6 is usual, and up to 5e-5 for models of 0.1B"
    )


def validation_warnings(config: RunConfig, tasks: Mapping[str, Task]) -> list[str]:
    """Return a line for each task whose evaluations have so few examples that their reward says little."""
    lines = []
    for name, task in tasks.items():
        schedule = task.config.validation_schedule or config.validation
        if task.validation is None or schedule.every == 0:
            continue
        count = min(schedule.examples, len(task.validation))
        if count < FEW_EXAMPLES:
            lines.append(
                f"tasks.{name}.validation: the reward of {counted_examples(count)} says little, for chance alone moves it; "
                f"{FEW_EXAMPLES} or more say more"
            )
    return lines


def turn_end_warning(config: RunConfig, policy: PolicyTokenizer) -> str | None:
    """Return what a person should know where the model may end its turns with a text, which no stop token is."""
    tokenizer = policy.tokenizer
    if not tokenizer.chat_template or template_turn_end(tokenizer) is not None:
        return None
    open_ended = [
        name
        for name, task in config.tasks.items()
        if not task.sampling.stop and not task.sampling.stop_token_ids
    ]
    if not open_ended:
        return None
    return (
        f"model.hf_assets_path = {config.model.hf_assets_path!r}: its chat template ends the model's turn with no token of its "
        "tokenizer; if the model writes a text there, replies run to their limit: name that text in "
        f"tasks.{open_ended[0]}.sampling.stop"
    )


def _loss_said(config: RunConfig) -> str:
    """Return the loss of tokens with an advantage: its class, corrections, and the weight of the distance to a reference."""
    loss, reference = config.trainer.loss, config.trainer.reference
    distance = 0 if reference is None else reference.kl_coef
    parts = [built_class(part).__name__ for part in (loss.rl, *loss.corrections)]
    return ", ".join(
        [*parts, f"KL to the reference x {distance:g}" if distance else "no KL to a reference"]
    )


def shown_tasks(
    config: RunConfig, tried: Mapping[str, Trial], policy: PolicyTokenizer | None
) -> list[str]:
    """Return lines for people, safe to print.

    Args:
        tried: what the preflight saw of the tasks that it could try.
        policy: None where its folder is not on this machine.
    """
    optimizer, schedule = config.trainer.optimizer, config.trainer.lr_scheduler
    lines = [
        f"weights        {config.model.hf_assets_path}",
        f"learning rate  {optimizer.lr:g}, {schedule.warmup_steps} steps of warm-up",
        f"loss           {_loss_said(config)}",
    ]
    if policy is not None:
        renderer = policy.renderer
        chosen = " (auto: the one that fits the tokenizer)" * (config.renderer.name == AUTO)
        lines.append(f"renderer       {renderer_name(renderer)}{chosen}")
        stops = [
            f"{policy.tokenizer.convert_ids_to_tokens(token)} ({token})"
            for token in renderer.get_stop_token_ids()
        ]
        lines.append(f"turn ends      at {', '.join(stops)}")
    for name, task in config.tasks.items():
        parts = f"{built_class(task).__name__}, {built_class(task.algorithm).__name__}, groups of {task.group_size}"
        limits = f"{task.env.max_turns} turns and {task.env.max_rollout_tokens:,} tokens a rollout at most"
        lines.append(f"task           {name}: {parts}, {limits}")
        if more := [*map(repr, task.sampling.stop), *map(str, task.sampling.stop_token_ids)]:
            lines.append(f"turn ends      of {name} at {', '.join(more)} too")
        trial = tried.get(name)
        if trial is not None and trial.prompt:
            ids = trial.prompt_token_ids
            lines.append(
                f"prompt         the first of {name}, {len(ids)} tokens, as the model sees it:"
            )
            lines += [f"  | {line}" for line in trial.prompt.split("\n")]
            lines.append(f"tokens         {' '.join(map(str, ids))}")
        if trial is not None and trial.answers_tried == 0:
            lines.append(f"answers        of {name}: no column 'answer': no known answer was tried")
    return [printable_line(line) for line in lines]
