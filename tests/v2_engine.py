"""vLLM's V2 model runner, which is the one that GPUs run, on CPU: Triton interprets its kernels in Python.

vLLM's CPU build falls back to the V1 runner where Triton has no CPU backend. Here it is told of one, and takes the V2 runner:
its request states, block tables, sampler, log-probabilities and prompt log-probabilities are then the code of GPUs, kernels
included. Attention is the CPU kernel. A step takes some 0.1 s, so this is for tests of a few hundred tokens.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngine, VLLMEngineConfig

_BACKEND = Path(__file__).resolve().with_name("triton_cpu") / "metadata"
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "PYTHONPATH": os.pathsep.join([str(_BACKEND), *sys.path]),
}
"""Variables of the engine's process from its start, and so of its workers: Triton reads them when it is imported."""


@dataclass(kw_only=True, slots=True)
class V2EngineConfig(VLLMEngineConfig):
    """With vLLM's arguments as on a GPU, where they differ: chunks of prompts, asynchronous scheduling, and no sharing of last
    blocks."""

    chunk_tokens: int = 64
    """Of prompts, in one engine step."""

    def build(
        self,
        *,
        model_path: str,
        device: Literal["cpu", "cuda"],
        adapters: Mapping[str, int] | None = None,
        routes: bool = False,
    ) -> VLLMEngine:
        assert os.environ["TRITON_INTERPRET"] == "1", (
            "triton was imported as its compiler: launch the process with ENVIRONMENT"
        )
        compat.set_environment(device=device, workers=self.tensor_parallel_degree)
        import vllm

        as_on_gpus = {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": self.chunk_tokens,
            "async_scheduling": True,
        }
        arguments = vllm.EngineArgs

        def changed(**given: Any) -> Any:
            return arguments(**given | as_on_gpus)

        vllm.EngineArgs = changed
        _keep_async_scheduling()
        engine = VLLMEngine(
            self, model_path=model_path, device=device, adapters=adapters or {}, routes=routes
        )
        assert engine._engine.engine_core.engine_core.batch_queue is not None, (
            "steps are scheduled asynchronously"
        )
        for modules in engine._engine.collective_rpc(_runner_modules):
            assert "vllm.v1.worker.gpu.model_runner" in modules, modules
        return engine


def _runner_modules(worker: Any) -> set[str]:
    """Return the modules of a worker's model runner and of the classes that it inherits from."""
    return {kind.__module__ for kind in type(worker.model_runner).__mro__}


def _keep_async_scheduling() -> None:
    """vLLM's CPU platform turns it off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(platform: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = keep
