"""vLLM 0.32: what is read, called or set of it beyond its documented interface.

``tests/unit/test_compat_vllm.py`` names what an upgrade takes away. This module does not import vLLM: vLLM reads its
environment when it is imported, so ``set_environment`` has to run first.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch


def set_environment(*, device: str, cpu_kv_cache_gib: int, workers: int = 1) -> None:
    """Set the environment variables that vLLM 0.32 reads in place of arguments. Call before vLLM is imported.

    The engine runs in this process, because its scheduler is reached from here (``recompute_open_requests``). Log handlers are
    the process's own.

    Args:
        workers: processes that share the model (tensor parallelism). On CPU they share this process's cores.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    # vLLM forks its workers otherwise: a copy of a process with threads, and on GPUs with CUDA, which may hang or fail.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::workers] or [cores[rank % len(cores)]] for rank in range(workers)]
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def output_token_count(engine: Any, internal_id: str) -> int:
    """Tokens sampled so far for an open request, by the id that ``LLMEngine.add_request`` returned.

    vLLM 0.32 reports a request's progress only in outputs, which FINAL_ONLY requests have none of before they end. The output
    processor counts tokens in its detokenizer, also where nothing is detokenized.
    """
    return engine.output_processor.request_states[internal_id].detokenizer.num_output_tokens()


def recompute_open_requests(engine: Any, *, cache_salt: str) -> None:
    """Discard the keys and values of every open request and of the prefix cache: the next step computes them again.

    ``reset_prefix_cache(reset_running_requests=True)`` is public. It preempts the running requests, which keep their tokens and
    their random generators. vLLM 0.32 has no way to change a request's salt: its blocks would be cached again under the salt of
    the old weights. So the scheduler's own record is given the new salt, and its blocks are hashed again. The conversation's
    next turn, and the rest of the group, then find them.
    """
    engine.reset_prefix_cache(reset_running_requests=True)
    for request in engine.engine_core.engine_core.scheduler.requests.values():
        replace_cache_salt(request, cache_salt)


def replace_cache_salt(request: Any, cache_salt: str) -> None:
    """Give a scheduler's request (``vllm.v1.request.Request``) another salt, and block hashes that include it."""
    request.cache_salt = cache_salt
    request.block_hashes.clear()
    request.update_block_hashes()


def shut_down(engine: Any) -> None:
    """Free the engine's memory and end its workers. ``LLMEngine`` 0.32 has no method for it; its core client has."""
    engine.engine_core.shutdown()


def reload_weights(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """In a worker process: copy tensors, by their hub names, into the running model."""
    worker.reload_weights(weights_iterator=tensors)
    repack_tied_head(worker.get_model())


def repack_tied_head(model: Any) -> None:
    """Pack the head again after a reload, where it is tied to the embedding and on CPU.

    vLLM 0.32 packs the head's weights for CPU when the model is made, and a reload packs only modules that own a weight. A
    tied head owns none: it would go on with the old weights, and the policy would drift from the trainer without an error.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not model.config.tie_word_embeddings or next(head.parameters()).device.type != "cpu":
        return
    head.quant_method.process_weights_after_loading(head)
