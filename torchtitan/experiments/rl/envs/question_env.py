"""One question, one answer."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput


class QuestionEnv(MessageEnv):
    """Asks a question, after a system prompt where there is one. Whatever the model answers ends the rollout."""

    def __init__(self, question: str, *, system_prompt: str | None = None):
        self.question, self.system_prompt = question, system_prompt

    async def reset(self) -> ResetOutput:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return ResetOutput(messages=[*system, {"role": "user", "content": self.question}])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
