"""vLLM's engine behind a few verbs: add, step, withdraw, load, abort, close. Synchronous, and used by one thread only."""

import os
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch

from torchtitan.experiments.rl.generation.config import EngineConfig
from torchtitan.experiments.rl.generation.messages import (
    GenerateResult,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
    ScoreResult,
)
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import Manifest


class Engine:
    def __init__(self, config: EngineConfig, *, model_path: str, device: Literal["cpu", "cuda"]):
        _set_environment(config, device)
        # Imported late: vLLM reads its environment, and takes seconds.
        from vllm import EngineArgs, LLMEngine

        on_cpu = device == "cpu"
        arguments: dict[str, Any] = {}
        if on_cpu:
            # With a seed per request, vLLM 0.32 can't split a prompt over two steps on CPU: its generators have no offset.
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(config.max_model_len, 8192)}
        else:
            arguments |= {"gpu_memory_utilization": config.gpu_memory_utilization}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model_path,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_degree,
                distributed_executor_backend="uni" if config.tensor_parallel_degree == 1 else "mp",
                enforce_eager=on_cpu or not config.cuda_graphs,
                enable_prefix_caching=config.enable_prefix_caching,
                skip_tokenizer_init=True,
                logprobs_mode="processed_logprobs",
                # A step in flight while weights change would mislabel its tokens.
                async_scheduling=False,
                worker_extension_cls="torchtitan.experiments.rl.generation.vllm_worker.SnapshotLoader",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **arguments,
            )
        )
        self._max_model_len = config.max_model_len
        self._open: dict[str, tuple[Request, str]] = {}
        """Request and vLLM's own id of it, by the id we gave."""
        self.version = 0
        self._engine.set_weight_version("0")

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def add(self, request: Request) -> RequestFailed | None:
        """Queue a request; it joins the batch at the next step. Returns the failure of one that can never run."""
        try:
            prompt, params = _to_vllm(request, salt=str(self.version), max_model_len=self._max_model_len)
            key = str(request.request_id)
            self._open[key] = (request, self._engine.add_request(key, prompt, params))
        except Exception as error:  # vLLM has errors of its own for what it refuses; one request must not end the others
            return RequestFailed(request_id=request.request_id, cause=str(error))
        return None

    def step(self) -> list[Result]:
        """Run the engine once over every running request; returns those that finished."""
        results: list[Result] = []
        for output in self._engine.step():
            if output.finished:
                request, _ = self._open.pop(output.request_id)
                results.append(_to_result(request, output))
        return results

    def withdraw(self) -> list[Request]:
        """Take back every request that has no token yet, oldest first."""
        states = self._engine.output_processor.request_states
        fresh = {
            key: request
            for key, (request, internal_id) in self._open.items()
            if states[internal_id].detokenizer.num_output_tokens() == 0
        }
        self._engine.abort_request(list(fresh))
        for key in fresh:
            del self._open[key]
        return list(fresh.values())

    def load(self, manifest: Manifest, path: str, *, recompute: bool) -> dict[str, Any]:
        """Take over a new version between two steps. Open requests go on, on the keys and values they have or on new ones.

        Those without a token have to be withdrawn before: a prefix they found cached belongs to the old version.
        """
        reports = self._engine.collective_rpc("load_snapshot", args=(manifest, path))
        self.version = manifest.version
        self._engine.set_weight_version(str(manifest.version))
        if recompute:
            self._recompute()
        return {
            "fingerprint": reports[0]["fingerprint"],
            "verify_s": max(report["verify_s"] for report in reports),
            "reload_s": max(report["reload_s"] for report in reports),
        }

    def _recompute(self) -> None:
        """Have every open request's keys and values computed anew, from its prompt and the tokens it has.

        vLLM preempts the running ones and empties the prefix cache. A preempted request keeps its tokens and its random
        generator, so it goes on in the same stream. Its blocks are hashed again with the version they are about to be computed
        with: the conversation's next turn, and the rest of the group, then find them.
        """
        self._engine.reset_prefix_cache(reset_running_requests=True)
        for request in self._engine.engine_core.engine_core.scheduler.requests.values():
            request.cache_salt = str(self.version)
            request.block_hashes.clear()
            request.update_block_hashes()

    def abort(self, request_ids: Iterable[int]) -> None:
        keys = [str(i) for i in request_ids if str(i) in self._open]
        self._engine.abort_request(keys)
        for key in keys:
            del self._open[key]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _set_environment(config: EngineConfig, device: str) -> None:
    """vLLM is configured by environment in part; all of it is set here, in the generator's own process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Logging is this process's own (observability/logs.py), vLLM's handlers would print beside it.
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    if device == "cpu":
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gib)
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores


def _to_vllm(request: Request, *, salt: str, max_model_len: int) -> tuple[Any, Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    common = {"detokenize": False, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    if isinstance(request, ScoreRequest):
        if not 2 <= len(request.token_ids) < max_model_len:
            raise ValueError(f"{len(request.token_ids)} tokens to score: give 2 to max_model_len - 1 = {max_model_len - 1}")
        prompt = TokensPrompt(prompt_token_ids=request.token_ids.tolist(), cache_salt=salt)
        return prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, **common)
    sampling = request.sampling
    if len(request.prompt_token_ids) + sampling.max_tokens > max_model_len:
        raise ValueError(
            f"prompt of {len(request.prompt_token_ids)} tokens + max_tokens {sampling.max_tokens} exceed the generator's "
            f"max_model_len {max_model_len}"
        )
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=request.seed if sampling.temperature > 0 else None,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=True,  # The renderer's stop tokens say where a turn ends, not the checkpoint's generation config.
        logprobs=0,
        **common,
    )
    return TokensPrompt(prompt_token_ids=request.prompt_token_ids.tolist(), cache_salt=salt), params


def _to_result(request: Request, output: Any) -> GenerateResult | ScoreResult:
    if isinstance(request, ScoreRequest):
        logprobs = np.zeros(len(request.token_ids), np.float32)
        flat = output.prompt_logprobs
        # A position may hold the top token beside the prompt's own: read by token id.
        for position in range(1, len(flat)):
            logprobs[position] = flat[position][int(request.token_ids[position])].logprob
        return ScoreResult(request_id=request.request_id, logprobs=logprobs)
    completion = output.outputs[0]
    versions = np.empty(len(completion.token_ids), np.int32)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version)
    starts = completion.logprobs.start_indices
    return GenerateResult(
        request_id=request.request_id,
        completion=Completion(
            token_ids=np.asarray(completion.token_ids, np.int32),
            logprobs=np.asarray(completion.logprobs.logprobs, np.float32)[starts],
            policy_versions=versions,
            finish_reason=completion.finish_reason,
        ),
    )


def torch_dtype(name: Literal["float32", "bfloat16"]) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
