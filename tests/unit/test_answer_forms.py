"""One table of answers as data and models write them, judged by hand: reply, the row's answer, right or wrong."""

import math

import pandas
import pytest

from torchtitan.experiments.rl.tasks.answers import right_answer
from torchtitan.experiments.rl.tasks.examples.math import same_answer

LONG = "1" + "0" * 2000
"""A number of 2,001 digits."""

RIGHT = [
    # Marks that data ships with its answers.
    ("#### 42", "He has 6 * 7 = 42 apples.\n#### 42"),
    ("The answer is 42.", "He has 6 * 7 = 42 apples. #### 42"),
    ("He has ... #### 42", "42"),
    ("#### 1,200", "So 1,200.\n#### 1,200"),
    ("\\boxed{blue}", "Seen by all.\n#### blue"),
    ("42", "\\boxed{42}"),
    ("42", "Answer: 42"),
    ("42", "The answer is 42."),
    ("42", "<answer>42</answer>"),
    ("42", "**42**"),
    # Numbers.
    ("-5", "−5"),
    ("−5", "−5"),
    ("−5", -5),
    ("–5", "-5"),
    ("1000000", "1 000 000"),
    ("The total is 1 000 000.", 1000000),
    ("1,000,000", "1 000 000"),
    ("1\u00a0000\u202f000", "1000000"),
    ("1000", "1_000"),
    ("1_000", "1000"),
    ("0.5", ".5"),
    (".5", "0.5"),
    (".5", ".5"),
    ("It is .5 in the end", 0.5),
    ("10000000000000000", 1e16),
    ("1e16", "10000000000000000"),
    ("0.00001", 1e-05),
    ("1500", "1.5e3"),
    ("1.5 \\times 10^{3}", "1500"),
    ("42.0", 42),
    ("42", 42.0),
    ("+5", "5"),
    ("0.5", "1/2"),
    ("1/2", 0.5),
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("1/2", "\\frac12"),
    ("0.5", "\\dfrac{1}{2}"),
    ("\\frac{1}{2}", "\\dfrac{1}{2}"),
    ("-0.5", "-\\frac{1}{2}"),
    ("0.5", "½"),
    ("1.5", "1½"),
    ("3/2", "1\\frac{1}{2}"),
    ("2/4", "1/2"),
    ("４２", "42"),
    ("42", "[42]"),
    ("42", [42]),
    (LONG, LONG),
    # Units.
    ("42", "42 dollars"),
    ("$42", "42 dollars"),
    ("42 dollars", "42"),
    ("42", "42 km"),
    ("42\\text{ km}", "42 km"),
    ("He ran 42 km in all", "42 km"),
    ("90", "90^\\circ"),
    ("90°", "90^{\\circ}"),
    ("90 degrees", "90^\\circ"),
    ("50%", "50\\%"),
    ("50\\%", "50%"),
    ("$1,200.00", "\\$1200"),
    # Texts.
    ("\\boxed{(1,2)}", "(1, 2)"),
    ("(1, 2)", "(1,2)"),
    ("[0, 1]", "[0,1]"),
    ("\\boxed{[0,1]}", "[0, 1]"),
    ("2\\sqrt{3}", "2 \\sqrt{3}"),
    ("\\left(1, 2\\right)", "(1,2)"),
    ("New York", "New  York"),
    ("new york.", "New York"),
    ("caf\u00e9", "cafe\u0301"),
    ("Paris", "Par\u200bis"),
    ("A", "(A)"),
    ("The answer is (B).", "B"),
    ("true", True),
]

WRONG = [
    ("43", "42"),
    ("5", "−5"),
    ("1", "1 000 000"),
    ("1e16", "1"),
    ("1_000", "1"),
    ("1.5e3", "1.5"),
    ("1/2", "1"),
    ("1/2", "2"),
    ("1/3", "0.333"),
    ("42 km", "42 miles"),
    ("2", "2x"),
    ("2", "2\\sqrt{3}"),
    ("2", "2 pi"),
    ("12", "12 May"),
    ("1200", "(1,200)"),
    ("1200", "[1,200]"),
    ("2.5", "2(5)"),
    ("[0,1]", "(0,1)"),
    ("41 or 42", "42"),
    ("it is not 42", "42"),
    ("", "42"),
    ("no idea", LONG),
    ("", LONG),
    (LONG[:-1] + "1", LONG),
    ("1e999999999", "1"),
    ("1/0", "0"),
    ("silent", "listen"),
    ("2018", "2024-01-05"),
    ("<think>42</think>", "42"),
]


@pytest.mark.parametrize(("reply", "answer"), RIGHT)
def test_a_right_answer_is_right_in_every_form(reply, answer):
    assert right_answer(reply, {"answer": answer}) == 1


@pytest.mark.parametrize(("reply", "answer"), WRONG)
def test_a_wrong_answer_is_wrong_in_every_form(reply, answer):
    assert right_answer(reply, {"answer": answer}) == 0


@pytest.mark.parametrize(
    "answer", ["", "  ", None, math.nan, pandas.NaT, pandas.NA, "#### ", "\\boxed{}"], ids=repr
)
@pytest.mark.parametrize("reply", ["", "None", "nan", "NaT", "42"])
def test_a_row_without_an_answer_rewards_nothing_and_is_an_error(reply, answer):
    with pytest.raises(ValueError, match="the row's answer is .*: fill it in"):
        right_answer(reply, {"answer": answer})


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ("listen", "silent", False),
        ("listen", "Listen", True),
        ("listen", "\\text{listen}", True),
        ("ab", "ba", False),
        ("ab", "a \\cdot b", True),
        ("New York", "York New", False),
        ("2024-01-05", "2018", False),
        ("2024-01-05", "2024-01-05", True),
        ("05/01/2024", "5/2024", False),
        ("1 000 000", "1000000", True),
        ("1e16", "10000000000000000", True),
        ("½", "0.5", True),
        ("90°", "90", True),
        ("90", "90^\\circ", True),
        ("４２", "42", True),
        ("2/3", "0.6667", False),
        ("2x", "2", False),
    ],
)
def test_math_compares_words_and_dates_as_texts_and_numbers_by_value(expected, given, same):
    assert same_answer(expected, given) is same
