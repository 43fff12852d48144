r"""Finds the final answer in what a model wrote.

A reply has one answer: the last that is marked as one (\boxed{}, <answer></answer>, a line "Answer: ...", "#### 21"). Where
none is marked, it is the last that is stated (bold, "the sum is 21", "4 + 8 = 12") or that stands alone. An answer that
merely occurs in the text does not count, nor does one of several that are offered: a policy that is paid for those learns to
list them all. What a model thought does not count, and thinking that never ended has no answer.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from torchtitan.experiments.rl.data.rows import is_missing
from torchtitan.experiments.rl.printable import text_of
from torchtitan.experiments.rl.rollouts.types import Rollout, RolloutStatus
from torchtitan.experiments.rl.rubrics.rubric import last_assistant_text
from torchtitan.experiments.rl.tasks.answer_forms import quantity_of, readable, same_form

LAST_CHARACTERS = 2000
"""Where an answer that is not marked is looked for. It also bounds the time that takes."""

_THINKING = re.compile(r"<(/?)think(?:ing)?>")
_BOX = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""An escaped brace is a character of the answer and closes nothing."""
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LINE = re.compile(
    r"^[ \t>#*_-]*(?:(?:the|my) )?(?:final |correct )?answer[ *_]*(?:[:=][ \t*]*+(?=\S)|[:=]?[ \t*_]*\n\s*)(\S.*)$"
    r"|(?:^|(?<=\s))[ \t]*####[ \t]*([^\s:]*\d[^\s:]*)[ \t]*$",  # other lines of four # are headings
    re.IGNORECASE | re.MULTILINE,
)
_FENCE = re.compile(r"^[ \t]*(?:\$\$|\\\[|\\\]|```\w*)[ \t]*$", re.MULTILINE)
"""A line that only opens or closes a formula or a block of code."""
_BULLET = re.compile(r"^[ \t]*(?:[-*+•]|\d+[.)])[ \t]+(?=\S)", re.MULTILINE)
_BOLD = re.compile(r"(?:\*\*|__)([^*_\n]*[^*_\n:])(?:\*\*|__)(?!\s*:)")
"""A bold text with a colon is a heading."""
_WRAPPED = re.compile(
    r"\$+([^$]+)\$+|\\\((.+)\\\)|\\\[(.+)\\\]|_+([^_]+)_+|`+([^`]+)`+|\"([^\"]+)\"|'([^']+)'|“([^”]+)”"
    r"|\\(?:text|textbf|mathrm|mathbf|boldsymbol)\s*\{([^{}]*)\}|</?answer>(.*)",
    re.DOTALL,
)
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=\d{3})")
"""Thousands separators of LaTeX, and thin spaces."""
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?!(?:\.|_|[eE][-+]?)?\d)"
)
_ALONE = re.compile(rf"[$€£]?{_NUMBER.pattern}\s*[%°]?")
_STATES = (
    r"(?:[=≈:→⇒]|['’]s\b|\b(?:is|was|be|equals?|gives?|makes?|get|got|becomes?|finally|then|with|guess|try|pick|choose"
    r"|(?:comes?|amounts?|adds?(?: up)?|sums?(?: up)?) to)\b)"
)
_STATED = re.compile(rf".*{_STATES}(?=.*\d)(.*)", re.DOTALL | re.IGNORECASE)
"""What follows the last verb or sign that numbers follow."""
_TEXT_STATED = re.compile(r".*(?:[=:]|\b(?:is|are|was|equals)\b)\s*(\S.*)", re.DOTALL)
_NAMED = re.compile(
    r".*\b(?:answer|solution|result)\b[^.]*?(?:[=:]|\bis\b)[ :]*(\S.*)", re.DOTALL | re.IGNORECASE
)
_REASON = re.compile(r"\b(?:because|since|which|as)\b", re.IGNORECASE)
_CLOSING = re.compile(
    r"let me know\b|(?:i )?hope\b|feel free\b|if you\b|would you\b", re.IGNORECASE
)
"""How models take their leave after the answer."""
_OFFERS = re.compile(
    r"\b(?:or|either|maybe|perhaps|possibly|alternatively|whether)\b", re.IGNORECASE
)
_DENIED = re.compile(r"(?:\bnot|n['’]t|\bnever|\bcannot)\b\W+(?:[^\W\d]+\W+){0,3}$", re.IGNORECASE)


def answer_of(rollout: Rollout) -> str | None:
    """``written_answer`` of the rollout's last message."""
    return written_answer(last_assistant_text(rollout), finished=_finished(rollout))


def number_of(rollout: Rollout) -> Decimal | None:
    """``final_number`` of the rollout's last message."""
    return final_number(last_assistant_text(rollout), finished=_finished(rollout))


def final_answer(reply: str, *, finished: bool = True) -> str | None:
    """``written_answer`` without what only sets it: "21" for "**21**." and for "$21$"."""
    answer = written_answer(reply, finished=finished)
    return None if answer is None else plain(answer)


def written_answer(reply: str, *, finished: bool = True) -> str | None:
    """The answer as it is written, with its marks of LaTeX and markdown; None: there is none.

    Args:
        finished: False: the reply was cut off. Only \\boxed{} and <answer></answer> say then that an answer is whole.
    """
    text = _said(reply)
    marked = _marked(text, finished)
    sentences = [sentence for sentence in _sentences(text) if not _CLOSING.match(sentence)]
    if marked is not None or not finished or not sentences:
        return marked
    if len(sentences[-1].split()) <= 2 and not sentences[-1].endswith(("!", ":")):
        return sentences[-1]
    for sentence in reversed(sentences):
        if bold := _BOLD.findall(sentence):
            return None if _OFFERS.search(sentence) and len(set(bold)) > 1 else bold[-1]
        if named := _NAMED.fullmatch(sentence):
            return named[1]
    stated = _TEXT_STATED.fullmatch(sentences[-1])
    return stated[1] if stated else sentences[-1]


def final_number(reply: str, *, finished: bool = True) -> Decimal | None:
    """The number that the reply gives as its answer; None: none, or several.

    Args:
        finished: as for ``written_answer``.
    """
    text = _said(reply)
    marked = _marked(text, finished)
    if marked is not None or not finished:
        return None if marked is None else number_in(marked)
    alone, mentioned = set[Decimal | None](), set[Decimal | None]()
    for sentence in reversed(
        [sentence for sentence in _sentences(text) if _NUMBER.search(sentence)]
    ):
        if _ALONE.fullmatch(plain(sentence)):
            alone.add(number_in(sentence))
            continue
        if alone:
            break
        bold = [found for found in _BOLD.finditer(sentence) if _NUMBER.search(plain(found[1]))]
        if bold and not (_OFFERS.search(sentence) and len({found[1] for found in bold}) > 1):
            return None if _DENIED.search(sentence[: bold[-1].start()]) else number_in(bold[-1][1])
        if bold or _OFFERS.search(sentence):
            return None
        if _STATED.fullmatch(sentence):
            return number_in(sentence)
        mentioned.add(number_in(sentence))
    (number,) = numbers if len(numbers := (alone or mentioned) - {None}) == 1 else (None,)
    return number


def final_list(reply: str) -> list[str]:
    """The words of the last list in the reply: one a line, with or without numbers and bullets, or between commas."""
    text = _said(reply)
    lists: list[list[str]] = [[]]
    for line in (last_tagged(text) or text).splitlines():
        line = _BULLET.sub("", line).strip()
        words = [
            plain(word).removeprefix("and ") for word in plain(line.rpartition(": ")[2]).split(",")
        ]
        words = [word for word in words if word]
        if (
            any(" " in word for word in words)
            or line.endswith((":", "!"))
            or plain(line).endswith(":")
        ):  # a sentence
            lists.append([])
        elif len(words) > 1:
            lists += [words, []]
        else:
            lists[-1] += words
    return next((words for words in reversed(lists) if words), [])


def number_in(answer: str) -> Decimal | None:
    """The number in an answer, whatever its separators and units; None: none, one that is denied, or several of which none is
    stated ("4 + 8 = 12")."""
    text = re.sub(r"\\[()\[\]]|[*$]|\\\w+", " ", plain(answer))
    if len(text) > LAST_CHARACTERS or (
        len(set(_NUMBER.findall(text))) > 1 and _OFFERS.search(text)
    ):
        return None
    stated = _STATED.fullmatch(text)
    for part in (
        text,
        re.sub(r"\([^()]*\)", "", text),
        _REASON.split(text)[0],
        stated[1] if stated else "",
    ):
        numbers = {
            Decimal(found[0].replace(",", "")): found.start() for found in _NUMBER.finditer(part)
        }
        if len(numbers) == 1:
            ((number, start),) = numbers.items()
            return None if _DENIED.search(part[:start]) else number
    return None


def plain(answer: str) -> str:
    """The answer without what only sets it: spaces, quotes, markdown, LaTeX's $, \\( \\) and \\text{}, a full stop."""
    while True:
        before, answer = answer, answer.strip("* \t\n").rstrip(".,;!✅")
        if wrapped := _WRAPPED.fullmatch(answer):
            answer = next(filter(None, wrapped.groups()), "")
        elif answer.count("$") % 2:  # a currency, or half of a formula
            answer = answer.strip("$")
        elif (boxed := last_boxed(answer)) is not None:
            answer = boxed
        if answer == before:
            return answer


def right_answer(completion: str, example: Any) -> float:
    """Reward a reply with 1 where its final answer is the row's ``answer``, else with 0.

    Both are read alike (``answer_forms``): a number counts however it is written, a text without its case.

    Raises:
        ValueError: the row has no answer.
    """
    wanted = row_answer(example["answer"])
    said = _said(completion)
    written = plain(written_answer(completion) or "")
    whole = plain(said) if len(said) <= LAST_CHARACTERS + len(wanted) else ""
    if any(candidate and same_form(wanted, candidate) for candidate in (written, whole)):
        return 1.0
    quantity = quantity_of(wanted)
    if quantity is None or quantity_of(written) is not None or quantity.unit not in said.casefold():
        return 0.0
    number = final_number(completion)
    return float(number is not None and quantity.value == Fraction(number))


def row_answer(value: Any) -> str:
    """Return the answer that a row holds, read as a reply is: behind the last mark, and without what only sets it.

    Raises:
        ValueError: the value is missing, or holds no answer.
    """
    text = "" if is_missing(value) else _said(str(value))
    _, marker, behind = text.rpartition("####")
    marked = behind if marker else _marked(text, finished=True)
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
    """What is inside the \\boxed{...} that opens last of those that are closed, whatever nests in it; None: there is none."""
    place = _last_box(text)
    return text[slice(*place)].strip() if place else None


def last_tagged(text: str) -> str | None:
    """What is between the last pair of <answer> and </answer>; None: there is none."""
    pairs = _TAG.findall(text)
    return pairs[-1].strip() if pairs else None


def _last_box(text: str) -> tuple[int, int] | None:
    found: tuple[int, int] | None = None
    open_boxes: list[int | None] = []
    for token in _BOX.finditer(text):
        if token["box"]:
            open_boxes.append(token.end())
        elif token["open"]:
            open_boxes.append(None)
        elif token["close"] and open_boxes:
            start = open_boxes.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, token.start())
    return found


def _marked(text: str, finished: bool) -> str | None:
    """The answer that is marked last."""
    found = [
        match
        for pattern in ([_TAG, _LINE] if finished else [_TAG])
        for match in pattern.finditer(text)
    ]
    marked = [(match.start(), next(filter(None, match.groups()), "").strip()) for match in found]
    if box := _last_box(text):
        marked.append((box[0], text[slice(*box)].strip()))
    return max(marked)[1] if marked else None


def _said(reply: str) -> str:
    """The reply without its thinking and without lines that only set it, its numbers in plain form."""
    *_, last = [None, *_THINKING.finditer(reply)]
    if last is not None:
        reply = reply[last.end() :] if last[1] else ""
    return _GROUPS.sub(",", readable(_FENCE.sub("", reply))).strip()


def _sentences(text: str) -> list[str]:
    lines = _BULLET.sub("", text[-LAST_CHARACTERS:]).splitlines()
    return [part for line in lines for part in re.split(r"(?<=[.!?])\s+", line.strip()) if part]


def _finished(rollout: Rollout) -> bool:
    return rollout.status is not RolloutStatus.TRUNCATED_LENGTH
