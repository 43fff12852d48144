"""One question, one answer. The env asks, and the rubric compares the answer."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.sum_digits.data import prompt_text


class SumDigitsEnv(MessageEnv):
    def __init__(self, digits: list[int], *, instruction: str = ""):
        self.digits, self.instruction = digits, instruction

    async def reset(self) -> ResetOutput:
        question = "\n\n".join(filter(None, (prompt_text(self.digits), self.instruction)))
        return ResetOutput(messages=[{"role": "user", "content": question}])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
