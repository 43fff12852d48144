"""Compares two answers as mathematics, by math-verify. Importing this module imports that package.

Only child processes call ``correct``: comparing 1 with 9^{9^{9}} does not end, and sympy can't be interrupted.
"""

from math_verify import parse, verify

from torchtitan.experiments.rl.rollouts.types import Rollout
from torchtitan.experiments.rl.tasks.answers import answer_of, plain
from torchtitan.experiments.rl.tasks.math.data import MathProblem


def correct(rollout: Rollout, problem: MathProblem) -> float:
    """1 if the final answer equals the problem's, else 0; none, or one with no mathematics in it, is wrong.

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
    # math-verify's own limits make a late answer a wrong one, and raise outside the main thread: the child's limit is enough.
    wanted = parse(f"\\boxed{{{expected}}}", parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the dataset's answer {expected!r} can't be read as mathematics")
    return verify(wanted, parse(f"\\boxed{{{given}}}", parsing_timeout=None), timeout_seconds=None)
