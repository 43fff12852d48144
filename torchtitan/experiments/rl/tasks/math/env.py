"""One problem, one answer: the env only asks."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput


class MathEnv(MessageEnv):
    def __init__(self, question: str, *, template: str, system_prompt: str | None = None):
        self.question, self.template, self.system_prompt = question, template, system_prompt

    async def reset(self) -> ResetOutput:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        # Not str.format: a template with \boxed{} in it has braces of its own.
        asked = {"role": "user", "content": self.template.replace("{question}", self.question)}
        return ResetOutput(messages=[*system, asked])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
