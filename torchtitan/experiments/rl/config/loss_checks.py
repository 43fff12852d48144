"""Checks of the loss, and of how algorithms and filters fit it."""

from torchtitan.experiments.rl.algorithms import Algorithm
from torchtitan.experiments.rl.compat.torchtitan import built_class
from torchtitan.experiments.rl.config.run_config import RunConfig
from torchtitan.experiments.rl.config.user_faults import user_code
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.losses import check_corrections
from torchtitan.experiments.rl.rollouts.filters import ZeroAdvantage


def check_loss(config: RunConfig) -> None:
    """Refuse corrections that don't fit together, credit to be normalised over the step where nothing does it, and a filter
    that takes part of such credit away.

    Raises:
        ConfigError: by field, value and cure.
    """
    loss = config.trainer.loss
    with user_code("trainer.loss.corrections", len(loss.corrections), "a validate failed"):
        check_corrections(loss.corrections, field="trainer.loss.corrections")
    for name, task in config.tasks.items():
        if getattr(task.algorithm, "reference", None) == "trainer" and config.trainer.reference is None:
            cure = "the trainer has no reference: set trainer.reference = ReferenceConfig()"
            raise ConfigError(f"tasks.{name}.algorithm.reference", "trainer", cure)
        algorithm: type[Algorithm] = built_class(task.algorithm)
        if not algorithm.batch_normalized:
            continue
        if not loss.normalize_advantages:
            cure = f"{algorithm.__name__} of tasks.{name} gives credit that is normalised over the step: set it to True"
            raise ConfigError("trainer.loss.normalize_advantages", False, cure)
        for slot in ("pre_batch_filters", "post_batch_filters"):
            for index, entry in enumerate(getattr(config, slot)):
                if built_class(entry) is ZeroAdvantage and entry.mode == "enforce" and not algorithm.group_relative:
                    cure = f"drops groups of reward 0, from which {algorithm.__name__} of tasks.{name} learns: leave it out"
                    raise ConfigError(f"{slot}[{index}].mode", entry.mode, cure)
