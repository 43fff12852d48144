"""Configs of a real model that two CPU cores can train, SmolLM2-135M-Instruct.

scripts/get_model.py downloads it.
"""

import random
import re
from typing import Any

from renderers import Message

from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.config.recipes import reinforce_pp
from torchtitan.experiments.rl.config.run_config import ProvisionConfig, RunConfig
from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.generation.config import GeneratorConfig
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rubrics.rubric import env_component
from torchtitan.experiments.rl.tasks.answers import last_boxed
from torchtitan.experiments.rl.tasks.questions import env_task, question_task
from torchtitan.experiments.rl.tasks.task import Task, ValidationConfig
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig

SMOLLM2 = "outputs/models/SmolLM2-135M-Instruct"
"""Folder that scripts/get_model.py puts the model into, relative to the checkout."""
LARGEST = 20
"""Largest operand of the sums."""
HELD_OUT = 100
"""Number of the LARGEST² sums that are not trained on."""


def rl_sums_smollm2() -> RunConfig:
    """Adding two numbers with SmolLM2-135M-Instruct on two CPU cores: what `make real` runs."""
    training, held_out = sums()
    task = question_task(
        training, last_number_is_answer, validation=held_out, sampling=_sampling(16)
    )
    return _smollm2(sums=task)


def rl_boxed_smollm2() -> RunConfig:
    """As rl_sums_smollm2, with the number in a box, a form that most real rewards ask for."""
    training, held_out = sums()
    task = question_task(
        training,
        number_in_a_box,
        right_number_in_a_box,
        template="{question} Put the number into \\boxed{}.",
        validation=held_out,
        sampling=_sampling(32),
    )
    return _smollm2(boxed=task)


def rl_running_sums_smollm2() -> RunConfig:
    """Adding over two user turns, each half of the reward: "What is 7 + 8?", then "Now add 5."."""
    training, held_out = sums()
    for row in (*training, *held_out):
        row["more"] = 1 + row["answer"] % 9
    rewards = (env_component("first", default=0), env_component("second", default=0))
    task = env_task(training, RunningSumEnv, *rewards, validation=held_out, sampling=_sampling(16))
    return _smollm2(running_sums=task)


class RunningSumEnv(MessageEnv):
    """Asks for a sum, and then for that sum and the row's ``more``."""

    turns = 0
    """Number of turns that were answered."""

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": self.row["question"]}])

    async def step_message(self, message: Message) -> StepOutput:
        self.turns += 1
        reply = str(message.get("content"))
        total = self.row["answer"]
        if self.turns == 1:
            reward = float(last_number_is_answer(reply, {"answer": total}))
            question: Message = {"role": "user", "content": f"Now add {self.row['more']}."}
            return StepOutput(
                env_messages=[question], done=False, reward_components={"first": reward}
            )
        reward = float(last_number_is_answer(reply, {"answer": total + self.row["more"]}))
        return StepOutput(env_messages=[], done=True, reward_components={"second": reward})


def _sampling(max_tokens: int) -> SamplingConfig:
    # At a temperature of 1 a model of this size errs in most words: of 64 rollouts two or three are
    # right.
    return SamplingConfig(max_tokens=max_tokens, temperature=0.7)


def _smollm2(**tasks: Task.Config) -> RunConfig:
    for task in tasks.values():
        task.group_size = 4
        task.env = RendererEnvConfig(max_turns=2, max_rollout_tokens=256)
    config = RunConfig(
        tasks=tasks,
        model=ModelConfig(hf_assets_path=SMOLLM2),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=4e-5, betas=(0.9, 0.99)),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        ),
        generator=GeneratorConfig(engine=VLLMEngineConfig(max_model_len=256, cpu_kv_cache_gib=0.5)),
        # Prompts begin alike, and what rollouts of a row share is computed once: one long row.
        batcher=Batcher.Config(row_length=1024, rows_per_microbatch=1),
        steps=40,
        rollouts_per_step=64,
        max_offpolicy_steps=1,
        validation=ValidationConfig(every=5, examples=HELD_OUT),
        provision=ProvisionConfig(device="cpu"),
    )
    # Rewards are normalised over the step. A model that has sharpened gives one answer to a prompt,
    # and GRPO learns nothing from four equal wrong ones: held out, the sums came to 0.84 by GRPO
    # and to 0.94 by this.
    return reinforce_pp(config)


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return every sum of two operands from 1 to LARGEST, divided at random.

    Returns:
        The rows to train on, and HELD_OUT others.
    """
    numbers = range(1, LARGEST + 1)
    rows = [{"question": f"What is {a} + {b}?", "answer": a + b} for a in numbers for b in numbers]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def last_number_is_answer(completion: str, example: dict[str, Any]) -> bool:
    """Return True if the last number that the model wrote is the sum."""
    numbers = re.findall(r"\d+", completion)
    return bool(numbers) and int(numbers[-1]) == example["answer"]


def number_in_a_box(completion: str, example: dict[str, Any]) -> bool:
    """Return True if the reply has a box with a number, right or wrong."""
    return (last_boxed(completion) or "").isdecimal()


def right_number_in_a_box(completion: str, example: dict[str, Any]) -> bool:
    """Return True if the number in the last box is the sum."""
    return last_boxed(completion) == str(example["answer"])
