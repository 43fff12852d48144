"""vLLM as the library's engine (`generation/engine.py`), and its config.

    Request ─▶ LLMEngine ─▶ Result                     translated by `requests.py`
    Manifest ─▶ every worker of vLLM ─▶ LoadReport     loaded and digested by `worker.py`

Importing this file, and with it any config, does not import vLLM: building an engine does.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from torchtitan.experiments.rl.bounds import Changeable, PositiveFloat
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import ConfigError, MissingError, PeerGone
from torchtitan.experiments.rl.generation.engine import (
    QUANTIZED,
    EngineConfig,
    GenerateRequest,
    LoadReport,
    Occupancy,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
    WrongWeights,
)
from torchtitan.experiments.rl.generation.vllm.requests import (
    generate_result,
    score_result,
    to_vllm,
)
from torchtitan.experiments.rl.generation.vllm.worker import WorkerReport, whole_digests
from torchtitan.experiments.rl.process.actor import cause_in
from torchtitan.experiments.rl.process.lifetime import descendants
from torchtitan.experiments.rl.process.temporary import remove_shared_memory, shared_memory_of
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import Manifest

logger = logging.getLogger(__name__)

Device = Literal["cpu", "cuda"]

PINS = Path(__file__).parents[5] / "requirements"
"""Folder with the full sets of pins, in a checkout and where the library is installed."""

GPU_OVERHEAD_GIB = 2.6
"""Estimated GiB that an engine's process takes on its GPU beside weights and KV cache. Of these are
0.5 CUDA's own, 1.1 CUDA graphs, activations and workspaces, and 1 what an update copies and
digests. No GPU has run it."""

GPU_SHARE_WITH_FIXED_CACHE = 0.05
"""Share of a GPU's memory that vLLM is told to expect free if its KV cache has a fixed size. It
checks no more than that, so a trainer may have most of the rest."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache on CPU: the fewest that vLLM's kernels take. They are as quick
as with its default of 128, and a conversation's next turn finds more of its prefix."""

CPU_MIN_BATCHED_TOKENS = 8192
"""Minimum number of tokens that an engine on CPU may compute in one step."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM 0.32 allocates room for. An adapter of another rank takes the next larger one."""

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules of a dense decoder's layers that may have adapters, by their hub names. By default vLLM
would also give the embedding one."""

OWN_ARGUMENTS: dict[str, str | None] = {
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "tensor_parallel_size": "tensor_parallel_degree",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "enable_prefix_caching": "enable_prefix_caching",
    "enforce_eager": "cuda_graphs",
    "enable_sleep_mode": "sleep",
    "model": None,
    "distributed_executor_backend": None,
    "skip_tokenizer_init": None,
    "logprobs_mode": None,
    "worker_extension_cls": None,
    "kv_transfer_config": None,
    "enable_lora": None,
    "max_loras": None,
    "max_cpu_loras": None,
    "max_lora_rank": None,
    "lora_target_modules": None,
    "enable_return_routed_experts": None,
}
"""Arguments of vLLM that ``VLLMEngineConfig.args`` may not have, each with the field that sets it;
None if the library sets it."""

OTHER_DIVISIONS = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
}
"""Arguments of vLLM that divide a model otherwise than by tensor parallelism, each with its value
that divides nothing. Weights are delivered to tensor-parallel engines alone, and proven there."""


@dataclass(kw_only=True, slots=True)
class VLLMEngineConfig(EngineConfig):
    """Settings of vLLM. `OWN_ARGUMENTS` has vLLM's own names for them."""

    adapted_modules: ClassVar[frozenset[str]] = frozenset(LORA_MODULES)
    wider_windows: ClassVar[frozenset[str]] = frozenset({"Cohere2ForCausalLM"})
    # Of Ernie's biases vLLM drops those of attention's output projections.
    ignored_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Ernie4_5ForCausalLM": ("use_bias",),
        "StableLmForCausalLM": ("use_parallel_residual", "qk_layernorm"),
    }
    stops_at_texts: ClassVar[bool] = True
    reads_devices: ClassVar[bool] = True
    max_num_seqs: Changeable[Annotated[int, Ge(1), Le(65_536)]] = 256
    """Maximum number of sequences in one engine step."""
    gpu_memory_utilization: Changeable[Annotated[float, Gt(0), Le(1)]] = 0.9
    """Share of the GPU's memory for weights and KV cache. CUDA only."""
    kv_cache_gib: Changeable[PositiveFloat | None] = None
    """Size of each GPU's KV cache, in GiB. None for what ``gpu_memory_utilization`` leaves. Needed
    if the trainer has the same GPUs (``provision.share_gpus``). CUDA only."""
    cpu_kv_cache_gib: Changeable[PositiveFloat] = 1.0
    """Size of the KV cache on CPU, in GiB. vLLM fills it with zeros when it starts, which takes
    some 1.8 s a GiB."""
    cuda_graphs: Changeable[bool] = True
    """False to set vLLM's ``enforce_eager``. On CPU vLLM is always eager."""
    enable_prefix_caching: Changeable[bool] = True
    args: Changeable[dict[str, Any]] = field(default_factory=dict)
    """Any other of vLLM's ``EngineArgs``, by name: ``{"max_num_batched_tokens": 8192}``,
    ``{"async_scheduling": False}``. vLLM's own class checks them before a process is spawned.

    With ``{"quantization": "fp8"}`` the engine quantizes each version when it loads it. Tensors
    that it holds quantized are not compared with what was published; its log says how many."""

    def build(
        self,
        *,
        model_path: str,
        device: Device,
        adapters: Mapping[str, int] | None = None,
        routes: bool = False,
    ) -> "VLLMEngine":
        """Make the engine in this process. See the base class."""
        return VLLMEngine(
            self, model_path=model_path, device=device, adapters=adapters or {}, routes=routes
        )

    def validate(self, *, field: str) -> None:
        """Refuse arguments of vLLM that the library sets, that divide the model, or are no JSON."""
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
                raise ConfigError(
                    f"{field}.args.{name}",
                    self.args[name],
                    "weights reach tensor-parallel engines alone: leave it out, and set "
                    f"{field}.tensor_parallel_degree",
                )
        try:
            json.dumps(self.args)
        except TypeError as error:
            raise ConfigError(f"{field}.args", self.args, f"want plain values: {error}") from None

    def check_present(self, *, field: str) -> None:
        """Refuse a machine without vLLM or its libraries, and arguments that vLLM does not take."""
        if find_spec("vllm") is None:
            raise MissingError(
                field,
                "vllm",
                f"is not installed: pip install --no-deps -r {PINS / 'cpu.txt'}, or gpu.txt for "
                "GPUs",
            )
        if (lack := compat.library_lack()) is not None:
            raise MissingError(field, "vllm", lack)
        refused = compat.refused_argument(self.args) if self.args else None
        if refused is not None:
            name, cause = refused
            raise ConfigError(f"{field}.args.{name}", self.args[name], cause)

    def check_adapter(self, rank: int) -> None:
        """Refuse a rank that vLLM has no room for."""
        if rank > LORA_RANKS[-1]:
            raise ConfigError(
                "trainer.lora.rank",
                rank,
                f"vLLM serves ranks up to {LORA_RANKS[-1]}: lower it, or set "
                "trainer.lora.serve = merged",
            )

    def check_routes(self) -> None:
        """Refuse settings under which vLLM does not know the route of every token."""
        if "speculative_config" in self.args:
            raise ConfigError(
                "generator.engine.args.speculative_config",
                self.args["speculative_config"],
                'leave it out, or set trainer.router_replay = "off": tokens that were only '
                "proposed have routes too",
            )
        if not self.enable_prefix_caching:
            raise ConfigError(
                "generator.engine.enable_prefix_caching",
                False,
                'set it to True, or trainer.router_replay to "off": vLLM keeps routes with the '
                "prefixes that it caches",
            )

    @property
    def warning(self) -> str | None:
        """Warning that a quantized engine's weights are proven by the canary alone."""
        kind = self.args.get("quantization")
        if kind is None:
            return None
        return (
            f"args.quantization = {kind!r}: the engine's weights are not compared with the "
            "published ones, only the canary is"
        )

    def process_memory(self, *, parameters: int, device: Device) -> float:
        """Return the memory of one process: GiB on CPU, a share of its GPU on CUDA."""
        if device == "cuda":
            return self.gpu_memory_utilization
        return parameters * self.torch_dtype.itemsize / 2**30 + self.cpu_kv_cache_gib

    def gpu_gib(self, *, parameters: int, asleep: bool = False) -> float | None:
        """Return the memory of one process on its GPU, in GiB; None if it is a share of it."""
        if self.kv_cache_gib is None:
            return None
        if asleep:
            return GPU_OVERHEAD_GIB
        weights = parameters * self.torch_dtype.itemsize / self.tensor_parallel_degree / 2**30
        return GPU_OVERHEAD_GIB + weights + self.kv_cache_gib


@dataclass(frozen=True, slots=True)
class _VLLMRequest:
    """A request that vLLM works on."""

    request: Request
    internal_id: str
    """Id that vLLM gave the request."""


class VLLMEngine:
    """Implementation of `generation.engine.Engine`, which says what each method promises."""

    def __init__(
        self,
        config: VLLMEngineConfig,
        *,
        model_path: str,
        device: Device,
        adapters: Mapping[str, int],
        routes: bool = False,
    ):
        """Import vLLM, and load the model's checkpoint as version 0. See `EngineConfig.build`."""
        compat.set_environment(device=device, workers=config.tensor_parallel_degree)
        from vllm import EngineArgs, LLMEngine
        from vllm.usage.usage_lib import UsageContext

        logger.info("vLLM is imported")
        self._on_cpu = device == "cpu"
        if self._on_cpu:
            # Even when told not to compile, vLLM compiles one small function of log-probabilities:
            # seconds for nothing.
            torch.compiler.set_stance("force_eager")
        vllm_returns_routes = routes and compat.returns_routes(device)
        arguments = _engine_arguments(
            config,
            model_path=model_path,
            device=device,
            adapters=adapters,
            return_routes=vllm_returns_routes,
        )
        # As an offline engine, vLLM takes 8,192 or 16,384 tokens a step, by the GPU. Without a
        # usage context it takes 2,048.
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments | config.args), usage_context=UsageContext.LLM_CLASS
        )
        self._engine.set_weight_version("0")
        self._model_path = model_path
        self._max_model_len = config.max_model_len
        self._has_workers = config.tensor_parallel_degree > 1
        self._open: dict[str, _VLLMRequest] = {}
        """Open requests by ``request_id`` as text, oldest first."""
        self._early_results: list[Result] = []
        """Results of steps that `load` ended."""
        self._version = 0
        self._served_adapters: dict[str, Any] = {}
        """vLLM's LoRARequest of each adapter of the version; empty until one is loaded."""
        self._asleep = False
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._routes_kept = 0
        self._route_dtype = ""
        """dtype of the routes that vLLM returns; "" if it returns none."""
        if vllm_returns_routes:
            self._route_dtype = compat.route_dtype(self._engine.model_config.get_num_experts())
        self._records_routes = routes and not vllm_returns_routes
        """True if the workers record routes, because vLLM can't return them."""
        if self._records_routes:
            self._engine.collective_rpc("record_routes")

    @property
    def version(self) -> int:
        """Policy version of the weights that the engine holds."""
        return self._version

    @property
    def busy(self) -> bool:
        """True if a request is open, or a result was not returned yet."""
        return bool(self._open or self._early_results)

    def add(self, request: Request) -> RequestFailed | None:
        """Queue a request; return its failure if vLLM refuses it."""
        key = str(request.request_id)
        try:
            if isinstance(request, GenerateRequest) and request.sampling.stop:
                compat.give_tokenizer(self._engine, self._model_path)
            prompt, params = to_vllm(
                request, cache_salt=str(self._version), max_model_len=self._max_model_len
            )
            adapter = self._served_adapters[request.adapter] if self._served_adapters else None
            internal_id = self._engine.add_request(key, prompt, params, lora_request=adapter)
        except Exception as error:  # noqa: BLE001 - one refused request must not end the others
            return RequestFailed(request_id=request.request_id, cause=str(error))
        self._open[key] = _VLLMRequest(request, internal_id)
        return None

    def step(self) -> list[Result]:
        """Run the model once, and return the results of requests that finished."""
        results = self._early_results
        self._early_results = []
        if self._open:
            results = results + self._take_results(self._engine.step())
        return results

    def occupancy(self) -> Occupancy:
        """Return how much the engine has to do now, and counts of what it has done."""
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
        """Take back every open request that has no token yet, and return them, oldest first."""
        withdrawn = {
            key: entry.request
            for key, entry in self._open.items()
            if compat.output_token_count(self._engine, entry.internal_id) == 0
        }
        self._abort(list(withdrawn))
        return list(withdrawn.values())

    def load(self, manifest: Manifest, *, recompute: bool, verify: bool = True) -> LoadReport:
        """Replace the weights by a version, and report what the workers hold then."""
        if self._asleep:
            self._engine.wake_up(["scheduling"] if self._on_cpu else None)
            self._asleep = False
        # vLLM labels tokens with the version that is set when it processes them: no step may be in
        # flight while weights change.
        self._early_results += self._take_results(compat.finish_steps(self._engine))

        causes = self._engine.collective_rpc("map_snapshot", args=(manifest,))
        cause = next(filter(None, causes), "")
        if cause:
            raise PeerGone(cause)  # nothing has changed: the engine goes on with what it has
        try:
            reports: list[WorkerReport] = self._engine.collective_rpc(
                "load_snapshot", args=(verify,)
            )
        except Exception as error:  # whatever vLLM raises, and its workers may have raised
            raise WrongWeights(
                f"weights of version {manifest.version} are not loaded: {cause_in(error)}"
            ) from error

        self._version = manifest.version
        self._served_adapters = compat.lora_requests(manifest.shapes)
        self._engine.set_weight_version(str(manifest.version))
        if recompute:
            compat.recompute_open_requests(self._engine, cache_salt=str(manifest.version))

        digests = whole_digests(report.held for report in reports)
        quantized = list(digests.values()).count(QUANTIZED)
        if quantized:
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

    def sleep(self) -> None:
        """Free the memory of weights, keys and values until the next `load`."""
        # On CPU vLLM keeps its memory, and only pauses its scheduler. On GPUs the weights are
        # dropped, because the next ones come from a snapshot.
        self._engine.sleep(level=0 if self._on_cpu else 2)
        self._asleep = True

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests without a result. Ids that are not open are ignored."""
        self._abort([str(i) for i in request_ids if str(i) in self._open])

    def close(self) -> None:
        """End vLLM's workers, and remove their shared memory."""
        if not self._has_workers:
            # All of the engine ends with this process, and vLLM's shutdown would collect garbage
            # for a second.
            compat.leave_to_the_exit(self._engine)
            return
        # Workers share memory with this process, and are killed before they remove their part.
        shared = shared_memory_of(descendants())
        compat.shut_down(self._engine)
        remove_shared_memory(shared)

    def _abort(self, keys: list[str]) -> None:
        self._engine.abort_request(keys)
        for key in keys:
            del self._open[key]

    def _take_results(self, outputs: Iterable[Any]) -> list[Result]:
        """Close the requests that have finished, and return their results.

        Args:
            outputs: vLLM's ``RequestOutput`` of each request that was in the step.
        """
        results: list[Result] = []
        sampled: dict[str, tuple[GenerateRequest, Completion]] = {}
        for output in outputs:
            if not output.finished:
                continue
            entry = self._open.pop(output.request_id)
            self._prompt_tokens += len(output.prompt_token_ids or ())
            self._prompt_tokens_cached += output.num_cached_tokens or 0
            if isinstance(entry.request, ScoreRequest):
                results.append(score_result(entry.request, output))
            else:
                result = generate_result(entry.request, output, self._route_dtype)
                sampled[entry.internal_id] = entry.request, result.completion
                results.append(result)
        if self._records_routes and sampled:
            self._add_recorded_routes(sampled)
        return results

    def _add_recorded_routes(
        self, sampled: Mapping[str, tuple[GenerateRequest, Completion]]
    ) -> None:
        """Give completions the routes that the workers have recorded.

        Args:
            sampled: requests that finished in the last step, by vLLM's id.
        """
        wanted = {}
        for internal_id, (request, completion) in sampled.items():
            # The last token has no route: it was no input yet.
            end = len(request.prompt_token_ids) + len(completion.token_ids) - 1
            wanted[internal_id] = request.routes_from, end
        # Every worker has the routes of all tokens: one answer is enough.
        answer = self._engine.collective_rpc("routes_of", args=(wanted,))[0]
        for internal_id, (routes, kept) in answer.items():
            _, completion = sampled[internal_id]
            completion.routes = routes
            self._routes_kept += kept


def _engine_arguments(
    config: VLLMEngineConfig,
    *,
    model_path: str,
    device: Device,
    adapters: Mapping[str, int],
    return_routes: bool,
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``, without the user's own.

    Args:
        adapters: rank of each adapter, by name.
        return_routes: True if vLLM is to return the experts of each token.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = dict(
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
        # The next step is scheduled while the GPU computes this one. `load` waits for both.
        async_scheduling=not on_cpu,
        worker_extension_cls="torchtitan.experiments.rl.generation.vllm.worker.SnapshotLoader",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_sleep_mode=config.sleep and not on_cpu,
    )
    arguments |= _cpu_arguments(config) if on_cpu else _gpu_arguments(config)
    if adapters:
        arguments |= dict(
            enable_lora=True,
            lora_target_modules=[*LORA_MODULES],
            max_loras=len(adapters),
            max_cpu_loras=len(adapters),
            max_lora_rank=next(rank for rank in LORA_RANKS if rank >= max(adapters.values())),
        )
    if return_routes:
        arguments["enable_return_routed_experts"] = True
    return arguments


def _cpu_arguments(config: VLLMEngineConfig) -> dict[str, Any]:
    return dict(
        kv_cache_memory_bytes=int(config.cpu_kv_cache_gib * 2**30),
        block_size=CPU_BLOCK_TOKENS,
        # On CPU vLLM 0.32 can't split the prompt of a request with a seed over two steps: its
        # generators have no offset. So a step takes the longest prompt whole.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(config.max_model_len, CPU_MIN_BATCHED_TOKENS),
    )


def _gpu_arguments(config: VLLMEngineConfig) -> dict[str, Any]:
    # Other kernels of experts keep the weights in an order of their own, of which no digest is a
    # proof.
    arguments: dict[str, Any] = dict(moe_backend="triton")
    if config.kv_cache_gib is None:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        arguments["gpu_memory_utilization"] = GPU_SHARE_WITH_FIXED_CACHE
    return arguments
