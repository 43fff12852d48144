"""The demo with a system message of 96 tokens before each question, and TRL's GRPOTrainer: seconds per step, and to 0.9.

    .venv/bin/pip install --no-deps --target .benchmarks -r requirements/benchmarks.txt
    python benchmarks/system_message.py [--steps 60] [--repeats 3] [--synchronous]

As benchmarks/end_to_end.py, whose sides these are. The demo's prompts have 25 tokens, and no real prompt is as short: they fill
no block of the engine's cache, so that each of a group's 8 rollouts computes its own.
"""

import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from end_to_end import Subject, digit_sums, main  # noqa: E402

from torchtitan.experiments.rl.config.run_config import RunConfig  # noqa: E402
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug  # noqa: E402
from torchtitan.experiments.rl.envs.message_env import ResetOutput  # noqa: E402
from torchtitan.experiments.rl.rollouts.types import DataSample  # noqa: E402
from torchtitan.experiments.rl.tasks.examples.sum_digits import (  # noqa: E402
    SumDigitsEnv,
    SumDigitsTask,
)

SYSTEM = (
    "You add up digits. Read the digits one by one, keep the running sum in mind, and reply with the sum alone: "
    "no words, no spaces, no signs before or behind it. There are two digits, or five at most."
)


class SystemEnv(SumDigitsEnv):
    async def reset(self) -> ResetOutput:
        opening = await super().reset()
        return replace(opening, messages=[{"role": "system", "content": SYSTEM}, *opening.messages])


class SystemTask(SumDigitsTask):
    @dataclass(kw_only=True, slots=True)
    class Config(SumDigitsTask.Config):
        pass

    config: Config

    def make_env(self, sample: DataSample) -> SumDigitsEnv:
        return SystemEnv(sample.env_input)


def system_message() -> RunConfig:
    """Return the config of the demo, with a system message before each question."""
    config = rl_grpo_qwen3_debug()
    task = config.tasks["sum_digits"]
    assert isinstance(task, SumDigitsTask.Config)
    same: dict[str, Any] = {
        entry.name: getattr(task, entry.name) for entry in fields(task) if entry.init
    }
    same["env"] = replace(task.env, max_rollout_tokens=256)
    config.tasks["sum_digits"] = SystemTask.Config(**same)
    return config


if __name__ == "__main__":
    subject = Subject(
        script=__file__,
        module=Path(__file__).stem,
        config=system_message,
        questions=digit_sums,
        correct=lambda reply, answer: reply.strip() == answer,
        system=SYSTEM,
        steps=60,
        goal=0.9,
        every=10,
        first=5,
        at_least=4,
    )
    main(subject, (__doc__ or "").partition("\n")[0])
