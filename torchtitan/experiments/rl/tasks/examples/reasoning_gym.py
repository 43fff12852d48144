"""Asks puzzles of the reasoning_gym package: of one of its generators, or of a mixture.

For real models. The generator that made a puzzle scores its answer, in a child process. Nine of the
scorers evaluate what the model wrote, so an answer may hang or end that process:

    with eval       binary_matrix, n_queens, spiral_matrix, string_insertion
    with sympy's    countdown, intermediate_integration, polynomial_multiplication, puzzle24,
    parser          simple_integration; it calls eval too

A child process is no sandbox: leave those nine out where a model must not run code on the machine.
"""

import functools
import json
import random
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any

from annotated_types import MinLen

from torchtitan.experiments.rl.bounds import Changeable, Cure, Matches, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError, user_code
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.answers import answer_of, last_tagged, plain
from torchtitan.experiments.rl.tasks.questions import QuestionEnv
from torchtitan.experiments.rl.tasks.task import Task


@dataclass(kw_only=True, slots=True)
class PuzzleGenerator:
    """Generator of a mixture, with its share."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of the generator's own config, such as {"min_terms": 2} for chain_sum, but for seed
    and size, which the dataset gives."""
    weight: PositiveFloat = 1.0
    """Share of the puzzles, relative to the other generators'."""


@dataclass(kw_only=True, slots=True)
class Puzzle:
    """Puzzle of the dataset, with what its scorer needs."""

    generator: str
    """Name of the generator that made the puzzle and scores its answer."""
    config: dict[str, Any]
    """Config of the generator, seed and size included."""
    entry: dict[str, Any]
    """Question, answer and metadata, as the generator made them."""


_WANTED = (
    "want a name of reasoning_gym.factory.DATASETS, and fields of its config but seed and size, "
    "which are the dataset's"
)


class ReasoningGymDataset(Dataset):
    """Dataset of puzzles, each made when it is asked for.

    102 of the 105 generators make puzzle i from seed + i, so two datasets share puzzles where their
    [seed, seed + count) overlap. acre and gsm_symbolic also draw from the seed without i, and
    list_functions makes other puzzles in every process.

    Making one takes 0.1 ms for most generators. It takes 0.1 to 1 s for countdown, futoshiki,
    intermediate_integration, knight_swap, polynomial_multiplication, puzzle24, sokoban and
    zebra_puzzles. A run asks its datasets in one thread, one example at a time
    (`ask/ordered.py`), so these hold up the start of other groups.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        generators: Annotated[
            dict[str, PuzzleGenerator], MinLen(1), Cure("name at least one generator")
        ]
        """Generators by reasoning_gym's names, such as {"chain_sum": PuzzleGenerator()}."""
        count: PositiveInt = 10_000
        seed: int = 0

        def check_present(self, *, field: str) -> None:
            if find_spec("reasoning_gym") is None:
                names = ", ".join(self.generators)
                raise MissingError(
                    f"{field}.generators", names, "need reasoning-gym: pip install reasoning-gym"
                )

    config: Config

    def __init__(self, config: Config):
        super().__init__(config)
        import reasoning_gym  # takes a second: only runs that need it wait for it

        self._names = list(config.generators)
        self._weights = [generator.weight for generator in config.generators.values()]
        self._configs: dict[str, Any] = {}
        self._generators: dict[str, Any] = {}
        for name, generator in config.generators.items():
            with user_code(f"dataset.generators.{name}", generator.config, _WANTED):
                fields = dict(**generator.config, seed=config.seed, size=config.count)
                self._configs[name] = fields
                self._generators[name] = reasoning_gym.create_dataset(name, **fields)

    def __len__(self) -> int:
        return self.config.count

    def __getitem__(self, index: int) -> DataSample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # The choice depends on the seed and the index alone: a resumed run gets the same puzzles.
        (name,) = random.Random(f"{self.config.seed}/{index}").choices(self._names, self._weights)
        entry = self._generators[name][index]
        info = {"generator": name}
        if isinstance(entry["answer"], str):  # a puzzle with many solutions may give none
            info["demonstration"] = entry["answer"]
        return DataSample(
            sample_id=f"{name}/{index}",
            env_input=Puzzle(generator=name, config=self._configs[name], entry=entry),
            info=info,
        )


def solved(
    rollout: Rollout, puzzle: Puzzle, *, exact: bool, loaded: ModuleType | None = None
) -> float:
    """Return the generator's score of the answer, 0 to 1; 0 if there is no answer.

    Args:
        rollout: a finished rollout.
        puzzle: its puzzle.
        exact: as in PuzzleRubric.Config.
        loaded: reasoning_gym. A child process unpickles this argument, and so imports the package,
            before the time limit of its first call begins.

    Raises:
        Exception: the scorer's.
    """
    answer = last_assistant_text(rollout).strip() if exact else answer_of(rollout)
    if not answer:
        return 0.0
    generator = _generator(puzzle.generator, json.dumps(puzzle.config))
    score = float(generator.score_answer(answer, puzzle.entry))
    if score == 1 or exact or plain(answer) == answer:
        return score
    return max(score, float(generator.score_answer(plain(answer), puzzle.entry)))


@functools.cache
def _generator(name: str, config: str) -> Any:  # noqa: ANN401 - reasoning_gym's
    """Build a generator, and keep it: some read word lists and grids from files.

    Args:
        name: reasoning_gym's name for it.
        config: fields of its config, as JSON.
    """
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


class PuzzleRubric(Rubric):
    """Rubric that has the puzzle's generator score the answer, in a child process."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        exact: bool = False
        """True if the whole message has to be the answer. If False, its final answer counts, which
        the prompt asks for between <answer> and </answer>."""
        timeout_s: Changeable[PositiveFloat] = 10.0
        """Time limit of a score. One that takes longer makes its rollout an error."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        import reasoning_gym  # takes a second: only runs that need it wait for it

        score = functools.partial(solved, exact=self.config.exact, loaded=reasoning_gym)
        return [
            RewardFn(score, name="solved", isolate=True, takes="rollout"),
            RewardFn(tagged, weight=0.0, takes="rollout"),
            *super().register_funcs(),
        ]


async def tagged(rollout: Rollout, puzzle: Puzzle) -> float:
    """Return 1 if the last message has an answer between tags, as the prompt asks, else 0."""
    return float(bool(last_tagged(last_assistant_text(rollout))))


__all__ = ["PuzzleGenerator", "PuzzleRubric", "ReasoningGymDataset", "ReasoningGymTask"]

TEMPLATE = (
    "{question}\n\nReason step by step, and put nothing but your final answer between <answer> and "
    "</answer>."
)


class ReasoningGymTask(Task):
    """Task that asks a puzzle and scores the one answer."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        template: Annotated[
            str, Matches(r"(?s).*\{question\}.*", "a text that contains {question}")
        ] = TEMPLATE
        """Text of the user's message; {question} stands for the puzzle. An answer is found most
        reliably in the <answer></answer> that the text asks for."""
        rubric: Rubric.Config = field(default_factory=PuzzleRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=4096)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def validate(self, *, field: str, policy_path: str | None = None) -> None:
            super(ReasoningGymTask.Config, self).validate(field=field, policy_path=policy_path)
            trained = self.dataset
            held_out = self.validation
            if not isinstance(trained, ReasoningGymDataset.Config):
                return
            if not isinstance(held_out, ReasoningGymDataset.Config):
                return
            end = trained.seed + trained.count
            overlaps = held_out.seed < end and trained.seed < held_out.seed + held_out.count
            if overlaps and trained.generators.keys() & held_out.generators.keys():
                cure = (
                    "puzzle i is made from seed + i, and training has seeds "
                    f"{trained.seed} to {end - 1}: take {end} or more"
                )
                raise ConfigError(f"{field}.validation.seed", held_out.seed, cure)

    config: Config

    def make_env(self, sample: DataSample) -> QuestionEnv:
        puzzle: Puzzle = sample.env_input
        question = self.config.template.replace("{question}", puzzle.entry["question"])
        return QuestionEnv(question)
