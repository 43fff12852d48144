"""Translates requests and results between the library and vLLM.

    GenerateRequest  ─▶ prompt, SamplingParams      RequestOutput ─▶ GenerateResult
    ScoreRequest     ─▶ prompt, SamplingParams      RequestOutput ─▶ ScoreResult

vLLM is imported when the first request is translated.
"""

from typing import Any

import numpy as np

from torchtitan.experiments.rl.generation.engine import (
    GenerateRequest,
    GenerateResult,
    Request,
    ScoreRequest,
    ScoreResult,
)
from torchtitan.experiments.rl.rollouts.types import Completion


def to_vllm(request: Request, *, cache_salt: str, max_model_len: int) -> tuple[Any, Any]:
    """Return a request as vLLM's prompt and ``SamplingParams``.

    Args:
        cache_salt: vLLM shares cached prefixes among requests with the same salt.

    Raises:
        ValueError: the request does not fit into the model's context.
    """
    if isinstance(request, ScoreRequest):
        return _score_to_vllm(request, cache_salt=cache_salt, max_model_len=max_model_len)
    return _generate_to_vllm(request, cache_salt=cache_salt, max_model_len=max_model_len)


def _score_to_vllm(
    request: ScoreRequest, *, cache_salt: str, max_model_len: int
) -> tuple[Any, Any]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    if not 2 <= len(request.token_ids) < max_model_len:
        raise ValueError(
            f"{len(request.token_ids)} tokens to score: give 2 to max_model_len - 1 = "
            f"{max_model_len - 1}"
        )
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        **_common_params(),
    )
    return tokens_input(request.token_ids.tolist(), cache_salt=cache_salt), params


def _generate_to_vllm(
    request: GenerateRequest, *, cache_salt: str, max_model_len: int
) -> tuple[Any, Any]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    sampling = request.sampling
    if len(request.prompt_token_ids) + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"prompt of {len(request.prompt_token_ids)} tokens + max_tokens {sampling.max_tokens} "
            f"exceed the generator's max_model_len {max_model_len}"
        )
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=request.seed if sampling.temperature > 0 else None,
        stop_token_ids=request.stop_token_ids,
        stop=sampling.stop,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        # The renderer's stop tokens say where a turn ends, not the checkpoint's generation config.
        ignore_eos=True,
        logprobs=0,
        routed_experts_prompt_start=request.routes_from,
        **_common_params(),
    )
    if request.cache_scope:
        cache_salt = f"{cache_salt}/{request.cache_scope}"
    return tokens_input(request.prompt_token_ids.tolist(), cache_salt=cache_salt), params


def _common_params() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return dict(
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # no other request has these parameters; a deep copy takes vLLM 20 us
    )


def score_result(request: ScoreRequest, output: Any) -> ScoreResult:  # noqa: ANN401 - RequestOutput
    """Return the log-probability of each token but the first."""
    logprobs = np.zeros(len(request.token_ids), np.float32)
    by_position = output.prompt_logprobs
    for position in range(1, len(by_position)):
        # A position may hold the top token beside the prompt's own, so it is read by token id.
        token_id = int(request.token_ids[position])
        logprobs[position] = by_position[position][token_id].logprob
    return ScoreResult(request_id=request.request_id, logprobs=logprobs)


def generate_result(
    request: GenerateRequest,
    output: Any,  # noqa: ANN401 - RequestOutput
    route_dtype: str,
) -> GenerateResult:
    """Return the completion of a request, with the version that sampled each token.

    Args:
        route_dtype: dtype of the routes that vLLM returned; "" if it returned none.
    """
    completion = output.outputs[0]
    versions = np.empty(len(completion.token_ids), np.int32)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version)
    # The sampled token comes first at its position.
    first_of_position = completion.logprobs.start_indices
    return GenerateResult(
        request_id=request.request_id,
        completion=Completion(
            token_ids=np.asarray(completion.token_ids, np.int32),
            logprobs=np.asarray(completion.logprobs.logprobs, np.float32)[first_of_position],
            policy_versions=versions,
            finish_reason=completion.finish_reason,
            routes=completion.routed_experts.astype(route_dtype) if route_dtype else None,
        ),
    )
