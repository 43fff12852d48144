"""Math problems with checkable answers, from any dataset of questions and answers. For real models.

Answers are compared by math-verify in child processes: comparing 1 with 9^{9^{9}} does not end, and sympy can't be interrupted.
"""

import functools
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated

from torchtitan.experiments.rl.bounds import Matches, NonEmptyStr, PositiveFloat
from torchtitan.experiments.rl.data.rows import RowDataset, load_rows
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.answers import answer_of, last_boxed, plain
from torchtitan.experiments.rl.tasks.questions import QuestionEnv
from torchtitan.experiments.rl.tasks.task import Task


@dataclass(kw_only=True, slots=True)
class MathProblem:
    question: str
    answer: str
    """As a person would write it into \\boxed{}: a number, an expression, a set, a word."""


class MathDataset(RowDataset):
    """Each row of one split is a problem."""

    @dataclass(kw_only=True, slots=True)
    class Config(RowDataset.Config):
        question_column: NonEmptyStr = "question"
        answer_column: NonEmptyStr = "answer"
        answer_marker: str | None = None
        """The answer is the text after the last such marker in its column ("####" in gsm8k). None: the whole column."""

        def check_rows(self, *, field: str) -> None:
            load_problems(self, field=field)

    def __init__(self, config: Config):
        super().__init__(config)
        self._problems, self._solutions = load_problems(config, field="dataset")

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> DataSample:
        info = {"demonstration": self._solutions[index]}
        return DataSample(sample_id=str(index), env_input=self._problems[index], info=info)


def load_problems(config: MathDataset.Config, *, field: str) -> tuple[list[MathProblem], list[str]]:
    """The problems in the dataset's order, and each one's whole answer column: gsm8k's has the way to the answer in it.

    Raises:
        ConfigError: it can't be found or read, lacks a column, is empty, or a row has no question or no answer.
    """
    rows = load_rows(config, field=field)
    for name in ("question_column", "answer_column"):
        if (column := getattr(config, name)) not in rows[0]:
            raise ConfigError(f"{field}.{name}", column, f"{config.path or 'rows'} has the columns {', '.join(rows[0])}")

    problems, solutions = [], []
    for index, row in enumerate(rows):
        place, question, solution = rows.place(index), row.get(config.question_column), row.get(config.answer_column)
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f"{field}.question_column", config.question_column, f"{place} holds {question!r}, want a text")
        if isinstance(solution, bool) or not isinstance(solution, str | int | float):
            cure = f"{place} holds {solution!r}, want a text or a number"
            raise ConfigError(f"{field}.answer_column", config.answer_column, cure)
        solutions.append(str(solution))
        problems.append(MathProblem(question=question, answer=_answer_in(str(solution), place, config, field=field)))
    return problems, solutions


def _answer_in(solution: str, place: str, config: MathDataset.Config, *, field: str) -> str:
    if config.answer_marker is None:
        answer = solution.strip()
    else:
        _, marker, answer = solution.rpartition(config.answer_marker)
        if not marker:
            raise ConfigError(f"{field}.answer_marker", config.answer_marker, f"{place} has none: {solution[-60:]!r}")
    if not answer.strip():
        raise ConfigError(f"{field}.answer_column", config.answer_column, f"{place} has an empty answer")
    return answer.strip()


def correct(rollout: Rollout, problem: MathProblem, *, loaded: ModuleType | None = None) -> float:
    """1 if the final answer equals the problem's, else 0; none, or one with no mathematics in it, is wrong.

    Args:
        loaded: math-verify. A child process imports it with this argument, before the time of its first call begins.

    Raises:
        ValueError: the problem's own answer can't be read.
    """
    answer = answer_of(rollout)
    return float(answer is not None and same_answer(problem.answer, plain(answer)))


def same_answer(expected: str, given: str) -> bool:
    """Whether they are equal as numbers, expressions, sets, intervals or text. Not symmetric: "x = 2" is a right answer where
    "2" is expected. Two that can't be compared are not equal.

    Raises:
        ValueError: ``expected`` can't be read.
    """
    from math_verify import parse, verify

    # math-verify's own limits make a late answer a wrong one, and raise outside the main thread: the child's limit is enough.
    wanted = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the dataset's answer {expected!r} can't be read as mathematics")
    return verify(wanted, parse(f"\\boxed{{{given}}}", parsing_timeout=None), timeout_seconds=None)


class MathRubric(Rubric):
    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        timeout_s: PositiveFloat = 10.0
        """For each comparison. One that takes longer makes its rollout an error, because the answer may be right."""

    def register_funcs(self) -> list[RewardFn]:
        import math_verify  # takes seconds: only runs that need it wait for it

        return [
            RewardFn(functools.partial(correct, loaded=math_verify), name="correct", isolate=True),
            RewardFn(boxed, weight=0.0),
            *super().register_funcs(),
        ]


async def boxed(rollout: Rollout, problem: MathProblem) -> float:
    return float(last_boxed(last_assistant_text(rollout)) is not None)


__all__ = ["MathDataset", "MathTask"]

TEMPLATE = "{question}\n\nReason step by step, and put your final answer within \\boxed{}."


class MathTask(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        template: Annotated[str, Matches(r"(?s).*\{question\}.*", "a text that contains {question}")] = TEMPLATE
        """The user's message; {question} is replaced. It should ask for \\boxed{}, by which answers are found best."""
        system_prompt: str | None = None
        rubric: Rubric.Config = field(default_factory=MathRubric.Config)
        env: RendererEnvConfig = field(default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=4096))
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def check_present(self, *, field: str) -> None:
            if isinstance(self.rubric, MathRubric.Config) and find_spec("math_verify") is None:
                raise MissingError(f"{field}.rubric", "math-verify", "is not installed: pip install math-verify")
            super(MathTask.Config, self).check_present(field=field)

    config: Config

    def make_env(self, sample: DataSample) -> QuestionEnv:
        # Not str.format: a template with \boxed{} in it has other braces.
        question = self.config.template.replace("{question}", sample.env_input.question)
        return QuestionEnv(question, system_prompt=self.config.system_prompt)
