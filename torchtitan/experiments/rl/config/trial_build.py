"""Builds once, before any process is spawned, what a run builds in its own process, and throws it away.

Rubrics, algorithms, samplers, datasets, filters, renderer and tokenizer check themselves when they are built. Built here, they
refuse a config by its field, also under ``--dry-run``.
"""

from collections.abc import Collection
from typing import Any

from renderers import Renderer
from transformers import AutoTokenizer

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.user_faults import user_code
from torchtitan.experiments.rl.data.dataset import Dataset, fault_of_example
from torchtitan.experiments.rl.data.task_mix import TaskMix
from torchtitan.experiments.rl.envs.renderer import build_renderer
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.policy import decoder_config, policy_spec
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.task import Task

PARTS = ("dataset", "validation", "rubric", "algorithm", "sampler")
"""Fields of a task's config that the task builds. The sampler is last: it needs the dataset."""


def build_parts(config: RunConfig) -> None:
    """Build what needs neither the model's folder nor a dataset: batcher, filters, task mix, rubrics and algorithms.

    Raises:
        ConfigError: one can't be built; the error names its field.
    """
    _build(config.batcher, "batcher")
    for slot in ("pre_batch_filters", "post_batch_filters"):
        for index, entry in enumerate(getattr(config, slot)):
            _build(entry, f"{slot}[{index}]")
    mix: TaskMix = _build(config.task_mix, "task_mix", weights={name: task.weight for name, task in config.tasks.items()})
    with user_code("task_mix", built_class(config.task_mix).__name__, "its next() failed"):
        first = mix.next()
    if first not in config.tasks:
        raise ConfigError("task_mix", built_class(config.task_mix).__name__, f"its next() gave {first!r}, which is no task")
    for name, task in config.tasks.items():
        for part in ("rubric", "algorithm"):
            _build(getattr(task, part), f"tasks.{name}.{part}")


def build_tasks(config: RunConfig, *, left_out: Collection[str] = ()) -> dict[str, Task]:
    """Build the renderer and the tasks, and take a first example of each. The model's folder has been checked.

    Returns:
        The tasks, by name: for the preflight, not for the run.

    Args:
        left_out: names of tasks that lack something on this machine.

    Raises:
        ConfigError: one can't be built; the error names its field.
    """
    renderer, tasks = checked_renderer(config), {}
    for name, task_config in config.tasks.items():
        if name in left_out:
            continue
        task = tasks[name] = _build_task(task_config, name, renderer, seed=config.seed)
        field = f"tasks.{name}"
        if type(task.algorithm).group_relative and type(task.rubric) is Rubric and not task.rubric.config.reward_fns:
            cure = f"{type(task.algorithm).__name__} compares rewards, and without a function all are 0: name one"
            raise ConfigError(f"{field}.rubric.reward_fns", [], f"{cure}, such as Rubric.Config(reward_fns=[exact])")
        for part in ("dataset", "validation"):
            if (dataset := getattr(task, part)) is not None:
                _check_first_example(dataset, f"{field}.{part}")
        with user_code(f"{field}.sampler", type(task.sampler).__name__, "its next() failed"):
            first = task.sampler.next()
        _check_example(first, f"{field}.sampler", task.sampler, "next()")
        with user_code(field, type(task).__name__, "its check_examples failed"):
            task.check_examples(field=field)
        with user_code(f"{field}.algorithm", type(task.algorithm).__name__, "its check_example failed"):
            task.algorithm.check_example(
                first,
                field=field,
                max_rollout_tokens=task_config.env.max_rollout_tokens,
                max_model_len=config.generator.engine.max_model_len,
            )
    return tasks


def checked_renderer(config: RunConfig) -> Renderer:
    """The renderer of the policy's tokenizer.

    Raises:
        ConfigError: no such renderer, the tokenizer can't be loaded, or it has ids that the model does not have.
    """
    path = config.model.hf_assets_path
    try:
        with user_code("model.hf_assets_path", path, "its tokenizer can't be loaded"):
            renderer = build_renderer(config.renderer, path)
    except ConfigError as error:
        if error.field != "tokenizer_path":
            raise
        raise ConfigError("model.hf_assets_path", path, error.cure) from error
    with user_code("model.hf_assets_path", path, "its tokenizer can't be loaded"):
        highest = max(AutoTokenizer.from_pretrained(path, local_files_only=True).get_vocab().values())
    vocab_size = decoder_config(policy_spec(config.model, device="cpu", max_seq_len=1)).vocab_size
    if highest >= vocab_size:
        cure = f"its tokenizer has the id {highest}, and the model a vocab_size of {vocab_size}: they are of different models"
        raise ConfigError("model.hf_assets_path", path, cure)
    return renderer


def _build(config: Any, field: str, **arguments: Any) -> Any:
    with user_code(field, built_class(config).__name__, "it can't be built"):
        try:
            return config.build(**arguments)
        except ConfigError as error:
            raise ConfigError(_inside(field, error.field), error.value, error.cure) from error


def _build_task(config: Task.Config, name: str, renderer: Renderer, *, seed: int) -> Task:
    """
    Raises:
        ConfigError: of the first part that can't be built by itself; of the task if every part can.
    """
    field = f"tasks.{name}"
    try:
        with user_code(field, built_class(config).__name__, "it can't be built"):
            return config.build(name=name, renderer=renderer, seed=seed)
    except ConfigError as error:
        dataset = None
        for part in PARTS:
            part_config = getattr(config, part)
            if part_config is None:
                continue
            arguments = {"dataset": dataset, "seed": seed} if part == "sampler" else {}
            built = _build(part_config, f"{field}.{part}", **arguments)
            if part == "dataset":
                dataset = built
                _check_first_example(dataset, f"{field}.dataset")
        raise ConfigError(_inside(field, error.field), error.value, error.cure) from error


def _inside(field: str, reported: str) -> str:
    """The path of what a part reported. Parts call themselves "dataset", "rubric", "sampler", or by their class's name."""
    if reported == field or reported.startswith(f"{field}."):
        return reported
    owner, _, part = field.rpartition(".")
    first, dot, rest = reported.partition(".")
    if part not in PARTS:  # a filter, the mix, the batcher, or a whole task
        return f"{field}.{reported}" if first in PARTS else f"{field}{dot}{rest}"
    if part == "validation" and first == "dataset":
        return f"{field}{dot}{rest}"
    return f"{owner}.{reported}" if first in PARTS else f"{field}: {reported}"


def _check_first_example(dataset: Dataset, field: str) -> None:
    name = type(dataset).__name__
    with user_code(field, name, "its __len__ failed"):
        try:
            size = len(dataset)
        except ConfigError as error:
            raise ConfigError(_inside(field, error.field), error.value, error.cure) from error
    if size == 0:
        raise ConfigError(field, name, "has no examples")
    with user_code(field, name, "its __getitem__(0) failed"):
        first = dataset[0]
    _check_example(first, field, dataset, "__getitem__(0)")


def _check_example(example: Any, field: str, owner: Any, call: str) -> None:
    if not isinstance(example, DataSample):
        raise ConfigError(field, type(owner).__name__, f"its {call} returned a {type(example).__name__}, want a DataSample")
    if fault := fault_of_example(example):
        raise ConfigError(field, type(owner).__name__, f"its {call} returned an example whose {fault}")
