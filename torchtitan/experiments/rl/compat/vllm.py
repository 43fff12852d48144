"""vLLM 0.32: what is read, called or set of it beyond its documented interface.

``tests/unit/test_compat_vllm.py`` names what an upgrade takes away. This module does not import vLLM: vLLM reads its
environment when it is imported, so ``set_environment`` has to run first.

A weight of the engine may be several tensors of the checkpoint, one below the other, or a share of one. On CPU vLLM packs the
weight of a linear layer for its kernels and drops the weight itself: nothing can read the packed copy back. So what is packed
is noted when it is packed, and the note hangs on the function that owns the copy. The experts of a layer are two weights, of
three dimensions, made of three stacks: gate above up, and down. What is packed of them takes their place, and has the note.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from typing import Any

import torch


def set_environment(*, device: str, workers: int = 1) -> None:
    """Set the environment variables that vLLM 0.32 reads in place of arguments. Call before vLLM is imported.

    The engine runs in this process, because its scheduler is reached from here (``recompute_open_requests``). Log handlers are
    the process's own.

    Args:
        workers: processes that share the model (tensor parallelism). On CPU they share out its threads.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    # vLLM forks its workers otherwise: a copy of a process with threads, and on GPUs with CUDA, which may hang or fail.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device == "cpu":
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would go before the argument
        # Without it each worker takes a NUMA node for itself, and fails where there are fewer.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // workers))


_CHECK = """
import dataclasses, json, sys
from pydantic import TypeAdapter, ValidationError
from torchtitan.experiments.rl.compat import vllm as compat
compat.set_environment(device="cpu")
from vllm.engine import arg_utils
kinds = {field.name: field.type for field in dataclasses.fields(arg_utils.EngineArgs)}
for name, value in json.load(sys.stdin).items():
    cause = "" if name in kinds else "vLLM has no such argument of its engine"
    try:
        kind = kinds.get(name, object)
        kind = eval(kind, vars(arg_utils)) if isinstance(kind, str) else kind
        cause or TypeAdapter(kind).validate_python(value)
    except NameError:
        pass  # a type that vLLM imports for type checkers alone
    except ValidationError as error:
        cause = "vLLM wants another value: " + error.errors()[0]["msg"]
    if cause:
        print(json.dumps([name, cause]))
        break
"""


def refused_argument(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first of these that vLLM's ``EngineArgs`` does not take, and why. Their values are plain data.

    It takes some 6 s: the class is looked up in a process of its own, because importing vLLM changes the process.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _CHECK], input=json.dumps(arguments), capture_output=True, text=True
    )
    if asked.returncode:
        return next(
            iter(arguments)
        ), f"vLLM can't be asked: {asked.stderr.strip().splitlines()[-1]}"
    lines = asked.stdout.strip().splitlines()
    return tuple(json.loads(lines[-1])) if lines else None


def finish_steps(engine: Any) -> list[Any]:
    """Outputs of the engine steps that have begun, once they have ended. None begins meanwhile.

    With asynchronous scheduling vLLM 0.32 begins a step before it has the tokens of the last, and gives all tokens that it
    processes the version that is set then. Its ``pause_scheduler`` leaves a step that has begun in the queue.
    """
    outputs: list[Any] = []
    core = engine.engine_core.engine_core
    if not core.batch_queue:
        return outputs
    from vllm.v1.core.sched.interface import PauseState

    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.batch_queue:
        outputs += engine.step()
    core.resume_scheduler()
    return outputs


def output_token_count(engine: Any, internal_id: str) -> int:
    """Tokens sampled so far for an open request, by the id that ``LLMEngine.add_request`` returned.

    vLLM 0.32 reports a request's progress only in outputs, which FINAL_ONLY requests have none of before they end. The output
    processor counts tokens in its detokenizer, also where nothing is detokenized.
    """
    return engine.output_processor.request_states[internal_id].detokenizer.num_output_tokens()


def give_tokenizer(engine: Any, path: str) -> None:
    """Have the engine find stop texts, once a request has some.

    vLLM 0.32 looks for them in its output processor, which has no tokenizer where ``skip_tokenizer_init`` is set.
    """
    if engine.output_processor.tokenizer is None:
        from transformers import AutoTokenizer

        engine.output_processor.tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )


def occupancy(engine: Any) -> tuple[int, int, float]:
    """Requests that run, requests that wait, and the share of the key-value cache in use.

    vLLM 0.32 tells this in its log and its metrics server only; its scheduler has a method for each.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    return *scheduler.get_request_counts(), scheduler.get_kv_cache_usage()


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


def leave_to_the_exit(engine: Any) -> None:
    """Do not shut the engine down when the process ends. vLLM 0.32 does, by a ``weakref.finalize`` of its core client: it
    collects all garbage for up to a second, and frees memory that ends with the process anyway."""
    engine.engine_core._finalizer.atexit = False


def reload_weights(worker: Any, tensors: Any) -> None:
    """In a worker process: copy a version (``weights.snapshot.PartedTensors``) into the running model.

    vLLM 0.32 warns at each version that modules which own no weight, such as a tied head, "failed to load": the digests of what
    is held say what failed.
    """
    model, names = worker.get_model(), set(tensors.shapes)
    weights = list(held_weights(model, names))
    if copying_suffices(model, weights, names):
        _copy_and_pack(weights, tensors)
    else:
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        device = next(model.parameters()).device
        worker.reload_weights(weights_iterator=_for_vllms_loader(weights, tensors, device))
        if device.type == "cuda":
            torch.cuda.synchronize(
                device
            )  # the memory that the tensors lie in may be written again then, or closed
        else:
            for module in {
                id(held.module): held.module for held in weights if held.parameter.ndim == 3
            }.values():
                pack_experts(module)
    repack_tied_head(model)


_SHARDS_OF_EXPERTS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}
"""vLLM's names of the sources of each weight of experts: gate and up, and down."""


def _for_vllms_loader(
    weights: Iterable["HeldWeight"], tensors: Any, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what vLLM's loader of the model takes, on ``device``, and load stacks of experts.

    The loader takes experts one by one, each twice through vLLM's Python: 0.4 ms, and 8 s for the
    18,432 of 30B-A3B. The function under it, which the weight itself has, takes a stack as well.
    Where vLLM's own expert parallelism gives each worker some experts whole, it takes one at a time.

    On a GPU each tensor arrives whole, and its slices are taken there: torch packs a slice of CPU
    memory first.
    """
    loads = {
        source: (held, shard)
        for held in weights
        if held.parameter.ndim == 3
        for source, shard in zip(held.sources, _SHARDS_OF_EXPERTS[held.name], strict=True)
    }
    for name, tensor in tensors.items():
        staged = tensor.to(device, non_blocking=True)
        if name not in loads:
            yield name, staged
            continue
        held, shard = loads[name]
        if held.module.use_ep:
            yield from ((name.replace("*", str(expert)), own) for expert, own in enumerate(staged))
            continue
        weight = getattr(held.module, held.name)  # a reload has put another in its place
        weight.weight_loader(
            param=weight,
            loaded_weight=staged,
            weight_name=held.name,
            shard_id=shard,
            expert_id=0,  # the first of the stack
        )


def copying_suffices(model: Any, weights: Sequence["HeldWeight"], names: set[str]) -> bool:
    """Whether a load of the tensors ``names`` is to copy each of ``weights``, and to pack those that are packed, for CPU.

    vLLM 0.32's own reload also prepares weights that are quantized, or from which others are computed. For that it takes every
    module apart and puts it together again, and copies each tensor twice.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    methods = {
        type(module.quant_method)
        for module in model.modules()
        if getattr(module, "quant_method", None) is not None
    }
    attentions = {
        type(module) for module in model.modules() if isinstance(module, AttentionLayerBase)
    }
    return (
        all(parameter.device.type == "cpu" for parameter in model.parameters())
        and get_tensor_model_parallel_world_size() == 1
        and {source for held in weights for source in held.sources} == names
        and {id(parameter) for parameter in model.parameters()}
        == {id(held.parameter) for held in weights}
        and methods
        <= {UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod}
        and attentions <= {Attention}
        and isinstance(getattr(model, "lm_head", None), ParallelLMHead)
    )


def _copy_and_pack(weights: Iterable["HeldWeight"], tensors: Any) -> None:
    copied: set[int] = set()
    for module, of_module in groupby(weights, key=lambda held: held.module):
        pack = experts = False
        for held in of_module:
            if id(held.parameter) in copied:
                continue  # a tied head, whose weight is the embedding's
            copied.add(id(held.parameter))
            experts = held.parameter.ndim == 3
            axis = held.axis
            shapes = [tensors.shapes[name] for name in held.sources]
            rows = [shape[axis] for shape in shapes]
            weight = held.plain
            if weight is None:
                shape = (*shapes[0][:axis], sum(rows), *shapes[0][axis + 1 :])
                weight = torch.empty(shape, dtype=held.parameter.dtype)
                setattr(module, held.name, torch.nn.Parameter(weight, requires_grad=False))
            pack = hasattr(
                module, "cpu_linear"
            )  # an embedding's too, which ``packing_noted`` frees where it is for nothing
            filled = weight.narrow(axis, 0, sum(rows))  # a vocabulary may be filled up
            for own, name in zip(filled.split(rows, axis), held.sources, strict=True):
                tensors.copy_to(name, own)
        if pack:
            module.quant_method.process_weights_after_loading(module)
        elif experts:
            pack_experts(module)


def pack_experts(module: Any) -> None:
    """Pack the weights of a layer's experts for CPU, as a load left them. vLLM 0.32 packs those of the first load only: after
    another it would compute with rows in the wrong places."""
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def repack_tied_head(model: Any) -> None:
    """Pack the head again after a reload, where it is tied to the embedding and on CPU.

    vLLM 0.32 packs the head's weights for CPU when the model is made, and a reload packs only modules that own a weight. A
    tied head owns none: it would go on with the old weights, and the policy would drift from the trainer without an error.
    """
    head = getattr(model, "lm_head", None)
    if (
        head is None
        or not model.config.tie_word_embeddings
        or next(head.parameters()).device.type != "cpu"
    ):
        return
    head.quant_method.process_weights_after_loading(head)


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldWeight:
    """One weight of the engine."""

    module: Any
    name: str = "weight"
    """In its module."""
    parameter: torch.Tensor
    sources: tuple[str, ...]
    """Published names of the tensors that it is made of, one below the other. Of experts these are
    stacks, and each expert has its gate above its up."""
    packed: bool
    """Whether the model computes with a packed copy of it."""

    @property
    def axis(self) -> int:
        """Dimension along which the sources lie below each other: rows, of each expert in a stack."""
        return 1 if self.parameter.ndim == 3 else 0

    @property
    def plain(self) -> torch.Tensor | None:
        """The weight itself; None where vLLM keeps nothing but the packed copy."""
        weight = self.parameter.data
        if self.parameter.ndim == 3:
            return None if self.packed else weight
        return weight if weight.numel() else None


def held_weights(model: Any, names: set[str]) -> Iterator[HeldWeight]:
    """Yield each weight of a worker's model that is made of published tensors.

    A tied head has the embedding's source, and may have a packed copy of its own.

    Args:
        names: published names of the version's tensors.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    parts: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    sources_of: dict[int, tuple[str, ...]] = {}
    for module_name, module in model.named_modules():
        parent, _, leaf = module_name.rpartition(".")
        # An embedding is packed as if it were a head, and looked up in the weight itself.
        looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(
            module, ParallelLMHead
        )
        for name, parameter in module.named_parameters(recurse=False):
            prefix = f"{parent}." if parent else ""
            sources: tuple[str, ...] = (f"{module_name}.{name}",)
            if sources[0] not in names:
                sources = tuple(f"{prefix}{part}.{name}" for part in parts.get(leaf, ()))
            if not sources or not names.issuperset(sources):
                sources = sources_of.get(id(parameter), ())  # a tied head
            packed = name == "weight" and hasattr(module, "cpu_linear") and not looked_up
            if isinstance(module, RoutedExperts):
                gate, up, down = (
                    module.ckpt_gate_proj_name,
                    module.ckpt_up_proj_name,
                    module.ckpt_down_proj_name,
                )
                of_one = {"w13_weight": (gate, up), "w2_weight": (down,)}.get(
                    name, ()
                )  # scales have none
                sources = tuple(f"{prefix}*.{own}.weight" for own in of_one)
                packed = parameter.device.type == "cpu"
            if sources:
                sources_of[id(parameter)] = sources
                yield HeldWeight(
                    module=module, name=name, parameter=parameter, sources=sources, packed=packed
                )


def parts_of_sources(held: HeldWeight, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the part of a weight that each of its sources has made, as views."""
    if held.parameter.ndim == 3 or len(held.sources) == 1:
        return weight.chunk(len(held.sources), held.axis)
    return weight.split(list(held.module.output_partition_sizes))


def region(held: HeldWeight, shape: tuple[int, ...], part: torch.Size) -> tuple[slice, ...]:
    """Return which region of a source this worker holds.

    Tensor parallelism divides rows or columns. Key-value heads that are fewer than the workers lie in several of them.

    Args:
        shape: of the source.
        part: shape of what this worker has made of it.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if hasattr(held.module, "shard_indices"):  # of a vocabulary that is filled up and divided
        indices = held.module.shard_indices
        return (
            slice(indices.org_vocab_start_index, indices.org_vocab_end_index),
            *(slice(0, size) for size in shape[1:]),
        )
    rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    found = []
    for size, own in zip(shape, part, strict=True):
        start = own * (rank * (size // own) // world) if own < size else 0
        found.append(slice(start, start + min(own, size)))
    return tuple(found)


def packed_for_nothing(model: Any) -> list[Any]:
    """Embeddings that no logits are computed with, because the model's head is a module of its own. vLLM packs them as well."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    if not isinstance(getattr(model, "lm_head", None), ParallelLMHead):
        return []
    embeddings = (
        module for module in model.modules() if isinstance(module, VocabParallelEmbedding)
    )
    return [module for module in embeddings if not isinstance(module, ParallelLMHead)]


@contextmanager
def packing_noted(note: Callable[[Any], Any], *, unpacked: Iterable[Any] = ()) -> Iterator[None]:
    """While it lasts, ``note(module)`` is called before a module is packed for CPU, and ``packed_from`` returns its result.

    The modules of ``unpacked`` are not packed: they would compute with the weight itself. For a vocabulary of 32,000 that saves
    a tenth of a reload, and the memory of a copy.

    The note is an attribute of ``cpu_linear``, the function that vLLM makes to compute with the packed copy, or of the packed
    parameters of experts: an old copy keeps its old note.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    pack, kept = utils.dispatch_cpu_unquantized_gemm, {id(module) for module in unpacked}
    kernels: Any = cpu_moe.CPUUnquantizedExperts
    pack_experts = kernels.process_weights_after_loading

    def pack_experts_noted(kernel: Any, layer: Any) -> None:
        noted = note(layer)
        pack_experts(kernel, layer)
        if noted is not None:
            layer.w13_weight.packed_from = layer.w2_weight.packed_from = noted

    def pack_noted(layer: Any, remove_weight: bool) -> None:
        if id(layer) in kept:
            layer.cpu_linear = torch.nn.functional.linear
            return
        noted = note(layer)
        pack(layer, remove_weight)
        if noted is not None:
            layer.cpu_linear.packed_from = noted

    utils.dispatch_cpu_unquantized_gemm = pack_noted
    kernels.process_weights_after_loading = pack_experts_noted
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack
        kernels.process_weights_after_loading = pack_experts


def packed_from(module: Any, name: str = "weight") -> Any:
    """What was noted when the packed copy was made that ``module`` computes with in place of its weight ``name``; None for one
    made without a note."""
    return getattr(
        module.cpu_linear if name == "weight" else getattr(module, name), "packed_from", None
    )


class RecordedRoutes:
    """The experts of each token in a worker's key-value cache, where they lie as the keys do: a prefix that is found there has
    the experts it was computed with. A request that is preempted keeps those of its tokens, which are computed again.

    vLLM 0.32 returns routes from its V2 model runner only, which the CPU build does not have. Its routers tell each choice, and
    the context of a forward pass where each token's keys go.
    """

    def __init__(self, worker: Any):
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_routes

        runner = self._runner = worker.model_runner
        layers, experts, chosen = vllm_routes._get_routed_experts_shape(worker.vllm_config)
        self._block_size = worker.cache_config.block_size
        # One block more, for tokens of padding: they go to the last place.
        shape = (runner.kv_cache_config.num_blocks + 1, self._block_size, layers, chosen)
        dtype = getattr(torch, route_dtype(experts))
        blocks = torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
        self._places, self.kept = blocks.flatten(0, 1), dict[str, torch.Tensor]()
        """``kept``: by request, of the tokens that it had when it was preempted."""
        capturer: Any = self  # vLLM's routers call its ``capture``, and nothing else of it
        vllm_routes.bind_routed_experts_capturer(runner.get_model(), capturer)
        self._execute, runner.execute_model = runner.execute_model, self._execute_model

    def capture(self, layer: int, ids: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context

        of_layers: Any = get_forward_context().slot_mapping
        places = next(iter(of_layers.values()))
        self._places[places[: len(ids)].long(), layer] = ids.to(self._places.dtype)

    def _execute_model(self, scheduled: Any, *rest: Any) -> Any:
        for request_id in scheduled.finished_req_ids:
            self.kept.pop(request_id, None)
        for request_id in (
            scheduled.preempted_req_ids or ()
        ):  # others may take its blocks in this step
            self.kept[request_id] = self.of(
                request_id, self._runner.requests[request_id].num_tokens - 1
            )
        return self._execute(scheduled, *rest)

    def of(self, request_id: str, tokens: int) -> torch.Tensor:
        """[tokens, layers, k]. The request may have ended in the last step."""
        blocks = torch.tensor(self._runner.requests[request_id].block_ids[0])
        places = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        first = self.kept.get(request_id, self._places[:0])
        return torch.cat([first, self._places[places[len(first) : tokens]]])[:tokens]


def route_dtype(experts: int) -> str:
    """The largest value of it names no expert. Of 256 experts vLLM's has 8 bits."""
    return "uint8" if experts < 256 else "uint16"


def returns_routes(device: str) -> bool:
    """Whether the model runner that vLLM will take has ``enable_return_routed_experts``."""
    from vllm import envs

    return device == "cuda" or bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def adapters_in(names: Iterable[str]) -> dict[str, int]:
    """vLLM's number of each adapter that a version of these tensors is, by PEFT's names behind the adapter's. Empty: it is the
    whole model."""
    found = dict.fromkeys(
        name.rpartition("/")[0] for name in names if name.endswith(".lora_A.weight")
    )
    return {name: number for number, name in enumerate(found, 1)}


def lora_requests(names: Iterable[str]) -> dict[str, Any]:
    """By adapter of a version of these tensors: what a request names it with."""
    from vllm.lora.request import LoRARequest

    # The path is never read: the adapter is there, by its number, before a request names it.
    return {
        name: LoRARequest(name or "policy", number, "in memory")
        for name, number in adapters_in(names).items()
    }


def set_adapters(worker: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """In a worker process: serve the adapters of these tensors in place of those before. Their scale is in B already.

    vLLM 0.32 loads adapters from folders only. Its manager of a worker takes what it has read from one, and copies it to where
    the kernels read it; a scale of 1 leaves B as it is given.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    manager = _adapters_of(worker)
    for adapter, number in adapters_in(tensors).items():
        prefix = f"{adapter}/" if adapter else ""
        own = {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        rank = next(len(tensor) for name, tensor in own.items() if name.endswith(".lora_A.weight"))
        helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
        manager.remove_adapter(number)
        manager.add_adapter(
            LoRAModel.from_lora_tensors(
                number, own, helper, device="cpu", dtype=manager.lora_config.lora_dtype
            )
        )
        manager.activate_adapter(number)
    for wrapper in manager.punica_wrapper_mapping.values():
        if isinstance(wrapper, PunicaWrapperCPU):
            vars(wrapper)["add_lora_linear"] = partial(_add_adapters, wrapper)


def _add_adapters(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    stacked_a: Sequence[torch.Tensor],
    stacked_b: Sequence[torch.Tensor],
    scale: float,
    sizes: Sequence[int],
    **options: Any,
) -> None:
    """As ``PunicaWrapperCPU.add_lora_linear``, which copies the adapter once for every token: a tenth of the tokens a second at
    rank 64. Here the tokens of each are two products."""
    if wrapper.no_lora:
        return
    of_token = wrapper.token_lora_indices[: len(x)]
    slots = [0] if len(stacked_a[0]) == 1 else of_token.unique().tolist()
    for slot in slots:
        if slot < 0:  # of requests without one
            continue
        rows: Any = slice(None) if len(slots) == 1 else (of_token == slot).nonzero().squeeze(1)
        own, start = x[rows], 0
        for a, b, size in zip(stacked_a, stacked_b, sizes, strict=True):
            added = torch.addmm(
                y[rows, start : start + size], own @ a[slot, 0].T, b[slot, 0].T, alpha=scale
            )
            y[rows, start : start + size] = added
            start += size


def held_adapter(
    worker: Any, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of each of ``tensors`` that a module computes with: its name, what the module holds, and what it should hold of it: all
    but where ranks share the module."""
    manager = _adapters_of(worker)
    for (adapter, number), (module_name, module) in product(
        adapters_in(tensors).items(), manager.modules.items()
    ):
        slot = manager.lora_index_to_id.index(number)
        own = manager.packed_modules.get(module_name, [module_name])
        prefix = f"{adapter}/base_model.model" if adapter else "base_model.model"
        names = [[f"{prefix}.{name}.lora_{part}.weight" for name in own] for part in "AB"]
        shares = [[tensors.get(name) for name in part] for part in names]
        if module.tp_size > 1:
            several = len(own) > 1
            shares_a = module.slice_lora_a(shares[0] if several else shares[0][0])
            shares_b = module.slice_lora_b(shares[1] if several else shares[1][0])
            shares = [shares_a, shares_b] if several else [[shares_a], [shares_b]]
        for part, stacked in enumerate((module.lora_a_stacked, module.lora_b_stacked)):
            for name, share, held in zip(names[part], shares[part], stacked, strict=True):
                if share is not None and name in tensors:
                    yield name, held[slot, 0, : share.shape[0], : share.shape[1]], share


def _adapters_of(worker: Any) -> Any:
    """``LoRAModelManager`` of a worker: private in vLLM 0.32."""
    return worker.model_runner.lora_manager._adapter_manager
