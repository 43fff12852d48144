"""Math problems with checkable answers, from any dataset of questions and answers. For real models.

Answers are compared by math-verify in child processes: comparing 1 with 9^{9^{9}} does not end, and sympy can't be interrupted.
"""

import functools
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torchtitan.experiments.rl.bounds import NonEmptyStr, PositiveFloat
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
    """What the column holds behind the last marker; "" where that is no text or number, or where there is no marker."""
    value = row.get(column)
    text = "" if is_missing(value) or isinstance(value, bool | list | dict) else str(value)
    answer = text if marker is None else text.rpartition(marker)[2] if marker in text else ""
    return answer.strip()


def correct(
    rollout: Rollout,
    row: dict[str, Any],
    *,
    column: str,
    marker: str | None,
    loaded: ModuleType | None = None,
) -> float:
    """1 if the final answer equals the row's, else 0; none, or one with no mathematics in it, is wrong.

    Args:
        loaded: math-verify. A child process imports it with this argument, before the time of its first call begins.

    Raises:
        ValueError: the row's own answer can't be read.
    """
    answer = answer_of(rollout)
    return float(
        answer is not None
        and same_answer(answer_in(row, column=column, marker=marker), plain(answer))
    )


def same_answer(expected: str, given: str) -> bool:
    """Return whether two answers are equal as numbers, expressions, sets, intervals or text.

    This is not symmetric: "x = 2" is a right answer where "2" is expected. Two that can't be compared are not equal.

    Raises:
        ValueError: ``expected`` can't be read.
    """
    from math_verify import parse, verify

    if same_form(expected, given):
        return True
    # As mathematics a word is a product of its letters, and a date a difference.
    wanted_text = canonical(expected)
    given_text = canonical(given)
    if _DATE.fullmatch(wanted_text) or (
        _WORDS.fullmatch(wanted_text) and _WORDS.fullmatch(given_text)
    ):
        return False
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
        answer_column: NonEmptyStr = "answer"
        """Of the row: the right answer as a person would write it into \\boxed{}: a number, an expression, a set, a word."""
        answer_marker: NonEmptyStr | None = None
        """The answer is the text after the last such marker in its column ("####" in gsm8k). None: the whole column."""

    config: Config

    def register_funcs(self) -> list[RewardFn]:
        import math_verify  # takes seconds: only runs that need it wait for it

        column, marker = self.config.answer_column, self.config.answer_marker
        compare = functools.partial(correct, column=column, marker=marker, loaded=math_verify)
        return [
            RewardFn(compare, name="correct", isolate=True, takes="rollout"),
            RewardFn(boxed, weight=0.0, takes="rollout"),
            *super().register_funcs(),
        ]


async def boxed(rollout: Rollout, row: dict[str, Any]) -> float:
    return float(last_boxed(last_assistant_text(rollout)) is not None)


__all__ = ["MathRubric", "MathTask"]


class MathTask(QuestionTask):
    @dataclass(kw_only=True, slots=True)
    class Config(QuestionTask.Config):
        template: str = (
            "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
        )
        """As QuestionTask's. It should ask for \\boxed{}, by which answers are found best."""
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
        return (
            answer_in(sample.env_input, column=rubric.answer_column, marker=rubric.answer_marker)
            or None
        )

    def check_examples(self, *, field: str) -> None:
        """See Task. Refuses a row without an answer."""
        super().check_examples(field=field)
        rubric = self.config.rubric
        for dataset in (self.dataset, self.validation):
            if not (isinstance(dataset, RowDataset) and isinstance(rubric, MathRubric.Config)):
                continue
            column, marker = rubric.answer_column, rubric.answer_marker
            for index, row in enumerate(dataset.rows):
                if not answer_in(row, column=column, marker=marker):
                    place = f"{dataset.rows.place(index)} of {dataset.config.path or 'rows'}"
                    wanted = "want a text or a number" + (f' behind "{marker}"' if marker else "")
                    cure = f"{place} ends {repr(row.get(column))[-60:]}: {wanted}"
                    raise ConfigError(f"{field}.rubric.answer_column", column, cure)
