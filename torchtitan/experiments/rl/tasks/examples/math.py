"""Asks math problems of any dataset of questions and answers. For real models.

Answers are compared by math-verify in a child process, which is ended at its time limit: comparing
1 with 9^{9^{9}} would take forever, and sympy can't be interrupted.
"""

import functools
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torchtitan.experiments.rl.bounds import Changeable, NonEmptyStr, PositiveFloat
from torchtitan.experiments.rl.data.rows import RowDataset, is_missing
from torchtitan.experiments.rl.envs.renderer_env import RendererEnvConfig
from torchtitan.experiments.rl.errors import ConfigError, MissingError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import DataSample, Rollout
from torchtitan.experiments.rl.rubrics.rubric import RewardFn, Rubric, last_assistant_text
from torchtitan.experiments.rl.tasks.answer_forms import canonical, same_form
from torchtitan.experiments.rl.tasks.answers import answer_of, last_boxed, plain
from torchtitan.experiments.rl.tasks.questions import QuestionTask

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*")
_DATE = re.compile(r"\d{4}([-/.])\d{1,2}\1\d{1,2}|\d{1,2}([-/.])\d{1,2}\2\d{4}")


def answer_in(row: dict[str, Any], *, column: str, marker: str | None) -> str:
    """Return the right answer of a row; "" if it has none.

    Args:
        row: a row of the dataset.
        column: name of the column of the answer.
        marker: text after whose last occurrence the answer stands; None if it is the whole text.
    """
    value = row.get(column)
    if is_missing(value) or isinstance(value, bool | list | dict):
        return ""
    text = str(value)
    if marker is None:
        return text.strip()
    return text.rpartition(marker)[2].strip() if marker in text else ""


def correct(
    rollout: Rollout,
    row: dict[str, Any],
    *,
    column: str,
    marker: str | None,
    loaded: ModuleType | None = None,
) -> float:
    """Return 1 if the rollout's final answer equals the row's, else 0.

    No answer, or one without mathematics in it, is wrong.

    Args:
        rollout: a finished rollout.
        row: its row of the dataset.
        column: as for `answer_in`.
        marker: as for `answer_in`.
        loaded: math-verify. A child process unpickles this argument, and so imports the package,
            before the time limit of its first call begins.

    Raises:
        ValueError: the row's own answer can't be read.
    """
    answer = answer_of(rollout)
    if answer is None:
        return 0.0
    return float(same_answer(answer_in(row, column=column, marker=marker), plain(answer)))


def same_answer(expected: str, given: str) -> bool:
    """Return True if two answers are equal as numbers, expressions, sets, intervals or text.

    This is not symmetric: "x = 2" is a right answer where "2" is expected. Answers that can't be
    compared are not equal.

    Raises:
        ValueError: ``expected`` can't be read.
    """
    from math_verify import parse, verify

    if same_form(expected, given):
        return True
    # math-verify would read a word as a product of its letters, and a date as a difference.
    expected_text = canonical(expected)
    are_words = _WORDS.fullmatch(expected_text) and _WORDS.fullmatch(canonical(given))
    if are_words or _DATE.fullmatch(expected_text):
        return False
    # Without math-verify's own limits, which make a late answer a wrong one and raise outside the
    # main thread. The child process has a limit.
    expected_value = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not expected_value:
        raise ValueError(f"the dataset's answer {expected!r} can't be read as mathematics")
    given_value = parse(f"\\boxed{{{given}}}", parsing_timeout=None)
    return verify(expected_value, given_value, timeout_seconds=None)


class MathRubric(Rubric):
    """Rubric that compares the final answer with the row's, in a child process."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rubric.Config):
        timeout_s: Changeable[PositiveFloat] = 10.0
        """Time limit of a comparison. One that takes longer makes its rollout an error, because the
        answer may be right."""
        answer_column: NonEmptyStr = "answer"
        """Column of the right answer, written as into \\boxed{}: a number, an expression, a set, a
        word."""
        answer_marker: NonEmptyStr | None = None
        """Text after whose last occurrence in the column the answer stands, such as "####" in
        gsm8k. If None, the whole column is the answer."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        import math_verify  # takes seconds: only runs that need it wait for it

        compare = functools.partial(
            correct,
            column=self.config.answer_column,
            marker=self.config.answer_marker,
            loaded=math_verify,
        )
        return [
            RewardFn(compare, name="correct", isolate=True, takes="rollout"),
            RewardFn(boxed, weight=0.0, takes="rollout"),
            *super().register_funcs(),
        ]


async def boxed(rollout: Rollout, row: dict[str, Any]) -> float:
    r"""Return 1 if the last message has an answer in \boxed{}, as the prompt asks, else 0."""
    return float(last_boxed(last_assistant_text(rollout)) is not None)


__all__ = ["MathRubric", "MathTask"]


class MathTask(QuestionTask):
    """Task that asks for step-by-step reasoning and an answer in a box."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        template: str = (
            "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
        )
        """Text of the user's message, as in QuestionTask. An answer is found most reliably in the
        \\boxed{} that the text asks for."""
        rubric: Rubric.Config = field(default_factory=MathRubric.Config)
        env: RendererEnvConfig = field(
            default_factory=lambda: RendererEnvConfig(max_turns=1, max_rollout_tokens=4096)
        )
        sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(max_tokens=3072))

        def check_present(self, *, field: str) -> None:
            if isinstance(self.rubric, MathRubric.Config) and find_spec("math_verify") is None:
                raise MissingError(
                    f"{field}.rubric", "math-verify", "is not installed: pip install math-verify"
                )
            super(MathTask.Config, self).check_present(field=field)

    def known_answer(self, sample: DataSample) -> str | None:
        """Return the answer that the rubric compares with."""
        rubric = self.config.rubric
        if not isinstance(rubric, MathRubric.Config):
            return super().known_answer(sample)
        return _right_answer(sample.env_input, rubric) or None

    def check_examples(self, *, field: str) -> None:
        """See Task. Refuse a row without an answer."""
        super().check_examples(field=field)
        rubric = self.config.rubric
        if not isinstance(rubric, MathRubric.Config):
            return
        for dataset in (self.dataset, self.validation):
            if isinstance(dataset, RowDataset):
                _check_answers(dataset, rubric, field=f"{field}.rubric.answer_column")


def _right_answer(row: dict[str, Any], rubric: MathRubric.Config) -> str:
    """Return the answer of a row that the rubric compares with; "" if it has none."""
    return answer_in(row, column=rubric.answer_column, marker=rubric.answer_marker)


def _check_answers(dataset: RowDataset, rubric: MathRubric.Config, *, field: str) -> None:
    """Refuse a row without an answer.

    Raises:
        ConfigError: naming the first such row.
    """
    column = rubric.answer_column
    for index, row in enumerate(dataset.rows):
        if _right_answer(row, rubric):
            continue
        location = f"{dataset.rows.location(index)} of {dataset.config.path or 'rows'}"
        marker = rubric.answer_marker
        wanted = "want a text or a number" + (f' behind "{marker}"' if marker else "")
        cure = f"{location} ends {repr(row.get(column))[-60:]}: {wanted}"
        raise ConfigError(field, column, cure)
