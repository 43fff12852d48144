"""Conversations with the right sums, for a task that learns from demonstrations."""

from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.tasks.sum_digits.data import answer_text, prompt_text
from torchtitan.experiments.rl.tasks.sum_digits.task import SumDigitsDataset


class SumDigitsDemonstrations(SumDigitsDataset):
    """As SumDigitsDataset, each example with its answer."""

    def __getitem__(self, index: int) -> DataSample:
        example = super().__getitem__(index)
        messages = [
            {"role": "user", "content": prompt_text(example.env_input)},
            {"role": "assistant", "content": answer_text(example.env_input)},
        ]
        return DataSample(sample_id=example.sample_id, env_input={"messages": messages}, info=example.info)
