"""Math problems from the hub or from a file, for the `math` task."""

from dataclasses import dataclass

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.data.rows import RowDataset, load_rows
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.rollouts.types import DataSample


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
    for name, column in (("question_column", config.question_column), ("answer_column", config.answer_column)):
        if column not in rows[0]:
            raise ConfigError(f"{field}.{name}", column, f"{config.path or 'rows'} has the columns {', '.join(rows[0])}")

    problems, solutions = [], []
    for index, row in enumerate(rows):
        question, solution = row.get(config.question_column), row.get(config.answer_column)
        if not isinstance(question, str) or not question.strip():
            cure = f"{rows.place(index)} holds {question!r}, want a text"
            raise ConfigError(f"{field}.question_column", config.question_column, cure)
        if isinstance(solution, bool) or not isinstance(solution, str | int | float):
            cure = f"{rows.place(index)} holds {solution!r}, want a text or a number"
            raise ConfigError(f"{field}.answer_column", config.answer_column, cure)
        solutions.append(str(solution))
        problems.append(
            MathProblem(question=question, answer=_answer_in(solutions[-1], rows.place(index), config, field=field))
        )
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
