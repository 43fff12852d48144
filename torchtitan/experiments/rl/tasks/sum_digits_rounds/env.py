"""Several questions in a conversation. After each reply the env sends the right sum and the next question."""

from renderers import Message

from torchtitan.experiments.rl.envs.message_env import MessageEnv, ResetOutput, StepOutput
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text, prompt_text


class SumDigitsRoundsEnv(MessageEnv):
    """Gives 1 / rounds, as component "right", for each right reply, so that a rollout's sum is in [0, 1]."""

    def __init__(self, rounds: list[list[int]]):
        self.rounds = rounds
        self._round = 0

    async def reset(self) -> ResetOutput:
        return ResetOutput(messages=[{"role": "user", "content": prompt_text(self.rounds[0])}])

    async def step_message(self, message: Message) -> StepOutput:
        answer = answer_text(self.rounds[self._round])
        right = message["content"].strip() == answer
        self._round += 1
        done = self._round == len(self.rounds)
        messages = (
            [] if done else [{"role": "user", "content": f"The sum is {answer}. {prompt_text(self.rounds[self._round])}"}]
        )
        return StepOutput(env_messages=messages, done=done, reward_components={"right": right / len(self.rounds)})
