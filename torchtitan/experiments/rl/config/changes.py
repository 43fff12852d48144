"""Which fields of a run's config may change when the run is resumed, and the comparison of two resolved configs.

What decides which data the run sees and what it learns from it stays. What decides how far, how fast and where may change.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.experiments.rl.errors import ConfigError

_ENGINE = {
    "class": False,
    "dtype": False,
    "max_model_len": True,
    "tensor_parallel_degree": True,
    "max_num_seqs": True,
    "gpu_memory_utilization": True,
    "kv_cache_gib": True,
    "sleep": True,
    "cpu_kv_cache_gib": True,
    "cuda_graphs": True,
    "enable_prefix_caching": True,
}

_HOSTED_MODEL = {
    "class": False,
    "path": False,
    "replicas": True,
    "max_concurrency": True,
    **{f"engine.{name}": may for name, may in _ENGINE.items()},
}

MAY_CHANGE: Mapping[str, bool] = {
    "class": False,
    "steps": True,
    "seed": False,
    "groups_per_step": False,
    "rollouts_per_step": False,
    "max_offpolicy_steps": False,
    "max_drops_in_a_row": True,
    "replay": False,
    "output_dir": True,
    "rollout_workers": True,
    "model": False,
    "renderer": False,
    "task_mix": False,
    "pre_batch_filters": False,
    "post_batch_filters": False,
    "batcher": True,
    "batcher.class": False,
    "validation": True,
    "metrics": True,
    "recorder": True,
    "checkpoint": True,
    "user_code": True,
    "supervision": True,
    "provision": True,
    "profile_steps": True,
    "trainer.class": False,
    "trainer.ranks": True,
    "trainer.optimizer": True,
    "trainer.lr_scheduler": True,
    "trainer.loss": False,
    "trainer.reference": False,
    "trainer.dtype": False,
    "trainer.mixed_precision_param": False,
    "trainer.parallelism": True,
    "trainer.enable_cpu_offload": True,
    "trainer.activation_checkpoint": True,
    "trainer.compile": True,
    "trainer.logprob_chunk_tokens": True,
    "trainer.save_final_model": True,
    "generator.class": False,
    "generator.replicas": True,
    "generator.weight_update": False,
    **{f"generator.engine.{name}": may for name, may in _ENGINE.items()},
    "tasks.*.class": False,
    "tasks.*.dataset": False,
    "tasks.*.validation": True,
    "tasks.*.validation_schedule": True,
    "tasks.*.sampler": False,
    "tasks.*.sampling": False,
    "tasks.*.group_size": False,
    "tasks.*.min_group_size": False,
    "tasks.*.max_retries": False,
    "tasks.*.weight": False,
    "tasks.*.template": False,
    "tasks.*.instruction": False,
    "tasks.*.exact": False,
    "tasks.*.messages_column": False,
    "tasks.*.tools_column": False,
    "tasks.*.system_prompt": False,
    "tasks.*.env": False,
    "tasks.*.env.step_timeout_s": True,
    "tasks.*.env.rollout_timeout_s": True,
    "tasks.*.rubric": False,
    "tasks.*.rubric.timeout_s": True,
    "tasks.*.rubric.isolated_workers": True,
    "tasks.*.rubric.reward_fns.*.timeout_s": True,
    "tasks.*.algorithm": False,
    "tasks.*.algorithm.max_concurrency": True,
    **{f"tasks.*.algorithm.teacher.{name}": may for name, may in _HOSTED_MODEL.items()},
}
"""By the path of a field, or of a part for all fields in it; the longest that fits decides. ``*`` is any task, index or key. A
field that none fits, of a user's own class, may not change."""

ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Change:
    field: str
    saved: Any
    """The value the run was started with; ABSENT where it had no such field."""
    new: Any

    @property
    def allowed(self) -> bool:
        return bool(rule(self.field))

    def __str__(self) -> str:
        return f"{self.field} = {self.new!r} (was {self.saved!r})"


def rule(field: str) -> bool | None:
    """Whether a field may change; None where no entry of MAY_CHANGE fits."""
    parts = _parts(field)
    fitting = [entry for entry in MAY_CHANGE if _fits(entry.split("."), parts)]
    return MAY_CHANGE[max(fitting, key=lambda entry: entry.count("."))] if fitting else None


def compare(saved: Any, new: Any) -> list[Change]:
    """What differs between two resolved configs, field by field, in the order of the new one."""
    return list(_differences(saved, new, ""))


def check_changes(changes: list[Change]) -> None:
    """
    Raises:
        ConfigError: names the first field that may not change, both values and the cure.
    """
    for change in changes:
        if not change.allowed:
            cure = f"the run that is resumed has {change.saved!r}: keep it, or start a new run (--init-from takes the weights)"
            raise ConfigError(change.field, change.new, cure)


def _differences(saved: Any, new: Any, path: str) -> Iterator[Change]:
    saved, new = _entries(saved), _entries(new)
    if not isinstance(saved, dict) or not isinstance(new, dict):
        if saved != new:
            yield Change(path, _plain(saved), _plain(new))
        return
    if saved.get("class") != new.get("class"):  # of other fields, which say nothing about each other
        yield Change(_inside(path, "class"), saved.get("class", ABSENT), new.get("class", ABSENT))
        return
    for key in [*new, *(key for key in saved if key not in new)]:
        yield from _differences(saved.get(key, ABSENT), new.get(key, ABSENT), _inside(path, key))


def _entries(value: Any) -> Any:
    """A list's entries by index, as fields are."""
    return {f"[{index}]": entry for index, entry in enumerate(value)} if isinstance(value, list) and value else value


def _inside(path: str, key: str) -> str:
    return f"{path}{key}" if key.startswith("[") or not path else f"{path}.{key}"


def _plain(value: Any) -> Any:
    return value["class"] if isinstance(value, dict) and "class" in value else value


def _parts(field: str) -> list[str]:
    return re.sub(r"\[(\d+)\]", r".\1", field).split(".")


def _fits(entry: list[str], parts: list[str]) -> bool:
    return len(entry) <= len(parts) and all(want in ("*", part) for want, part in zip(entry, parts, strict=False))
