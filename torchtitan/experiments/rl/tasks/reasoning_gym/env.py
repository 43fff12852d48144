"""One puzzle, one answer: the env only asks."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput


class PuzzleEnv(MessageEnv):
    def __init__(self, question: str, *, template: str):
        self.question, self.template = question, template

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": self.template.replace("{question}", self.question)}])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
