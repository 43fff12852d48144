r"""Finds the final answer in what a model wrote.

A reply has one answer:

1. The last that is marked as one: \boxed{}, <answer></answer>, a line "Answer: ...", "#### 21".
2. Where none is marked, the last that is stated (bold, "the sum is 21", "4 + 8 = 12") or stands
   alone.

An answer that merely occurs in the text does not count, nor does one of several that are offered: a
policy that is paid for those learns to list them all. What a model thought does not count, and
thinking that never ended has no answer.

    final_answer, written_answer, answer_of     a text, with or without its markup
    final_number, number_of                     a number
    final_list                                  several words
    right_answer                                reward function for rows with an ``answer``
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np

from torchtitan.experiments.rl.data.rows import is_missing
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import last_assistant_text
from torchtitan.experiments.rl.tasks.answer_forms import quantity_of, readable, same_form

LAST_CHARACTERS = 2000
"""Number of characters at the end of a reply in which an unmarked answer is looked for. It also
bounds the time that the search takes."""

_THINKING = re.compile(r"<(/?)think(?:ing)?>")
_BOX = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""Pattern of what opens or closes a box. An escaped brace closes nothing."""
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LINE = re.compile(
    r"^[ \t>#*_-]*(?:(?:the|my) )?(?:final |correct )?answer[ *_]*"
    r"(?:[:=][ \t*]*+(?=\S)|[:=]?[ \t*_]*\n\s*)(\S.*)$"
    # Other lines that begin with four # are headings.
    r"|(?:^|(?<=\s))[ \t]*####[ \t]*([^\s:]*\d[^\s:]*)[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"^[ \t]*(?:\$\$|\\\[|\\\]|```\w*)[ \t]*$", re.MULTILINE)
"""Pattern of a line that only opens or closes a formula or a block of code."""
_BULLET = re.compile(r"^[ \t]*(?:[-*+•]|\d+[.)])[ \t]+(?=\S)", re.MULTILINE)
_BOLD = re.compile(r"(?:\*\*|__)([^*_\n]*[^*_\n:])(?:\*\*|__)(?!\s*:)")
"""Pattern of a bold text. One with a colon is a heading."""
_WRAPPED = re.compile(
    r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]|_+([^_]+)_+|`+([^`]+)`+"
    r"|\"([^\"]+)\"|'([^']+)'|“([^”]+)”"
    r"|\\(?:text|textbf|mathrm|mathbf|boldsymbol)\s*\{([^{}]*)\}|</?answer>(.*)",
    re.DOTALL,
)
"""Pattern of an answer in quotes, in markdown or in LaTeX."""
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3})")
"""Pattern of LaTeX's thousands separators, and of thin spaces."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
    r"(?!(?:\.|_|[eE][-+]?)?\d)"
)
_ALONE = re.compile(rf"[$€£]?{_NUMBER.pattern}\s*[%°]?")
_STATES = (
    r"(?:[=≈:→⇒]|['’]s\b|\b(?:is|was|be|equals?|gives?|makes?|get|got|becomes?|finally|then|with"
    r"|guess|try|pick|choose"
    r"|(?:comes?|amounts?|adds?(?: up)?|sums?(?: up)?) to)\b)"
)
_STATED = re.compile(rf".*{_STATES}(?=.*\d)(.*)", re.DOTALL | re.IGNORECASE)
"""Pattern of a sentence that states a number. Its group follows the last verb or sign."""
_TEXT_STATED = re.compile(r".*(?:[=:]|\b(?:is|are|was|equals)\b)\s*(\S.*)", re.DOTALL)
"""Pattern of a sentence that states a text."""
_NAMED = re.compile(
    r".*\b(?:answer|solution|result)\b[^.]*?(?:[=:]|\bis\b)[ :]*(\S.*)", re.DOTALL | re.IGNORECASE
)
"""Pattern of a sentence that calls what it states the answer."""
_REASON = re.compile(r"\b(?:because|since|which|as)\b", re.IGNORECASE)
_CLOSING = re.compile(
    r"let me know\b|(?:i )?hope\b|feel free\b|if you\b|would you\b", re.IGNORECASE
)
"""Pattern of the beginning of a sentence with which models take their leave after the answer."""
_OFFERS = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|alternatively|whether)\b", re.IGNORECASE
)
"""Pattern of a word that offers one answer beside another."""
_DENIED = re.compile(r"(?:\bnot|n['’]t|\bnever|\bcannot)\b\W+(?:[^\W\d]+\W+){0,3}$", re.IGNORECASE)
"""Pattern of the end of a text that denies what follows."""


def answer_of(rollout: Rollout) -> str | None:
    """Return the ``written_answer`` of the rollout's last message."""
    return written_answer(last_assistant_text(rollout), finished=_is_finished(rollout))


def number_of(rollout: Rollout) -> Decimal | None:
    """Return the ``final_number`` of the rollout's last message."""
    return final_number(last_assistant_text(rollout), finished=_is_finished(rollout))


def final_answer(reply: str, *, finished: bool = True) -> str | None:
    """Return the ``written_answer`` without its markup: "21" for "**21**." and for "$21$"."""
    answer = written_answer(reply, finished=finished)
    return None if answer is None else plain(answer)


def written_answer(reply: str, *, finished: bool = True) -> str | None:
    r"""Return the answer as it is written, with its markup of LaTeX and markdown; None for none.

    Args:
        reply: what the model wrote.
        finished: False if the reply was cut off. Then only \boxed{} and <answer></answer> show
            that an answer is whole.
    """
    text = _without_thinking(reply)
    marked = _marked_answer(text, finished)
    if marked is not None or not finished:
        return marked
    sentences = [sentence for sentence in _sentences(text) if not _CLOSING.match(sentence)]
    if not sentences:
        return None
    last = sentences[-1]
    if len(last.split()) <= 2 and not last.endswith(("!", ":")):
        return last
    for sentence in reversed(sentences):
        bold = _BOLD.findall(sentence)
        if bold:
            is_offer = _OFFERS.search(sentence) and len(set(bold)) > 1
            return None if is_offer else bold[-1]
        named = _NAMED.fullmatch(sentence)
        if named:
            return named[1]
    stated = _TEXT_STATED.fullmatch(last)
    return stated[1] if stated else last


def final_number(reply: str, *, finished: bool = True) -> Decimal | None:
    """Return the number that the reply gives as its answer; None if it gives none, or several.

    Args:
        reply: what the model wrote.
        finished: False if the reply was cut off, as for ``written_answer``.

    Example::

        >>> from torchtitan.experiments.rl.tasks import final_number
        >>> final_number("4 + 8 = 12, so the answer is 12.")
        Decimal('12')
        >>> final_number("It is 12 or 13.") is None
        True
    """
    text = _without_thinking(reply)
    marked = _marked_answer(text, finished)
    if marked is not None:
        return number_in(marked)
    return _unmarked_number(text) if finished else None


def final_list(reply: str) -> list[str]:
    """Return the words of the last list in the reply.

    A list has a word a line, with or without numbers and bullets, or words between commas.
    """
    text = _without_thinking(reply)
    lists: list[list[str]] = [[]]
    for line in (last_tagged(text) or text).splitlines():
        line = _BULLET.sub("", line).strip()
        items = plain(line.rpartition(": ")[2]).split(",")
        words = list(filter(None, (plain(item).removeprefix("and ") for item in items)))
        is_heading = line.endswith((":", "!")) or plain(line).endswith(":")
        if is_heading or any(" " in word for word in words):
            lists.append([])
        elif len(words) > 1:
            lists += [words, []]
        else:
            lists[-1] += words
    return next((words for words in reversed(lists) if words), [])


def number_in(answer: str) -> Decimal | None:
    """Return the number in an answer, whatever its separators and units.

    None if there is no number, if it is denied, or if there are several of which none is stated as
    in "4 + 8 = 12".
    """
    text = re.sub(r"\\[()\[\]]|[*$]|\\\w+", " ", plain(answer))
    if len(text) > LAST_CHARACTERS:
        return None
    if len(set(_NUMBER.findall(text))) > 1 and _OFFERS.search(text):
        return None
    without_parentheses = re.sub(r"\([^()]*\)", "", text)
    without_reason = _REASON.split(text)[0]
    stated = _STATED.fullmatch(text)
    for part in (text, without_parentheses, without_reason, stated[1] if stated else ""):
        starts = {
            Decimal(match[0].replace(",", "")): match.start() for match in _NUMBER.finditer(part)
        }
        if len(starts) == 1:
            ((number, start),) = starts.items()
            return None if _DENIED.search(part[:start]) else number
    return None


def plain(answer: str) -> str:
    r"""Return the answer without its markup.

    Markup is spaces, quotes, markdown, LaTeX's $, \( \), \boxed{} and \text{}, and a full stop.
    """
    while True:
        before = answer
        answer = answer.strip("* \t\n").rstrip(".,;!✅")
        wrapped = _WRAPPED.fullmatch(answer)
        if wrapped:
            answer = next(filter(None, wrapped.groups()), "")
        elif answer.count("$") % 2:  # a currency, or half of a formula
            answer = answer.strip("$")
        else:
            boxed = last_boxed(answer)
            answer = answer if boxed is None else boxed
        if answer == before:
            return answer


def right_answer(completion: str, example: Any) -> float:  # noqa: ANN401 - a row
    """Reward a reply with 1 where its final answer is the row's ``answer``, else with 0.

    Both are read alike (``answer_forms``): a number counts however it is written, a text without
    its case. A list of answers (``["42", "forty-two"]``) is one of which any is right.

    Raises:
        ValueError: the row has no answer, or one of its list holds none.

    Example::

        >>> from torchtitan.experiments.rl.tasks import right_answer
        >>> right_answer("So it is **1,200 km**.", {"answer": "1200 km"})
        1.0
        >>> right_answer("It is 1300 km.", {"answer": ["1200 km", "1200"]})
        0.0
    """
    answers = example["answer"]
    several = answers if is_list(answers) and len(answers) else [answers]
    return max(_is_answer(completion, row_answer(answer)) for answer in several)


def is_list(answer: object) -> TypeGuard[Sequence[Any]]:
    """Return True if a row's answer is a list of answers: a sequence, or an array of a table."""
    return isinstance(answer, list | tuple) or (isinstance(answer, np.ndarray) and answer.ndim == 1)


def _is_answer(completion: str, expected: str) -> float:
    """Return 1 if the final answer of a reply is the expected one, else 0."""
    text = _without_thinking(completion)
    written = plain(written_answer(completion) or "")
    whole = plain(text) if len(text) <= LAST_CHARACTERS + len(expected) else ""
    if any(candidate and same_form(expected, candidate) for candidate in (written, whole)):
        return 1.0
    quantity = quantity_of(expected)
    if quantity is None or quantity_of(written) is not None or quantity.unit not in text.casefold():
        return 0.0
    number = final_number(completion)
    return float(number is not None and quantity.value == Fraction(number))


def row_answer(value: object) -> str:
    """Return the answer that a row holds, read as a reply is: after the last mark, without markup.

    Raises:
        ValueError: the value is missing, or holds no answer.
    """
    is_empty = is_missing(value) or (is_list(value) and not len(value))
    text = "" if is_empty else _without_thinking(str(value))
    _, marker, after_marker = text.rpartition("####")
    marked = after_marker if marker else _marked_answer(text, finished=True)
    if marked is None:
        named = _NAMED.fullmatch(text)
        marked = named[1] if named else text
    answer = plain(marked)
    if not answer:
        raise ValueError(
            f"the row's answer is {text_of(value)}, which no reply can be compared with: fill it in"
        )
    return answer


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} that is closed, whatever nests in it.

    The last is the one that opens last. None if there is none.
    """
    place = _last_box(text)
    return text[slice(*place)].strip() if place else None


def last_tagged(text: str) -> str | None:
    """Return the text between the last <answer> and </answer>; None if there is no such pair."""
    pairs = _TAG.findall(text)
    return pairs[-1].strip() if pairs else None


def _last_box(text: str) -> tuple[int, int] | None:
    """Return where the content of the last closed box begins and ends; None if there is none."""
    last: tuple[int, int] | None = None
    open_braces: list[int | None] = []
    """Start of the content of each open box, and None for each other open brace."""
    for token in _BOX.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return last


def _marked_answer(text: str, finished: bool) -> str | None:
    """Return the answer that is marked last; None if none is."""
    candidates = [
        (match.start(), next(filter(None, match.groups()), "").strip())
        for pattern in ([_TAG, _LINE] if finished else [_TAG])
        for match in pattern.finditer(text)
    ]
    box = _last_box(text)
    if box:
        candidates.append((box[0], text[slice(*box)].strip()))
    return max(candidates)[1] if candidates else None


def _unmarked_number(text: str) -> Decimal | None:
    """Return the number that a text without marks gives as its answer.

    Sentences are read from the last to the first. The first that has a bold number, or states one,
    gives the answer, and numbers that stand alone after it come before it. Where no sentence does,
    a number that the text mentions is the answer if it mentions no other.
    """
    alone: set[Decimal | None] = set()
    mentioned: set[Decimal | None] = set()
    for sentence in reversed(_sentences(text)):
        if not _NUMBER.search(sentence):
            continue
        if _ALONE.fullmatch(plain(sentence)):
            alone.add(number_in(sentence))
            continue
        if alone:
            break
        is_offer = _OFFERS.search(sentence) is not None
        bold = [match for match in _BOLD.finditer(sentence) if _NUMBER.search(plain(match[1]))]
        if bold:
            if is_offer and len({match[1] for match in bold}) > 1:
                return None
            is_denied = _DENIED.search(sentence[: bold[-1].start()])
            return None if is_denied else number_in(bold[-1][1])
        if is_offer:
            return None
        if _STATED.fullmatch(sentence):
            return number_in(sentence)
        mentioned.add(number_in(sentence))
    candidates = (alone or mentioned) - {None}
    return candidates.pop() if len(candidates) == 1 else None


def _without_thinking(reply: str) -> str:
    """Return the reply without its thinking and without fences, its numbers in plain form.

    Thinking that never ended leaves nothing.
    """
    tags = list(_THINKING.finditer(reply))
    if tags:
        last = tags[-1]
        is_closed = last[1] == "/"
        reply = reply[last.end() :] if is_closed else ""
    return _GROUPS.sub(",", readable(_FENCE.sub("", reply))).strip()


def _sentences(text: str) -> list[str]:
    """Return the sentences at the end of a text. A line ends a sentence too."""
    lines = _BULLET.sub("", text[-LAST_CHARACTERS:]).splitlines()
    return [part for line in lines for part in re.split(r"(?<=[.!?])\s+", line.strip()) if part]


def _is_finished(rollout: Rollout) -> bool:
    """Return True if the rollout was not cut off by its limit of tokens."""
    return rollout.status is not RolloutStatus.TRUNCATED_LENGTH
