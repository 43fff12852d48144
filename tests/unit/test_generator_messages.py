"""What a generator sends to its clients arrives as it was."""

import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.experiments.rl.generation.messages import (
    GenerateResult,
    GeneratorFailed,
    GeneratorMessages,
    RequestFailed,
    ScoreResult,
)
from torchtitan.experiments.rl.rollouts.types import Completion

STREAMS = ("token_ids", "logprobs", "policy_versions")


def generated(request_id: int, tokens: list[int], replica: int = -1) -> GenerateResult:
    ids = np.array(tokens, np.int32)
    completion = Completion(
        token_ids=ids,
        logprobs=np.float32(-0.5) * ids.astype(np.float32),
        policy_versions=ids // 3,
        finish_reason="stop" if tokens else "abort",
        replica=replica,
    )
    return GenerateResult(request_id=request_id, completion=completion)


def as_values(message) -> tuple:
    if isinstance(message, GenerateResult):
        own = message.completion
        streams = [(getattr(own, name).dtype, getattr(own, name).tolist()) for name in STREAMS]
        return message.request_id, streams, own.finish_reason, own.replica
    if isinstance(message, ScoreResult):
        return message.request_id, message.logprobs.tolist()
    return type(message), message.cause


others = st.one_of(
    st.builds(lambda i: ScoreResult(request_id=i, logprobs=np.array([0, -i], np.float32)), st.integers(0, 99)),
    st.builds(RequestFailed, request_id=st.integers(0, 99), cause=st.text(max_size=5)),
    st.builds(GeneratorFailed, cause=st.text(max_size=5)),
)
results = st.builds(generated, st.integers(0, 2**62), st.lists(st.integers(0, 2**31 - 1), max_size=6), st.integers(-1, 3))


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@given(sent=st.lists(results | others, max_size=8))
def test_messages_arrive_as_they_were_completions_first(dumps, sent):
    arrived = pickle.loads(dumps(GeneratorMessages(sent)))
    assert isinstance(arrived, GeneratorMessages)
    expected = [m for m in sent if isinstance(m, GenerateResult)] + [m for m in sent if not isinstance(m, GenerateResult)]
    assert [as_values(message) for message in arrived] == [as_values(message) for message in expected]


def test_who_changes_a_completion_changes_no_other():
    first, second = pickle.loads(pickle.dumps(GeneratorMessages([generated(1, [5, 6]), generated(2, [7])])))
    for name in STREAMS:
        getattr(first.completion, name)[:] = 0
    assert as_values(second) == as_values(generated(2, [7]))
    assert {getattr(second.completion, name).base is None for name in STREAMS} == {True}, "it keeps no other in memory"
