"""A key that a server repeats is in no error and no log, in whatever form."""

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.generation.redaction import redacted

KEY = 'sk-live/"pa+ss"=öne'


@pytest.mark.parametrize(
    "repeat",
    [
        lambda key: key,
        lambda key: json.dumps({"error": f"bad key {key}"}),
        lambda key: json.dumps({"error": f"bad key {key}"}, ensure_ascii=False),
        lambda key: json.dumps(json.dumps({"error": key})),
        lambda key: quote(key),
        lambda key: f"https://server/?key={quote(key, safe='')}",
        lambda key: key.encode().hex(),
    ],
)
def test_repeated_key_is_taken_out(repeat):
    said = repeat(KEY)
    assert redacted(said, KEY) != said
    for form in (KEY, json.dumps(KEY)[1:-1], quote(KEY), KEY.encode().hex()):
        assert form not in redacted(said, KEY)


@given(st.binary(max_size=7), st.binary(max_size=7), st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]))
def test_base64_of_a_text_that_holds_the_key_does_not_decode_to_it(before, after, encode):
    said = encode(before + KEY.encode() + after).decode()
    left = redacted(said, KEY).replace("(key)", "")
    assert len(left) <= len(said) - (len(KEY.encode()) * 8 // 6 - 2)
    assert redacted(said, KEY) != said


def test_text_without_the_key_and_no_key_change_nothing():
    assert redacted("model not found", KEY) == "model not found"
    assert redacted("anything", None) == redacted("anything", "") == "anything"
