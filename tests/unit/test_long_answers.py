"""Long messages of an env: cut in the middle, with a line that says how many tokens are missing."""

import pytest

from torchtitan.experiments.rl.envs.long_answers import cut_in_the_middle, cut_messages
from torchtitan.experiments.rl.envs.special_texts import special_texts

DIGITS = "0123456789"
"""Ten tokens: the tiny tokenizer has one a digit."""


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (10, DIGITS),
        (9, "01234\n[... 1 tokens left out ...]\n6789"),
        (2, "0\n[... 8 tokens left out ...]\n9"),
        (1, "0\n[... 9 tokens left out ...]\n"),
    ],
)
def test_the_first_and_the_last_tokens_stay(renderer, limit, left):
    assert cut_in_the_middle(DIGITS, limit, special_texts(renderer)) == left


def test_characters_stay_whole(renderer):
    text = "é" * 50 + "漢" * 50
    cut = cut_in_the_middle(text, 11, special_texts(renderer))
    head, _, tail = cut.split("\n")
    assert set(head) == {"é"} and set(tail) == {"漢"}


def test_parts_are_cut_as_the_one_text_that_the_model_reads_and_short_messages_are_kept(renderer):
    parts = [{"type": "text", "text": DIGITS[:5]}, {"type": "text", "text": DIGITS[5:]}]
    short = {"role": "tool", "content": "12"}
    long = {"role": "tool", "name": "page", "content": parts}
    (first, second), count = cut_messages([short, long], 4, special_texts(renderer))
    assert first is short and count == 1
    assert second == {
        "role": "tool",
        "name": "page",
        "content": "01\n[... 6 tokens left out ...]\n89",
    }
