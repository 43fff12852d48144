"""vLLM as the library's engine (``generation/engine.py``), and its config.

vLLM is imported when an engine is built: importing this file, and with it any config, does not import vLLM.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt, Le

from torchtitan.experiments.rl.bounds import Changeable, PositiveFloat, PositiveInt
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import ConfigError, MissingError, PeerGone
from torchtitan.experiments.rl.generation.engine import (
    QUANTIZED,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    LoadReport,
    Occupancy,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
    ScoreResult,
    WrongWeights,
)
from torchtitan.experiments.rl.generation.vllm.worker import whole_digests
from torchtitan.experiments.rl.process.actor import cause_in
from torchtitan.experiments.rl.process.lifetime import descendants
from torchtitan.experiments.rl.process.temporary import remove_shared_memory, shared_memory_of
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import Manifest

logger = logging.getLogger(__name__)

PINS = Path(__file__).parents[5] / "requirements"
"""The full sets of pins, in a checkout and where the library is installed."""

GPU_OVERHEAD_GIB = 2.0
"""Of an engine's process beside weights and KV cache: CUDA's own, graphs, activations. An estimate: no GPU has run it."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM 0.32 has room for; an adapter of another rank takes the next."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a dense decoder's layers, by the hub's names: vLLM would have adapters of the embedding too."""

OWN_ARGUMENTS = {
    "tensor_parallel_size": "tensor_parallel_degree",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "enforce_eager": "cuda_graphs",
    "enable_sleep_mode": "sleep",
    **{
        name: name
        for name in (
            "dtype",
            "max_model_len",
            "max_num_seqs",
            "gpu_memory_utilization",
            "enable_prefix_caching",
        )
    },
    **dict.fromkeys(
        (
            "model",
            "distributed_executor_backend",
            "skip_tokenizer_init",
            "logprobs_mode",
            "worker_extension_cls",
        )
        + (
            "kv_transfer_config",
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "lora_target_modules",
        )
        + ("enable_return_routed_experts",)
    ),
}
"""vLLM's arguments that are not for ``VLLMEngineConfig.args``, and the field that sets each; None: the library itself does."""

OTHER_DIVISIONS = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
}
"""vLLM's arguments that divide a model otherwise than by tensor parallelism, each with its value where it divides nothing.
Weights are delivered to tensor-parallel engines alone, and proven there."""


@dataclass(kw_only=True, slots=True)
class VLLMEngineConfig(EngineConfig):
    """vLLM's settings; what vLLM calls them is said where the names differ."""

    stops_at_texts: ClassVar[bool] = True
    reads_devices: ClassVar[bool] = True
    max_num_seqs: Changeable[PositiveInt] = 256
    """Sequences in one engine step."""
    gpu_memory_utilization: Changeable[Annotated[float, Gt(0), Le(1)]] = 0.9
    """Share of the GPU's memory for weights and KV cache. CUDA only."""
    kv_cache_gib: Changeable[PositiveFloat | None] = None
    """KV cache of each GPU, in GiB. None: what ``gpu_memory_utilization`` leaves. Needed where the trainer has the same GPUs
    (``provision.share_gpus``). CUDA only."""
    cpu_kv_cache_gib: Changeable[PositiveFloat] = 1.0
    """KV cache on CPU, in GiB. vLLM fills it with zeros when it starts, which takes some 1.8 s a GiB."""
    cuda_graphs: Changeable[bool] = True
    """False sets enforce_eager. CPU is always eager."""
    enable_prefix_caching: Changeable[bool] = True
    args: Changeable[dict[str, Any]] = field(default_factory=dict)
    """Any more of vLLM's ``EngineArgs``, by name: ``{"max_num_batched_tokens": 8192}``, ``{"async_scheduling": False}``. vLLM's
    own class checks them before a process is spawned. With ``{"quantization": "fp8"}`` the engine quantizes each version when
    it loads it: tensors that it holds quantized are not compared with what was published, and its log says how many."""

    def build(
        self,
        *,
        model_path: str,
        device: Literal["cpu", "cuda"],
        adapters: Mapping[str, int] | None = None,
        routes: bool = False,
    ) -> "VLLMEngine":
        return VLLMEngine(
            self, model_path=model_path, device=device, adapters=adapters or {}, routes=routes
        )

    def check_routes(self) -> None:
        if "speculative_config" in self.args:
            cure = 'leave it out, or set trainer.router_replay = "off": tokens that were only proposed have routes too'
            raise ConfigError(
                "generator.engine.args.speculative_config", self.args["speculative_config"], cure
            )
        if not self.enable_prefix_caching:
            cure = 'set it to True, or trainer.router_replay to "off": vLLM keeps routes with the prefixes that it caches'
            raise ConfigError("generator.engine.enable_prefix_caching", False, cure)

    @property
    def warning(self) -> str | None:
        if (kind := self.args.get("quantization")) is None:
            return None
        return f"args.quantization = {kind!r}: the engine's weights are not compared with the published ones, only the canary is"

    def check_adapter(self, rank: int) -> None:
        if rank > LORA_RANKS[-1]:
            cure = f"vLLM serves ranks up to {LORA_RANKS[-1]}: lower it, or set trainer.lora.serve = merged"
            raise ConfigError("trainer.lora.rank", rank, cure)

    def process_memory(self, *, parameters: int, device: Literal["cpu", "cuda"]) -> float:
        if device == "cuda":
            return self.gpu_memory_utilization
        return parameters * self.torch_dtype.itemsize / 2**30 + self.cpu_kv_cache_gib

    def gpu_gib(self, *, parameters: int, asleep: bool = False) -> float | None:
        if self.kv_cache_gib is None:
            return None
        weights = parameters * self.torch_dtype.itemsize / self.tensor_parallel_degree / 2**30
        return GPU_OVERHEAD_GIB + (0 if asleep else weights + self.kv_cache_gib)

    def validate(self, *, field: str) -> None:
        EngineConfig.validate(self, field=field)
        for name, owner in OWN_ARGUMENTS.items():
            if name in self.args:
                set_by = f"{field}.{owner}" if owner else "the library"
                raise ConfigError(
                    f"{field}.args.{name}",
                    self.args[name],
                    f"is set by {set_by}: leave it out here",
                )
        for name, undivided in OTHER_DIVISIONS.items():
            if self.args.get(name, undivided) != undivided:
                cure = f"weights reach tensor-parallel engines alone: leave it out, and set {field}.tensor_parallel_degree"
                raise ConfigError(f"{field}.args.{name}", self.args[name], cure)
        try:
            json.dumps(self.args)
        except TypeError as error:
            raise ConfigError(f"{field}.args", self.args, f"want plain values: {error}") from None

    def check_present(self, *, field: str) -> None:
        if find_spec("vllm") is None:
            cure = f"is not installed: pip install --no-deps -r {PINS / 'cpu.txt'}, or gpu.txt for GPUs"
            raise MissingError(field, "vllm", cure)
        if self.args and (refused := compat.refused_argument(self.args)) is not None:
            name, cause = refused
            raise ConfigError(f"{field}.args.{name}", self.args[name], cause)


class VLLMEngine:
    """Implements generation.engine.Engine."""

    def __init__(
        self,
        config: VLLMEngineConfig,
        *,
        model_path: str,
        device: Literal["cpu", "cuda"],
        adapters: Mapping[str, int],
        routes: bool = False,
    ):
        compat.set_environment(device=device, workers=config.tensor_parallel_degree)
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        logger.info("vLLM is imported")

        on_cpu = device == "cpu"
        # Kernels of experts that keep the weights in the checkpoint's order: of others', digests are no proof.
        arguments: dict[str, Any] = {} if on_cpu else {"moe_backend": "triton"}
        if on_cpu:
            # vLLM compiles one small function of log-probabilities, also where it is told not to compile: seconds for nothing.
            torch.compiler.set_stance("force_eager")
            # With a seed per request, vLLM 0.32 can't split a prompt over two steps on CPU: its generators have no offset.
            arguments |= {
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(config.max_model_len, 8192),
            }
            # The smallest that vLLM's kernels take, as quick as its default of 128: a conversation's next turn computes less.
            arguments["block_size"] = 32
            arguments |= {"kv_cache_memory_bytes": int(config.cpu_kv_cache_gib * 2**30)}
        elif config.kv_cache_gib is None:
            arguments |= {"gpu_memory_utilization": config.gpu_memory_utilization}
        else:
            # vLLM then asks only whether the share is free when it starts: a trainer may have most of the rest.
            arguments |= {
                "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
                "gpu_memory_utilization": 0.05,
            }
        self._served: dict[str, Any] = {}
        """vLLM's LoRARequest of each adapter that the version has, once one is loaded."""
        if adapters:
            room = {"max_loras": len(adapters), "max_cpu_loras": len(adapters)}
            arguments |= {"enable_lora": True, "lora_target_modules": [*LORA_MODULES], **room}
            arguments["max_lora_rank"] = next(
                rank for rank in LORA_RANKS if rank >= max(adapters.values())
            )
        returned = routes and compat.returns_routes(device)
        self._records_routes = routes and not returned
        if returned:
            arguments["enable_return_routed_experts"] = True
        arguments |= dict(
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
            # The next step is scheduled while the GPU computes this one. Updates wait for both: ``compat.finish_steps``.
            async_scheduling=not on_cpu,
            worker_extension_cls="torchtitan.experiments.rl.generation.vllm.worker.SnapshotLoader",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            enable_sleep_mode=config.sleep and not on_cpu,
        )
        # As an offline engine vLLM takes 8,192 or 16,384 tokens a step, by the GPU. Without a context it takes 2,048.
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments | config.args), usage_context=UsageContext.LLM_CLASS
        )
        self._model_path, self._max_model_len = model_path, config.max_model_len
        self._has_workers = config.tensor_parallel_degree > 1
        self._open: dict[str, tuple[Request, str]] = {}
        """By ``request_id`` as text: the request, and the id that vLLM gave it."""
        self._early: list[Result] = []
        """Of steps that were ended for an update."""
        self._version = 0
        self._asleep, self._on_cpu = False, on_cpu
        self._prompt_tokens = self._prompt_tokens_cached = self._routes_kept = 0
        self._engine.set_weight_version("0")
        self._route_dtype = (
            compat.route_dtype(self._engine.model_config.get_num_experts()) if returned else ""
        )
        """Of the routes that vLLM returns."""
        if self._records_routes:
            self._engine.collective_rpc("record_routes")

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._open or self._early)

    def add(self, request: Request) -> RequestFailed | None:
        try:
            if isinstance(request, GenerateRequest) and request.sampling.stop:
                compat.give_tokenizer(self._engine, self._model_path)
            prompt, params = _to_vllm(
                request, salt=str(self._version), max_model_len=self._max_model_len
            )
            key = str(request.request_id)
            adapter = self._served[request.adapter] if self._served else None
            self._open[key] = (
                request,
                self._engine.add_request(key, prompt, params, lora_request=adapter),
            )
        except Exception as error:  # whatever vLLM raises for a request it refuses: one request must not end the others
            return RequestFailed(request_id=request.request_id, cause=str(error))
        return None

    def step(self) -> list[Result]:
        results, self._early = self._early, []
        return results + self._results(self._engine.step()) if self._open else results

    def _results(self, outputs: Iterable[Any]) -> list[Result]:
        results: list[Result] = []
        sampled: dict[str, tuple[GenerateRequest, Completion]] = {}
        for output in outputs:
            if output.finished:
                request, internal_id = self._open.pop(output.request_id)
                self._prompt_tokens += len(output.prompt_token_ids or ())
                self._prompt_tokens_cached += output.num_cached_tokens or 0
                results.append(result := _to_result(request, output, self._route_dtype))
                if isinstance(request, GenerateRequest) and isinstance(result, GenerateResult):
                    sampled[internal_id] = request, result.completion
        if self._records_routes and sampled:
            wanted = {
                own: (
                    request.routes_from,
                    len(request.prompt_token_ids) + len(completion.token_ids) - 1,
                )
                for own, (request, completion) in sampled.items()
            }
            for own, (routes, kept) in self._engine.collective_rpc("routes_of", args=(wanted,))[
                0
            ].items():
                sampled[own][1].routes = routes
                self._routes_kept += kept
        return results

    def occupancy(self) -> Occupancy:
        running, waiting, cache = compat.occupancy(self._engine)
        return Occupancy(
            running=running,
            waiting=waiting,
            cache=cache,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            routes_kept=self._routes_kept,
        )

    def withdraw(self) -> list[Request]:
        fresh = {
            key: request
            for key, (request, internal_id) in self._open.items()
            if compat.output_token_count(self._engine, internal_id) == 0
        }
        self._engine.abort_request(list(fresh))
        for key in fresh:
            del self._open[key]
        return list(fresh.values())

    def sleep(self) -> None:
        # vLLM keeps the memory of a CPU: only its scheduler pauses. On GPUs weights are dropped, for the next ones come from a
        # snapshot.
        self._engine.sleep(level=0 if self._on_cpu else 2)
        self._asleep = True

    def load(self, manifest: Manifest, *, recompute: bool, verify: bool = True) -> LoadReport:
        if self._asleep:
            self._engine.wake_up(["scheduling"] if self._on_cpu else None)
            self._asleep = False
        self._early += self._results(compat.finish_steps(self._engine))
        if cause := next(
            filter(None, self._engine.collective_rpc("map_snapshot", args=(manifest,))), ""
        ):
            raise PeerGone(cause)
        try:
            reports = self._engine.collective_rpc("load_snapshot", args=(verify,))
        except Exception as error:  # whatever vLLM raises, and its workers may have raised
            raise WrongWeights(
                f"weights of version {manifest.version} are not loaded: {cause_in(error)}"
            ) from error
        self._version, self._served = manifest.version, compat.lora_requests(manifest.shapes)
        self._engine.set_weight_version(str(manifest.version))
        if recompute:
            compat.recompute_open_requests(self._engine, cache_salt=str(manifest.version))
        digests = whole_digests(report.parts for report in reports)
        if quantized := list(digests.values()).count(QUANTIZED):
            logger.info(
                "version %d: %d tensors are quantized, and not compared",
                manifest.version,
                quantized,
            )
        return LoadReport(
            digests=digests,
            verify_s=max(report.verify_s for report in reports),
            reload_s=max(report.reload_s for report in reports),
        )

    def abort(self, request_ids: Iterable[int]) -> None:
        keys = [str(i) for i in request_ids if str(i) in self._open]
        self._engine.abort_request(keys)
        for key in keys:
            del self._open[key]

    def close(self) -> None:
        if (
            not self._has_workers
        ):  # all of it ends with this process, and vLLM's shutdown collects garbage for a second
            compat.leave_to_the_exit(self._engine)
            return
        # vLLM's workers share memory with this process, and are killed before they remove their part of it.
        shared = shared_memory_of(descendants())
        compat.shut_down(self._engine)
        remove_shared_memory(shared)


def _to_vllm(request: Request, *, salt: str, max_model_len: int) -> tuple[Any, Any]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    common: dict[str, Any] = {
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,  # these parameters are of one request alone; vLLM's deep copy of them takes 20 us
    }
    if isinstance(request, ScoreRequest):
        if not 2 <= len(request.token_ids) < max_model_len:
            raise ValueError(
                f"{len(request.token_ids)} tokens to score: give 2 to max_model_len - 1 = {max_model_len - 1}"
            )
        prompt = tokens_input(request.token_ids.tolist(), cache_salt=salt)
        common["detokenize"] = False
        return prompt, SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, **common
        )
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
        stop=sampling.stop,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        ignore_eos=True,  # The renderer's stop tokens say where a turn ends, not the checkpoint's generation config.
        logprobs=0,
        routed_experts_prompt_start=request.routes_from,
        **common,
    )
    scoped = f"{salt}/{request.cache_scope}" if request.cache_scope else salt
    return tokens_input(request.prompt_token_ids.tolist(), cache_salt=scoped), params


def _to_result(request: Request, output: Any, route_dtype: str) -> GenerateResult | ScoreResult:
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
            routes=completion.routed_experts.astype(route_dtype) if route_dtype else None,
        ),
    )
