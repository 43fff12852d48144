"""Math problems with checkable answers, from any dataset of questions and answers. For real models."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from torchtitan.experiments.rl.envs.question_env import QuestionEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.math.data import MathDataset
from torchtitan.experiments.rl.tasks.math.rubric import MathRubric
from torchtitan.experiments.rl.tasks.task import Task

__all__ = ["MathDataset", "MathTask"]

TEMPLATE = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."


class MathTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        template: str = TEMPLATE
        """The user's message; {question} is replaced. It should ask for \\boxed{}, by which answers are found best."""
        system_prompt: str | None = None
        rubric: Rubric.Config = field(default_factory=MathRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=4096))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(MathTask.Config, self).validate(field=field, policy_path=policy_path)
            if "{question}" not in self.template:
                raise ConfigError(f"{field}.template", self.template, "must contain {question}")

        def check_present(self, *, field: str) -> None:
            if isinstance(self.rubric, MathRubric.Config) and find_spec("math_verify") is None:
                raise MissingError(f"{field}.rubric", "math-verify", "is not installed: pip install math-verify")
            super(MathTask.Config, self).check_present(field=field)

    config: Config

    def make_env(self, sample: DataSample) -> QuestionEnv:
        # Not str.format: a template with \boxed{} in it has braces of its own.
        question = self.config.template.replace("{question}", sample.env_input.question)
        return QuestionEnv(question, system_prompt=self.config.system_prompt)
