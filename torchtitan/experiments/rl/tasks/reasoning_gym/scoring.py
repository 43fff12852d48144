"""Scores answers with reasoning_gym's own scorers, in child processes. Importing this module imports that package."""

import functools
import json

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.rubrics.rubric import last_assistant_text
from torchtitan.experiments.rl.tasks.answers import answer_of, plain
from torchtitan.experiments.rl.tasks.reasoning_gym.data import Puzzle


def solved(rollout: Rollout, puzzle: Puzzle, *, exact: bool) -> float:
    """The generator's score of the answer, 0 to 1; 0 where there is none. Raises what the scorer raises."""
    answer = last_assistant_text(rollout).strip() if exact else answer_of(rollout)
    if not answer:
        return 0.0
    generator = _generator(puzzle.generator, json.dumps(puzzle.config))
    score = float(generator.score_answer(answer, puzzle.entry))
    if score == 1 or exact or plain(answer) == answer:
        return score
    return max(score, float(generator.score_answer(plain(answer), puzzle.entry)))


@functools.cache
def _generator(name: str, config: str) -> ProceduralDataset:
    """Cached, because some generators read word lists and grids from files."""
    return reasoning_gym.create_dataset(name, **json.loads(config))
