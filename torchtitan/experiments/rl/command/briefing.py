"""Lines that a person reads before a run starts: how it trains, and warnings.

A dry run prints the lines. Warnings are of settings that work, and are probably not meant.
"""

from collections.abc import Mapping
from pathlib import Path

from torchtitan.experiments.rl.command.build import PolicyTokenizer
from torchtitan.experiments.rl.command.preflight import PreflightResult
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.envs.renderer import AUTO, renderer_name
from torchtitan.experiments.rl.envs.stop_tokens import stop_texts
from torchtitan.experiments.rl.observability.console import FEW_EXAMPLES, counted_examples
from torchtitan.experiments.rl.printable import printable_line
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage
from torchtitan.experiments.rl.tasks.task import Task

MIN_PRETRAINED = 20_000_000
"""Number of parameters from which a model is taken for a pretrained one of the hub. Smaller ones
are made for tests."""
MAX_RATE = 6e-5
"""Learning rate above which a pretrained model forgets what it knows."""
ADAPTERS_FACTOR = 10
"""Ratio of the learning rate that adapters want to that of the whole model."""
MIN_ADAPTERS_RATE = 5e-6
"""Learning rate below which adapters of a pretrained model hardly learn; 1e-6 is usual for the
whole model."""


def task_lines(
    config: RunConfig,
    results: Mapping[str, PreflightResult],
    policy: PolicyTokenizer | None,
    *,
    tasks: Mapping[str, Task],
    begins_from: Path | None,
) -> list[str]:
    """Return lines on how the run trains, and on each task with its first prompt, safe to print.

    Args:
        tasks: the tasks that could be built.
        begins_from: checkpoint whose weights the run begins with; None for the model's folder.
        results: what the preflight saw of the tasks that it could try.
        policy: tokenizer and renderer of the policy; None if its folder is not on this machine.
    """
    optimizer = config.trainer.optimizer
    warmup_steps = config.trainer.lr_scheduler.warmup_steps
    muon = ", by Muon for the layers' matrices" if optimizer.name == "muon" else ""
    lines = [
        f"weights        {begins_from or config.model.hf_assets_path}",
        f"learning rate  {optimizer.lr:g}, {warmup_steps} steps of warm-up{muon}",
        f"loss           {_loss_text(config)}",
    ]
    if policy is not None:
        lines += _renderer_lines(config, policy)
    for name, task in config.tasks.items():
        lines += _lines_of_task(name, task)
        if name in tasks:
            lines += _lines_of_data(tasks[name], share=_share_of(config, name))
        if name in results:
            lines += _preflight_lines(name, results[name])
    return [printable_line(line) for line in lines]


def _loss_text(config: RunConfig) -> str:
    """Return the loss of tokens with an advantage.

    Named are its class, its corrections, and the weight of the distance to a reference.
    """
    loss = config.trainer.loss
    reference = config.trainer.reference
    names = [built_class(part).__name__ for part in (loss.rl, *loss.corrections)]
    if reference is not None and reference.kl_coef:
        distance = f"KL to the reference x {reference.kl_coef:g}{_kl_rollouts(config)}"
    else:
        distance = "no KL to a reference"
    return ", ".join([*names, distance])


def _kl_rollouts(config: RunConfig) -> str:
    """Return on which rollouts of advantage 0 the distance to the reference acts."""
    for index, entry in enumerate(config.pre_batch_filters):
        if built_class(entry) is ZeroAdvantage and entry.mode == "enforce":
            return f" (not on those of advantage 0 that pre_batch_filters[{index}] drops)"
    return " (also on rollouts of advantage 0)"


def _renderer_lines(config: RunConfig, policy: PolicyTokenizer) -> list[str]:
    renderer = policy.renderer
    name = renderer_name(renderer)
    if config.renderer.name == AUTO:
        name += " (auto: the one that fits the tokenizer)"
    stops = [
        f"{policy.tokenizer.convert_ids_to_tokens(token)} ({token})"
        for token in renderer.get_stop_token_ids()
    ]
    stops += map(repr, stop_texts(renderer))
    return [f"renderer       {name}", f"turn ends      at {', '.join(stops)}"]


def _lines_of_task(name: str, task: Task.Config) -> list[str]:
    lines = [
        f"task           {name}: {built_class(task).__name__}, "
        f"{built_class(task.algorithm).__name__}, groups of {task.group_size}, "
        f"{task.env.max_turns} turns and {task.env.max_rollout_tokens:,} tokens a rollout at most"
    ]
    stops = [*map(repr, task.sampling.stop), *map(str, task.sampling.stop_token_ids)]
    if stops:
        lines.append(f"turn ends      of {name} at {', '.join(stops)} too")
    return lines


def _share_of(config: RunConfig, name: str) -> float:
    """Return the task's share of the groups."""
    weights = {other: task.weight for other, task in config.tasks.items()}
    return weights[name] / sum(weights.values())


def _lines_of_data(task: Task, *, share: float) -> list[str]:
    """Return lines on the task's rows and on what it rewards."""
    rows = f"rows           of {task.name}: {len(task.dataset):,} to train on"
    if task.validation is not None:
        rows += f", {len(task.validation):,} held out"
    if share < 1:
        rows += f"; {share:.0%} of the groups are its"
    functions = task.rubric.functions
    if not functions:
        return [rows]
    weights = [f"{name} x {entry.weight:.2g}" for name, entry in functions.items()]
    return [rows, f"rewards        of {task.name}: {', '.join(weights)}"]


def _preflight_lines(name: str, result: PreflightResult) -> list[str]:
    lines = []
    if result.prompt:
        ids = result.prompt_token_ids
        lines = [
            f"prompt         the first of {name}, {len(ids)} tokens, as the model sees it:",
            *(f"  | {line}" for line in result.prompt.split("\n")),
            f"tokens         {' '.join(map(str, ids))}",
        ]
    if result.lacks_answers:
        lines.append(f"answers        of {name}: no column 'answer': no known answer was tried")
    return lines


def learning_rate_warning(
    config: RunConfig, parameters: int, *, whole_model_rate: float | None = None
) -> str | None:
    """Warn of a rate at which the model forgets what it knows, or its adapters learn little.

    Args:
        parameters: number of the model's parameters.
        whole_model_rate: rate at which the named config trains the whole model; None if it doesn't.
    """
    rate = config.trainer.optimizer.lr
    has_adapters = config.trainer.lora is not None
    is_pretrained = parameters >= MIN_PRETRAINED
    is_low = rate == whole_model_rate or (is_pretrained and rate < MIN_ADAPTERS_RATE)
    if has_adapters and is_low:
        return (
            f"trainer.optimizer.lr = {rate:g}: that is a rate of full training, and adapters "
            f"(trainer.lora) want about {ADAPTERS_FACTOR} times as much: --trainer.optimizer.lr "
            f"{ADAPTERS_FACTOR * rate:g}"
        )
    max_rate = MAX_RATE * (ADAPTERS_FACTOR if has_adapters else 1)
    if not is_pretrained or rate <= max_rate:
        return None
    return (
        f"trainer.optimizer.lr = {rate:g}: at such a rate a pretrained model of "
        f"{parameters / 1e6:,.0f}M parameters forgets what it knows; 1e-6 is usual, and up to 5e-5 "
        "for models of 0.1B"
    )


def validation_warnings(config: RunConfig, tasks: Mapping[str, Task]) -> list[str]:
    """Warn of each task that is evaluated on so few examples that its reward says little."""
    warnings = []
    for name, task in tasks.items():
        schedule = task.config.validation_schedule or config.validation
        if task.validation is None or schedule.every == 0:
            continue
        count = min(schedule.examples, len(task.validation))
        if count < FEW_EXAMPLES:
            warnings.append(
                f"tasks.{name}.validation: the reward of {counted_examples(count)} says little, "
                f"for chance alone moves it; {FEW_EXAMPLES} or more say more"
            )
    return warnings
