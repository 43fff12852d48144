"""What ``--dry-run`` prints beside the plan's sizes: model, learning rate, tasks, and each task's first prompt."""

from collections.abc import Mapping

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.preflight import Tried
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.envs.renderer import AUTO
from torchtitan.experiments.rl.printable import printable_line

PRETRAINED = 20_000_000
"""Parameters from which a model is one of the hub, not a tiny one that was made for tests."""
HIGHEST_RATE = 6e-5


def learning_rate_warning(config: RunConfig, parameters: int) -> str | None:
    """What a person should know of the learning rate, in one line."""
    rate = config.trainer.optimizer.lr
    if parameters < PRETRAINED or rate <= HIGHEST_RATE:
        return None
    return (
        f"trainer.optimizer.lr = {rate:g}: at such a rate a pretrained model of {parameters / 1e6:,.0f}M parameters forgets "
        "what it knows; 1e-6 is usual, and up to 5e-5 for models of 0.1B"
    )


def shown_tasks(config: RunConfig, tried: Mapping[str, Tried], *, renderer: str | None) -> list[str]:
    """Lines for people, safe to print.

    Args:
        tried: what the preflight saw of the tasks that it could try.
        renderer: the name of the renderer; None: there is no tokenizer to build it of.
    """
    optimizer, schedule = config.trainer.optimizer, config.trainer.lr_scheduler
    lines = [
        f"weights        {config.model.hf_assets_path}",
        f"learning rate  {optimizer.lr:g}, {schedule.warmup_steps} steps of warm-up",
    ]
    if renderer is not None:
        lines.append(f"renderer       {renderer}{' (auto: the one that fits the tokenizer)' * (config.renderer.name == AUTO)}")
    for name, task in config.tasks.items():
        parts = f"{built_class(task).__name__}, {built_class(task.algorithm).__name__}, groups of {task.group_size}"
        limits = f"{task.env.max_turns} turns and {task.env.max_rollout_tokens:,} tokens a rollout at most"
        lines.append(f"task           {name}: {parts}, {limits}")
        if (trial := tried.get(name)) is not None and trial.prompt:
            ids = trial.prompt_token_ids
            lines.append(f"prompt         the first of {name}, {len(ids)} tokens, as the model sees it:")
            lines += [f"  | {line}" for line in trial.prompt.split("\n")]
            lines.append(f"tokens         {' '.join(map(str, ids))}")
    return [printable_line(line) for line in lines]
