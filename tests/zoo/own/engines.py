"""Kinds of renderers, engines and teachers."""

import dataclasses
from typing import Any

import numpy as np

from tests.zoo.misbehaviour import Kind, changing
from tests.zoo.own.makers import Own, harmless, refused, with_, wrong_types


def rendered(**values: Any) -> Kind:
    return with_(**values)


RENDER: Own = wrong_types() | refused(
    ids_None=rendered(token_ids=None),
    ids_empty=rendered(token_ids=[]),
    ids_texts=changing(lambda r: dataclasses.replace(r, token_ids=["x"] * len(r.token_ids))),
    ids_floats=changing(lambda r: dataclasses.replace(r, token_ids=[0.5] * len(r.token_ids))),
    ids_negative=changing(lambda r: dataclasses.replace(r, token_ids=[-1] * len(r.token_ids))),
    ids_too_large=changing(lambda r: dataclasses.replace(r, token_ids=[10**6] * len(r.token_ids))),
    ids_beyond_int32=changing(
        lambda r: dataclasses.replace(r, token_ids=[2**40] * len(r.token_ids))
    ),
    ids_nested=changing(lambda r: dataclasses.replace(r, token_ids=[[1]] * len(r.token_ids))),
    roles_too_few=changing(
        lambda r: dataclasses.replace(r, message_indices=r.message_indices[:-1])
    ),
    indices_out_of_range=changing(
        lambda r: dataclasses.replace(r, message_indices=[99] * len(r.message_indices))
    ),
    content_too_short=changing(lambda r: dataclasses.replace(r, is_content=r.is_content[:-1])),
)
PARSE: Own = wrong_types() | refused(
    content_None=with_(content=7),
    content_a_list=with_(content=["x"]),
    calls_None=with_(tool_calls=None),
    calls_of_None=with_(tool_calls=[None]),
    reasoning_a_number=with_(reasoning_content=7),
)
BRIDGE: Own = wrong_types("None") | refused(
    ids_None=rendered(token_ids=None),
    ids_empty=rendered(token_ids=[]),
    ids_negative=changing(lambda r: dataclasses.replace(r, token_ids=[-1] * len(r.token_ids))),
    ids_texts=changing(lambda r: dataclasses.replace(r, token_ids=["x"] * len(r.token_ids))),
)


def _logprobs(value: float) -> Kind:
    return changing(
        lambda c: dataclasses.replace(c, logprobs=np.full(len(c.token_ids), value, np.float32))
    )


def _ids(value: Any, dtype: Any = np.int32) -> Kind:
    return changing(
        lambda c: dataclasses.replace(c, token_ids=np.full(len(c.token_ids), value, dtype))
    )


ENGINE: Own = wrong_types() | refused(
    log_probabilities_of_minus_infinity=_logprobs(-np.inf),
    log_probabilities_of_nan=_logprobs(np.nan),
    log_probabilities_of_infinity=_logprobs(np.inf),
    log_probabilities_above_0=_logprobs(3.0),
    one_log_probability_of_nan=changing(
        lambda c: dataclasses.replace(c, logprobs=np.append(c.logprobs[:-1], np.float32("nan")))
    ),
    log_probabilities_too_few=changing(lambda c: dataclasses.replace(c, logprobs=c.logprobs[:-1])),
    log_probabilities_None=with_(logprobs=None),
    log_probabilities_a_list_of_texts=changing(lambda c: dataclasses.replace(c, logprobs=["x"] * len(c.logprobs))),
    log_probabilities_of_two_dimensions=changing(lambda c: dataclasses.replace(c, logprobs=c.logprobs[:, None])),
    ids_too_few=changing(lambda c: dataclasses.replace(c, token_ids=c.token_ids[:-1])),
    ids_None=with_(token_ids=None),
    ids_negative=_ids(-1),
    ids_beyond_the_vocabulary=_ids(10**6),
    ids_of_floats=_ids(0.5, np.float64),
    ids_of_two_dimensions=changing(lambda c: dataclasses.replace(c, token_ids=c.token_ids[:, None])),
    versions_None=with_(policy_versions=None),
    versions_too_many=changing(lambda c: dataclasses.replace(c, policy_versions=np.append(c.policy_versions, 0))),
    versions_of_the_future=changing(lambda c: dataclasses.replace(c, policy_versions=c.policy_versions + 99)),
    an_unknown_finish_reason=with_(finish_reason="bored"),
    a_finish_reason_of_None=with_(finish_reason=None),
    a_finish_reason_of_a_list=with_(finish_reason=["stop"]),
    an_abort=with_(finish_reason="abort"),
) | harmless(
    # Nothing was sampled, so nothing of it is trained: the rollout needs no error.
    no_tokens=changing(
        lambda c: dataclasses.replace(
            c, token_ids=c.token_ids[:0], logprobs=c.logprobs[:0], policy_versions=c.policy_versions[:0]
        )
    ),
    changes_the_prompt=Kind(meddle=lambda session, prompt, **limits: prompt.fill(7)),
    answers_the_same_arrays=changing(lambda c: _shared_arrays(c)),
)  # fmt: skip

_KEPT: dict[str, Any] = {}


def _shared_arrays(completion: Any) -> Any:
    """One buffer of log-probabilities for all answers, as an engine that reuses its memory has."""
    buffer = _KEPT.setdefault("buffer", np.zeros(64, np.float32))
    buffer[: len(completion.logprobs)] = completion.logprobs
    return dataclasses.replace(completion, logprobs=buffer[: len(completion.logprobs)])


TEACHER: Own = wrong_types("a text", "bytes") | refused(
    answers_minus_infinity=changing(lambda scores: np.full_like(scores, -np.inf)),
    answers_nan_each=changing(lambda scores: np.full_like(scores, np.nan)),
    answers_too_few=changing(lambda scores: scores[:-1]),
    answers_too_many=changing(lambda scores: np.append(scores, 0)),
    answers_two_dimensions=changing(lambda scores: scores[:, None]),
    answers_texts=changing(lambda scores: np.array(["x"] * len(scores))),
) | harmless(
    changes_the_tokens=Kind(meddle=lambda policy, token_ids: token_ids.fill(7)),
)  # fmt: skip
