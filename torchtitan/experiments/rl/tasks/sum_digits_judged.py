"""Digit sums whose rewards a judge decides: a frozen model is asked the question, and its answer is what counts.

The right sum is only recorded, with weight 0, so that one sees how good the judge is.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.experiments.rl.bounds import Cure
from torchtitan.experiments.rl.generation.judge import Judge
from torchtitan.experiments.rl.rollouts.policy import PolicyClient
from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text, win_shares
from torchtitan.experiments.rl.tasks.sum_digits import exact, prompt_text


class JudgedSumDigitsRubric(Rubric):
    """A Judge.Config in the config, the judge made with the rubric and set up with it, and reward functions that ask it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        judge: Annotated[Judge.Config, Cure("Judge.Config(model=HostedModel(path=...))")]
        mode: Literal["each", "pairwise"] = "each"
        """each: 1 for a reply that is the judge's. pairwise: the share of comparisons with the group's others that it wins."""

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.judge: Judge = config.judge.build()

    def register_funcs(self) -> list[RewardFn]:
        truth = RewardFn(exact, weight=0.0, name="correct")
        if self.config.mode == "each":
            return [RewardFn(self.agrees), truth]
        return [RewardFn(self.wins, group_level=True), truth]

    async def setup(self, policy: PolicyClient) -> None:
        await self.judge.setup(policy)

    async def agrees(self, rollout: Rollout, digits: list[int]) -> float:
        return float(last_assistant_text(rollout).strip() == await self._verdict(digits))

    async def wins(self, rollouts: list[Rollout], digits: list[int]) -> list[float]:
        replies = [last_assistant_text(rollout).strip() for rollout in rollouts]

        async def prefers(first: int, second: int) -> float:
            verdict = await self._verdict(digits)
            return 0.5 + 0.5 * ((replies[first] == verdict) - (replies[second] == verdict))

        return await win_shares(len(replies), prefers)

    async def _verdict(self, digits: list[int]) -> str:
        answer = await self.judge.chat([{"role": "user", "content": prompt_text(digits)}])
        return str(answer["content"]).strip()
