"""Math problems from the hub or from a file, for the `math` task."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.bounds import NonEmptyStr
from torchtitan.experiments.rl.data.dataset import Dataset
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.types import DataSample
from torchtitan.experiments.rl.user_code.calls import cause_of

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(kw_only=True, slots=True)
class MathProblem:
    question: str
    answer: str
    """As a person would write it into \\boxed{}: a number, an expression, a set, a word."""


class MathDataset(Dataset):
    """Each row of one split is an example."""

    @dataclass(kw_only=True, slots=True)
    class Config(Dataset.Config):
        path: NonEmptyStr
        """A dataset of the hub, or a local file: .jsonl, .json or .parquet."""
        name: str | None = None
        """The hub dataset's configuration, where it has several."""
        split: NonEmptyStr = "train"
        """A split, or a slice of one, such as "train[:95%]" and "train[95%:]"; a file is all one split, whatever its name."""
        question_column: NonEmptyStr = "question"
        answer_column: NonEmptyStr = "answer"
        answer_marker: str | None = None
        """The answer is the text after the last such marker in its column ("####" in gsm8k). None: the whole column."""

        @property
        def file(self) -> Path | None:
            """The local file, if it names one."""
            return Path(self.path).expanduser() if Path(self.path).suffix in FILE_FORMATS else None

        def validate(self, *, field: str) -> None:
            if self.file is not None and self.name is not None:
                raise ConfigError(f"{field}.name", self.name, "only datasets of the hub have one: leave it out for a file")

        def check_present(self, *, field: str) -> None:
            """Reads a file, row by row. A dataset of the hub is downloaded when the command builds the task."""
            if self.file is not None:
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
    rows = _load_rows(config, field=field)
    for name, column in (("question_column", config.question_column), ("answer_column", config.answer_column)):
        if column not in rows.column_names:
            raise ConfigError(f"{field}.{name}", column, f"{config.path} has the columns {', '.join(rows.column_names)}")

    problems, solutions = [], []
    for index, (question, solution) in enumerate(zip(rows[config.question_column], rows[config.answer_column], strict=True)):
        if not isinstance(question, str) or not question.strip():
            cure = f"row {index} holds {question!r}, want a text"
            raise ConfigError(f"{field}.question_column", config.question_column, cure)
        if isinstance(solution, bool) or not isinstance(solution, str | int | float):
            cure = f"row {index} holds {solution!r}, want a text or a number"
            raise ConfigError(f"{field}.answer_column", config.answer_column, cure)
        solutions.append(str(solution))
        problems.append(MathProblem(question=question, answer=_answer_in(solutions[-1], index, config, field=field)))
    return problems, solutions


def _answer_in(solution: str, index: int, config: MathDataset.Config, *, field: str) -> str:
    if config.answer_marker is None:
        answer = solution.strip()
    else:
        _, marker, answer = solution.rpartition(config.answer_marker)
        if not marker:
            raise ConfigError(f"{field}.answer_marker", config.answer_marker, f"row {index} has none: {solution[-60:]!r}")
    if not answer.strip():
        raise ConfigError(f"{field}.answer_column", config.answer_column, f"row {index} has an empty answer")
    return answer.strip()


def _load_rows(config: MathDataset.Config, *, field: str) -> Any:
    import datasets  # takes a second: only runs that need it wait for it

    file = config.file
    if file is not None:
        try:
            is_file = stat.S_ISREG(file.stat().st_mode)
        except FileNotFoundError:
            raise MissingError(f"{field}.path", config.path, "no such file") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field}.path", config.path, f"can't be read: {error}") from None
        if not is_file:
            raise ConfigError(f"{field}.path", config.path, "is no file")
    try:
        if file is None:
            return datasets.load_dataset(config.path, config.name, split=config.split)
        with _no_progress_bars(datasets):
            files = {config.split.partition("[")[0]: str(file)}
            return datasets.load_dataset(FILE_FORMATS[file.suffix], data_files=files, split=config.split)
    except Exception as error:  # the hub, the network, the parsers and the library itself each raise types of their own
        raise ConfigError(f"{field}.path", config.path, f"can't be loaded: {cause_of(error.__cause__ or error)}") from error


@contextmanager
def _no_progress_bars(datasets: Any) -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
