"""One question, one answer."""

from collections.abc import Sequence

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput


class QuestionEnv(MessageEnv):
    """Asks a question, or goes on with a conversation, after a system prompt where there is one. An answer ends it."""

    def __init__(self, question: str | Sequence[Message], *, system_prompt: str | None = None):
        self.question, self.system_prompt = question, system_prompt

    async def reset(self) -> ResetOutput:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        asked = [{"role": "user", "content": self.question}] if isinstance(self.question, str) else self.question
        return ResetOutput(messages=[*system, *asked])

    async def step_message(self, message: Message) -> StepOutput:
        return StepOutput(env_messages=[], done=True)
