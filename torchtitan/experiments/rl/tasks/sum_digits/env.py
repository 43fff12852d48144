"""One question, one answer. The env asks, and the rubric compares the answer."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.sum_digits.data import prompt_text


class SumDigitsEnv(MessageEnv):
    def __init__(self, digits: list[int]):
        self.digits = digits

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": prompt_text(self.digits)}])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
