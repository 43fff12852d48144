"""Names that the author of a task imports.

Worked tasks are in ``tasks/examples``, a file each; ``sum_digits.py`` is the smallest.
"""

from torchtitan.experiments.rl.configurable import BuildContext
from torchtitan.experiments.rl.data.dataset import Dataset, MadeDataset
from torchtitan.experiments.rl.data.rows import MemoryRows, RowDataset
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnv, RendererEnvConfig
from torchtitan.experiments.rl.rollouts.policy import PolicyClient, PolicySession, SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics.rubric import (
    Reward,
    RewardFn,
    Rubric,
    env_component,
    last_assistant_text,
)
from torchtitan.experiments.rl.tasks.agent import (
    AgentCommandTask,
    AgentTask,
    CommandResult,
    agent_command_task,
)
from torchtitan.experiments.rl.tasks.answers import final_answer, final_number, right_answer
from torchtitan.experiments.rl.tasks.demonstrations import DemonstrationTask
from torchtitan.experiments.rl.tasks.questions import (
    EnvTask,
    QuestionEnv,
    QuestionTask,
    env_task,
    question_task,
)
from torchtitan.experiments.rl.tasks.task import Task
from torchtitan.experiments.rl.tasks.tools import MCPServer, ToolTask, tool_task

__all__ = [
    "AgentCommandTask",
    "AgentTask",
    "BuildContext",
    "CommandResult",
    "DataSample",
    "Dataset",
    "DemonstrationTask",
    "EnvTask",
    "MCPServer",
    "MadeDataset",
    "MemoryRows",
    "MessageEnv",
    "PolicyClient",
    "PolicySession",
    "QuestionEnv",
    "QuestionTask",
    "RendererEnv",
    "RendererEnvConfig",
    "ResetOutput",
    "Reward",
    "RewardFn",
    "Rollout",
    "RolloutGroup",
    "RowDataset",
    "Rubric",
    "SamplingConfig",
    "StepOutput",
    "Task",
    "ToolTask",
    "agent_command_task",
    "env_component",
    "env_task",
    "final_answer",
    "final_number",
    "last_assistant_text",
    "question_task",
    "right_answer",
    "tool_task",
]
