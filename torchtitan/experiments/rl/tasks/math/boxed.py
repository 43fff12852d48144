"""Finds what a model put into \\boxed{}."""

import re

TOKENS = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""An escaped brace is a character of the answer and closes nothing."""


def last_boxed(text: str) -> str | None:
    """What is inside the \\boxed{...} that opens last of those that are closed, however braces nest in it; None: there is none.

    Only the last: a model that boxes several guesses is not given the best of them.
    """
    found: tuple[int, int] | None = None
    open_boxes: list[int | None] = []
    for token in TOKENS.finditer(text):
        if token["box"]:
            open_boxes.append(token.end())
        elif token["open"]:
            open_boxes.append(None)
        elif token["close"] and open_boxes:
            start = open_boxes.pop()
            if start is not None and (found is None or start > found[0]):
                found = (start, token.start())
    return text[slice(*found)].strip() if found else None
