"""Puzzles of reasoning_gym, which has over a hundred generators, each with its own scorer. For real models."""

from dataclasses import dataclass, field

from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.question_env import QuestionEnv
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.rubrics.rubric import Rubric
from torchtitan.experiments.rl.tasks.reasoning_gym.data import PuzzleGenerator, ReasoningGymDataset
from torchtitan.experiments.rl.tasks.reasoning_gym.rubric import PuzzleRubric
from torchtitan.experiments.rl.tasks.task import Task

__all__ = ["PuzzleGenerator", "PuzzleRubric", "ReasoningGymDataset", "ReasoningGymTask"]

TEMPLATE = "{question}\n\nReason step by step, and put nothing but your final answer between <answer> and </answer>."


class ReasoningGymTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        template: str = TEMPLATE
        """The user's message; {question} is replaced. It should ask for <answer></answer>, by which answers are found best."""
        rubric: Rubric.Config = field(default_factory=PuzzleRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=4096))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(ReasoningGymTask.Config, self).validate(field=field, policy_path=policy_path)
            if "{question}" not in self.template:
                raise ConfigError(f"{field}.template", self.template, "must contain {question}")
            _check_disjoint(self.dataset, self.validation, field=field)

    config: Config

    def make_env(self, sample: DataSample) -> QuestionEnv:
        return QuestionEnv(self.config.template.replace("{question}", sample.env_input.entry["question"]))


def _check_disjoint(training: Dataset.Config, validation: Dataset.Config | None, *, field: str) -> None:
    """Refuse seeds that are too close: with seeds 0 and 1, two datasets share all but one puzzle.

    Raises:
        ConfigError: training and validation would share puzzles.
    """
    if not (isinstance(training, ReasoningGymDataset.Config) and isinstance(validation, ReasoningGymDataset.Config)):
        return
    apart = training.seed + training.count <= validation.seed or validation.seed + validation.count <= training.seed
    trained = {name: generator.config for name, generator in training.generators.items()}
    same = [name for name, own in validation.generators.items() if trained.get(name) == own.config]
    if same and not apart:
        end = training.seed + training.count
        cure = f"puzzle i is made from seed + i, and {same[0]} trains on seeds {training.seed} to {end - 1}: take {end} or more"
        raise ConfigError(f"{field}.validation.seed", validation.seed, cure)
