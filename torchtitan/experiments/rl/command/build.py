"""Builds, before any process is spawned, what a run builds in its own process.

Rubrics, algorithms, samplers, datasets, filters, renderer and tokenizer check themselves when they
are built. Built here, they refuse a config by its field, also under ``--dry-run``.

    build_parts             what needs neither the model's folder nor a dataset; thrown away
    read_policy_tokenizer   tokenizer and renderer of the model's folder
    build_tasks             tasks and filters; the preflight tries the tasks (`preflight.py`)
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from renderers import Renderer
from transformers import PreTrainedTokenizerBase

from torchtitan.experiments.rl.command.checks import call_part
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.configurable import BuildContext, build_with, takes_context
from torchtitan.experiments.rl.data.dataset import fault_of_example
from torchtitan.experiments.rl.envs.renderer import build_context, load_tokenizer
from torchtitan.experiments.rl.envs.special_texts import control_tokens
from torchtitan.experiments.rl.envs.stop_tokens import stop_texts, template_turn_end
from torchtitan.experiments.rl.errors import ConfigError, inside, user_code
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.task import Task, build_part, part_at_fault


def build_parts(config: RunConfig) -> None:
    """Build the components that need neither the model's folder nor a dataset.

    They are the batcher, the task mix, and the filters, rubrics and algorithms that take no
    `BuildContext`.

    Raises:
        ConfigError: one can't be built; the error names its field.
    """
    _build("batcher", config.batcher, config.batcher.build)
    for field, entry in config.filters():
        if not takes_context(built_class(entry)):
            _build(field, entry, entry.build)
    _check_task_mix(config)
    for name, task in config.tasks.items():
        with inside(f"tasks.{name}"):
            build_part("rubric", task.rubric)
            if task.validation_rubric is not None:
                build_part("validation_rubric", task.validation_rubric)
            if not takes_context(built_class(task.algorithm)):
                build_part("algorithm", task.algorithm)


def _check_task_mix(config: RunConfig) -> None:
    weights = {name: task.weight for name, task in config.tasks.items()}
    mix = _build("task_mix", config.task_mix, partial(config.task_mix.build, weights=weights))
    first = call_part("task_mix", mix, "next")
    if first not in config.tasks:
        cure = f"its next gave {first!r}, which is no task"
        raise ConfigError("task_mix", type(mix).__name__, cure)


def _build(field: str, config: Any, build: Callable[[], Any]) -> Any:  # noqa: ANN401 - any part
    """Return what ``build`` makes of a config that users may have written.

    Raises:
        ConfigError: ``build`` failed; the error names the field.
    """
    with user_code(field, built_class(config).__name__, "it can't be built"), inside(field):
        return build()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokenizer:
    """Tokenizer of the policy and the renderer built of it, read once for all checks."""

    tokenizer: Any
    context: BuildContext
    """Context that the run builds its tasks and filters with."""

    @property
    def renderer(self) -> Renderer:
        return self.context.renderer


def read_policy_tokenizer(config: RunConfig) -> PolicyTokenizer:
    """Load the policy's tokenizer, build its renderer, and compare both with the model.

    The model's folder has been checked (`checks.check_model_folder`).

    Raises:
        ConfigError: no renderer has this name, the tokenizer can't be loaded, nothing says where
            the model's turn ends, a token id is none of the model's, or the chat template ends a
            turn with a text at which no completion ends.
    """
    path = config.model.hf_assets_path
    try:
        with user_code("model.hf_assets_path", path, "its tokenizer can't be loaded"):
            tokenizer = load_tokenizer(path)
            context = build_context(config.renderer, path, seed=config.seed, tokenizer=tokenizer)
            highest_id = max(tokenizer.get_vocab().values())
    except ConfigError as error:
        if error.field != "tokenizer_path":
            raise
        raise ConfigError("model.hf_assets_path", path, error.cure) from error
    _check_token_ids(config, context, highest_id)
    _check_turn_end(config, context, tokenizer)
    return PolicyTokenizer(tokenizer=tokenizer, context=context)


def _check_token_ids(config: RunConfig, context: BuildContext, highest_id: int) -> None:
    """Refuse stop tokens and a tokenizer with ids that the model does not have.

    Args:
        highest_id: highest token id of the tokenizer.

    Raises:
        ConfigError: an id is not below the model's ``vocab_size``.
    """
    vocab_size = context.vocab_size
    for name, task in config.tasks.items():
        highest_stop = max(task.sampling.stop_token_ids, default=0)
        if highest_stop >= vocab_size:
            cure = f"the model has {vocab_size} ids: name one of those"
            raise ConfigError(f"tasks.{name}.sampling.stop_token_ids", highest_stop, cure)
    cure = ""
    turn_end = max(context.renderer.get_stop_token_ids())
    if turn_end >= vocab_size:
        cure = (
            f"it ends a turn at the id {turn_end}, and the model has {vocab_size} ids: see "
            "eos_token_id in its config files"
        )
    elif highest_id >= vocab_size:
        cure = (
            f"its tokenizer has the id {highest_id}, and the model a vocab_size of {vocab_size}: "
            "they are of different models"
        )
    if cure:
        raise ConfigError("model.hf_assets_path", config.model.hf_assets_path, cure)


def build_tasks(
    config: RunConfig, policy: PolicyTokenizer, *, left_out: Collection[str] = ()
) -> dict[str, Task]:
    """Build the tasks for these checks, take a first example of each, and build the filters.

    Args:
        left_out: names of tasks that lack something on this machine.

    Returns:
        The tasks by name. They are used up here, and the run builds its own: these samplers have
        given an example, and the preflight sets the tasks up and closes them, in a thread and an
        event loop that end with it. A run's tasks belong to the thread that calls their samplers
        (`TaskSet.build`), or to the processes of its rollout workers, and each attempt at the run
        begins with new ones.

    Raises:
        ConfigError: a task or filter can't be built, or has no example that can be used; the error
            names its field.
    """
    for field, entry in config.filters():
        if takes_context(built_class(entry)):
            _build(field, entry, partial(build_with, entry, policy.context))
    texts = set(control_tokens(policy.tokenizer))
    tasks: dict[str, Task] = {}
    for name, task_config in config.tasks.items():
        if name in left_out:
            continue
        field = f"tasks.{name}"
        build = partial(task_config.build, name=name, context=policy.context)
        task: Task = _build(field, task_config, build)
        _check_rewards(task, field=field)
        for part in ("dataset", "validation"):
            _check_dataset(task, part, field=field)
        first = _first_example(f"{field}.sampler", task.sampler, "next")
        call_part(field, task, "check_examples", field=field)
        call_part(field, task, "check_control_tokens", texts, field=field)
        call_part(
            f"{field}.algorithm",
            task.algorithm,
            "check_example",
            first,
            field=field,
            max_rollout_tokens=task_config.env.max_rollout_tokens,
            max_model_len=config.generator.engine.max_model_len,
        )
        tasks[name] = task
    return tasks


def _check_rewards(task: Task, *, field: str) -> None:
    """Refuse a task that compares rewards, and has no function that gives any."""
    algorithm = type(task.algorithm)
    may_reward = type(task.rubric) is not Rubric or task.rubric.config.reward_fns
    if not algorithm.group_relative or may_reward:
        return
    cure = (
        f"{algorithm.__name__} compares rewards, and without a function all are 0: name one, "
        "such as Rubric.Config(reward_fns=[exact])"
    )
    raise ConfigError(f"{field}.rubric.reward_fns", [], cure)


def _check_dataset(task: Task, part: str, *, field: str) -> None:
    """Refuse a dataset that has no examples, or whose first can't be read.

    Args:
        part: "dataset" or "validation", which a task may leave out.
        field: path of the task's config.
    """
    dataset = getattr(task, part)
    if dataset is None:
        return
    kind = type(dataset).__name__
    with inside(field), part_at_fault(part, kind, "its __len__ failed"):
        if len(dataset) == 0:
            raise ConfigError(part, kind, "has no examples")
    _first_example(f"{field}.{part}", dataset, "__getitem__", 0)


def _first_example(field: str, owner: object, method: str, *arguments: object) -> DataSample:
    """Return the example that a method of a dataset or a sampler gives.

    Raises:
        ConfigError: the method failed, or gave no example that can be used.
    """
    example = call_part(field, owner, method, *arguments)
    fault: str | None = f"a {type(example).__name__}, want a DataSample"
    if isinstance(example, DataSample):
        reason = fault_of_example(example)
        fault = reason and f"an example whose {reason}"
    if fault:
        raise ConfigError(field, type(owner).__name__, f"its {method} returned {fault}")
    return example


def _check_turn_end(
    config: RunConfig, context: BuildContext, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a chat template that ends the model's turn with a text at which no completion ends.

    Replies of a model that writes that text would all run to their limit.

    Raises:
        ConfigError: the template writes no token of the tokenizer there, and a task names no stop.
    """
    has_end = not tokenizer.chat_template or template_turn_end(tokenizer) is not None
    if has_end or stop_texts(context.renderer):
        return
    for name, task in config.tasks.items():
        if not task.sampling.stop and not task.sampling.stop_token_ids:
            field, value = "renderer.template", config.renderer.template
            if value is None:
                field, value = "model.hf_assets_path", config.model.hf_assets_path
            cure = (
                "the chat template ends the model's turn with no token of the tokenizer, so that "
                f"replies may run to their limit: name the text that ends them in "
                f"tasks.{name}.sampling.stop, or the token in tasks.{name}.sampling.stop_token_ids"
            )
            raise ConfigError(field, value, cure)
