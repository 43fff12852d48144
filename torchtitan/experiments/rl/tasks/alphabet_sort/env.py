"""The user asks for a sorted list, then for the same list with more names. The env does not grade the replies."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.alphabet_sort.data import more_text, opening_text

SYSTEM = "You are a helpful assistant. Answer with the sorted list only."


class AlphabetSortEnv(MessageEnv):
    def __init__(self, rounds: list[list[str]]):
        self.rounds = rounds
        self._answered = 0

    async def reset(self) -> ResetOutput:
        question = {"role": "user", "content": opening_text(self.rounds[0])}
        return ResetOutput(messages=[{"role": "system", "content": SYSTEM}, question])

    async def step_message(self, message: Message) -> StepOutput:
        self._answered += 1
        if self._answered == len(self.rounds):
            return StepOutput(env_messages=[], done=True)
        return StepOutput(env_messages=[{"role": "user", "content": more_text(self.rounds[self._answered])}], done=False)
