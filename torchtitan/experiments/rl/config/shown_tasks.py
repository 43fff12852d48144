"""What ``--dry-run`` prints beside the plan's sizes: model, learning rate, tasks, and each task's first prompt."""

from collections.abc import Mapping

from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.preflight import Tried
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.printable import printable_line


def shown_tasks(config: RunConfig, tried: Mapping[str, Tried]) -> list[str]:
    """Lines for people, safe to print.

    Args:
        tried: what the preflight saw of the tasks that it could try.
    """
    optimizer, schedule = config.trainer.optimizer, config.trainer.lr_scheduler
    lines = [
        f"weights        {config.model.hf_assets_path}",
        f"learning rate  {optimizer.lr:g}, {schedule.warmup_steps} steps of warm-up",
    ]
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
