r"""Compares two written answers, such as a row's and a reply's, after normalizing both alike.

Numbers are equal by value: ``1 000``, ``1,000``, ``1e3``, ``2000/2`` and ``\frac{2000}{2}`` are one
answer. Everything else is compared as text, without its case and its markup. Nothing is evaluated:
``2 + 2`` is not ``4``.
"""

import calendar
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_DIGITS = 400
"""Maximum length of a number that is compared by its value. A longer one is compared as text."""
MAX_EXPONENT = 400
"""Maximum exponent of a number that is compared by its value. Without it, ``1e999999999`` would be
a number of a gigabyte."""

_MINUS_SIGNS = re.compile("[\u2212\ufe63\uff0d]|[\u2010-\u2013](?=[\\d.$\\\\])")
_SPACES = re.compile(r"(?:\\[ ,;:!]|~|\\quad\b|\s)+")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\s*\\(?:degree|circ)\b")
_OPERAND = r"\s*(?:\{([^{}]*)\}|(\w))"
_FRACTION_COMMAND = re.compile(r"\\[dtc]?frac(?![a-zA-Z])" + _OPERAND + _OPERAND)
_ESCAPED_SIGN = re.compile(r"\\([%$#&_])")

_GROUPED = r"\d{1,3}(?:(?P<separator>[, _'\u2019])\d{3})(?:(?P=separator)\d{3})*|\d+"
_DECIMAL = rf"(?:(?:{_GROUPED})(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,4}})?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s?[$€£¥]?\s?(?P<sign2>[-+]?)"
    rf"(?:(?:(?P<whole>\d+) )?(?P<over>\d+) ?/ ?(?P<under>\d+)|(?P<decimal>{_DECIMAL}))"
    r"(?P<power> ?(?:\\times|\\cdot|[x×*·]) ?10 ?\^ ?"
    r"(?:\{(?P<braced>[-+]?\d+)\}|(?P<bare>[-+]?\d+)))?"
    r"(?: ?[%°])?(?P<unit> ?[^\W\d_]+(?:/[^\W\d_]+)?(?:\^?\{?[23²³]\}?)?)?"
)
_SHORT_UNITS = frozenset(
    "km cm mm nm kg mg ml cl dl mi ft in yd lb oz hr min ms mph kph km/h m/s m² m³ m^2 m^3".split()
)
_NO_UNITS = frozenset(
    (
        "sin cos tan cot sec csc log exp sqrt "
        "theta alpha beta gamma delta lambda sigma omega epsilon phi"
    ).split()
    + [month.casefold() for month in (*calendar.month_name, *calendar.month_abbr)]
)
"""Words that are no units: ``3 theta`` and ``12 May`` are compared as texts."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit."""

    value: Fraction
    unit: str
    """Unit without its case, such as "km"; "" for none. Currencies, degrees and percent count as
    none."""

    def equals(self, other: "Quantity") -> bool:
        """Return True if the values are equal, and the units where both have one."""
        same_unit = self.unit == other.unit or not self.unit or not other.unit
        return self.value == other.value and same_unit


def readable(text: str) -> str:
    """Return the text with numbers in plain characters, and without invisible characters.

    Letters are composed, so that both ways to write an accent are equal. Digits and letters of full
    width, minus signs and fractions such as ½ are written in ASCII.
    """
    if text.isascii():
        return text
    return _MINUS_SIGNS.sub("-", "".join(map(_character, unicodedata.normalize("NFC", text))))


def same_form(expected: str, given: str) -> bool:
    """Return True if two answers are equal as numbers, or as texts if one is no number."""
    expected_quantity = quantity_of(expected)
    given_quantity = quantity_of(given)
    if expected_quantity is not None and given_quantity is not None:
        return expected_quantity.equals(given_quantity)
    return canonical(expected) == canonical(given)


def quantity_of(answer: str) -> Quantity | None:
    """Return the number that the whole answer is; None if the answer is anything else."""
    text = _plain_math(answer)
    if text.startswith("[") and text.endswith("]") and "," not in text:
        text = text[1:-1].strip()
    if len(text) > MAX_DIGITS:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    unit = (match["unit"] or "").strip().casefold()
    is_word = len(unit) >= 3 and unit not in _NO_UNITS and match["unit"].startswith(" ")
    if unit and unit not in _SHORT_UNITS and not is_word:
        return None
    value = _value(match)
    if value is None:
        return None
    singular = unit.removesuffix("s") if len(unit) > 3 else unit
    return Quantity(value=value, unit=singular)


def canonical(answer: str) -> str:
    """Return the form in which texts are compared.

    It has no case, one space between words, and none beside signs.
    """
    text = re.sub(r"\\(?:left|right)\b", "", _plain_math(answer))
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", text).casefold()
    in_parentheses = re.fullmatch(r"\(([^()]*)\)", text)
    return in_parentheses[1] if in_parentheses else text


def _character(character: str) -> str:
    """Return a character in plain form; "" if it is invisible."""
    if unicodedata.category(character) == "Cf" or character == "\ufe0f":
        return ""
    decomposed = unicodedata.decomposition(character)
    if decomposed.startswith("<fraction>"):
        return f" {unicodedata.normalize('NFKC', character).replace(chr(0x2044), '/')}"
    if decomposed.startswith(("<wide>", "<narrow>")):
        return unicodedata.normalize("NFKC", character)
    return character


def _plain_math(answer: str) -> str:
    """Return the answer without LaTeX's commands for fonts, spaces, degrees and fractions."""
    text = _TEXT_COMMAND.sub(r" \1 ", readable(answer))
    text = _DEGREES.sub("°", _ESCAPED_SIGN.sub(r"\1", text))
    text = _SPACES.sub(" ", text.replace("{,}", ","))
    return _SPACES.sub(" ", _FRACTION_COMMAND.sub(_as_quotient, text)).strip()


def _as_quotient(fraction: re.Match[str]) -> str:
    r"""Return a fraction of LaTeX as ``a/b`` after a space: ``1\frac12`` is one and a half."""
    operands = (fraction[1] or fraction[2] or "", fraction[3] or fraction[4] or "")
    return " " + "/".join(map(_as_operand, operands))


def _as_operand(text: str) -> str:
    """Return the text, in parentheses unless it is one word or number."""
    text = text.strip()
    return text if re.fullmatch(r"-?\w+", text) else f"({text})"


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `_NUMBER`.

    None if its exponent is too large, or if it divides by 0.
    """
    exponent = int(number["braced"] or number["bare"] or 0) if number["power"] else 0
    if abs(exponent) > MAX_EXPONENT:
        return None
    if number["decimal"]:
        decimal = Decimal(number["decimal"].replace(number["separator"] or "", ""))
        if abs(decimal.adjusted()) > MAX_EXPONENT:
            return None
        value = Fraction(decimal)
    else:
        under = int(number["under"])
        if under == 0:
            return None
        value = int(number["whole"] or 0) + Fraction(int(number["over"]), under)
    value *= Fraction(10) ** exponent
    return -value if "-" in (number["sign"], number["sign2"]) else value
