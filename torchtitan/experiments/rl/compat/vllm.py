"""Every use of vLLM 0.32 beyond its documented interface.

* its environment and arguments: `set_environment`, `refused_argument`
* the system libraries that its CPU build links: `library_lack`
* the engine in this process: steps in flight, cached prefixes, progress, its end
* weights: which tensors a model's weights are made of, how a version is loaded, what is packed
* adapters: put into a worker without a folder, and read back
* routes: the experts that computed each token

``tests/unit/test_compat_vllm.py`` fails by name where an upgrade of vLLM breaks this.

This module does not import vLLM before a function needs it: vLLM reads its environment when it is
imported, so ``set_environment`` has to run first.
"""

import ctypes
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import torch
from pydantic import TypeAdapter, ValidationError

# vLLM's own classes, by their names. Importing them for annotations would import vLLM.
LLMEngine: TypeAlias = Any
EngineRequest: TypeAlias = Any
"""``vllm.v1.request.Request``, the scheduler's record of a request."""
Worker: TypeAlias = Any
SchedulerOutput: TypeAlias = Any
ModelRunnerOutput: TypeAlias = Any
LoRAModelManager: TypeAlias = Any
LoRALayer: TypeAlias = Any
"""``vllm.lora.layers.BaseLayerWithLoRA``."""
PunicaWrapper: TypeAlias = Any
Layer: TypeAlias = Any
"""A module of vLLM's model, with attributes that ``torch.nn.Module`` does not declare."""


class VersionTensors(Protocol):
    """Tensors of a version, by published name: a `weights.snapshot.PartedTensors`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the whole tensors."""

    def items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return names and tensors. A tensor may be put together when it is asked for."""

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into ``target``, without putting it together elsewhere."""


# ---- environment and arguments


def set_environment(*, device: str, workers: int = 1) -> None:
    """Set the environment variables that vLLM reads in place of arguments.

    Call it before vLLM is imported. The engine then runs in this process, because its scheduler is
    reached from here (`recompute_open_requests`), and vLLM leaves the process's log handlers alone.

    Args:
        workers: number of processes that share the model (tensor parallelism). On CPU they divide
            the threads of this process.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    # By default vLLM forks its workers. A fork of a process with threads, or with CUDA in use, may
    # hang or fail.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device == "cpu":
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the argument
        # By default each worker binds to a NUMA node of its own, and fails if there are fewer.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // workers))
        if workers > 1:
            # Workers would compile a function of log-probabilities, with a compiler that this
            # machine may lack. In this process the engine tells torch itself.
            os.environ["TORCH_COMPILE_DISABLE"] = "1"


def refused_argument(arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first argument that vLLM's ``EngineArgs`` does not take, and why.

    A subprocess asks the class, because importing vLLM changes the process that does it. That takes
    about 6 s.

    Args:
        arguments: values by name, which JSON can hold.

    Returns:
        Name and cause; None if vLLM takes all arguments.
    """
    question = f"from {__name__} import answer_refused_argument as answer; answer()"
    asked = subprocess.run(
        [sys.executable, "-c", question],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
    )
    if asked.returncode:
        error = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        return next(iter(arguments)), f"vLLM can't be asked: {error}"
    answer = json.loads(asked.stdout.splitlines()[-1])
    return None if answer is None else (answer[0], answer[1])


def answer_refused_argument() -> None:
    """Read arguments from stdin, and print the answer of `refused_argument`, both as JSON."""
    set_environment(device="cpu")
    from vllm import EngineArgs

    types = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    answer = None
    for name, value in json.load(sys.stdin).items():
        if name in types:
            cause = _refusal(value, types[name])
        else:
            cause = "vLLM has no such argument of its engine"
        if cause is not None:
            answer = name, cause
            break
    print(json.dumps(answer))


def _refusal(value: object, wanted: Any) -> str | None:  # noqa: ANN401 - a type or its name
    """Return why a value does not have the type of vLLM's argument; None if it has."""
    if isinstance(wanted, str):  # it names a type that vLLM imports for type checkers alone
        return None
    try:
        TypeAdapter(wanted).validate_python(value)
    except ValidationError as error:
        return "vLLM wants another value: " + error.errors()[0]["msg"]
    return None


CPU_LIBRARIES = {"libnuma.so.1": "libnuma1"}
"""System libraries that vLLM's CPU build links, and Debian's package of each.

No package of pip brings them, and Python runs without them."""


def library_lack() -> str | None:
    """Return which library vLLM's CPU build can't load here, and the cure; None if it loads all.

    vLLM only warns of it, and starts without its own operations: the engine then fails minutes
    later, at the first one, by the name of the operation.
    """
    if not _is_cpu_build():
        return None
    for library, package in CPU_LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            return (
                f"its CPU build can't load a library of the system ({error}): install it (Debian "
                f"and Ubuntu: apt-get install {package})"
            )
    return None


def _is_cpu_build() -> bool:
    """Return True if the installed vLLM computes on CPUs; it must be installed.

    vLLM tells its own build by the same names.
    """
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:  # vllm-cpu has another name
        return True


# ---- the engine


def finish_steps(engine: LLMEngine) -> list[Any]:
    """End the engine steps that have begun, and begin none. Return their outputs.

    With asynchronous scheduling vLLM begins a step before it has the tokens of the last one, and
    labels tokens with the version that is set when it processes them. Its own pause leaves such a
    step unfinished in the queue.
    """
    outputs: list[Any] = []
    core = engine.engine_core.engine_core
    if not core.batch_queue:
        return outputs
    engine.sleep(level=0, mode="keep")  # level 0 pauses only the scheduler
    while core.batch_queue:
        outputs += engine.step()
    engine.wake_up(["scheduling"])
    return outputs


def recompute_open_requests(engine: LLMEngine, *, cache_salt: str) -> None:
    """Discard the keys and values of every open request and of the prefix cache.

    The next step computes them again. ``reset_prefix_cache(reset_running_requests=True)`` is
    public: it preempts the running requests, which keep their tokens and their random generators.

    But vLLM can't change a request's salt: the recomputed blocks would be cached under that of the
    old weights. So the scheduler's record of the request gets the new salt here, and its blocks are
    hashed again. The conversation's next turn and the rest of the group then find them.
    """
    engine.reset_prefix_cache(reset_running_requests=True)
    for request in engine.engine_core.engine_core.scheduler.requests.values():
        replace_cache_salt(request, cache_salt)


def replace_cache_salt(request: EngineRequest, cache_salt: str) -> None:
    """Give a scheduler's request another salt, and block hashes that include it."""
    request.cache_salt = cache_salt
    request.block_hashes.clear()
    request.update_block_hashes()


def output_token_count(engine: LLMEngine, internal_id: str) -> int:
    """Return the number of tokens sampled so far for an open request.

    vLLM reports a request's progress in its outputs only, and a FINAL_ONLY request has none before
    it ends. The output processor counts the tokens in its detokenizer, even if it detokenizes
    nothing.

    Args:
        internal_id: id that ``LLMEngine.add_request`` returned.
    """
    return engine.output_processor.request_states[internal_id].detokenizer.num_output_tokens()


def occupancy(engine: LLMEngine) -> tuple[int, int, float]:
    """Return the numbers of requests that run and that wait, and the share of the cache in use.

    vLLM tells this in its log and its metrics server only; its scheduler has a method for each.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    running, waiting = scheduler.get_request_counts()
    return running, waiting, scheduler.get_kv_cache_usage()


def give_tokenizer(engine: LLMEngine, path: str) -> None:
    """Enable the engine to find stop texts. Called when a request has some.

    vLLM looks for them in its output processor, which has no tokenizer after
    ``skip_tokenizer_init``.
    """
    if engine.output_processor.tokenizer is None:
        from transformers import AutoTokenizer

        engine.output_processor.tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True
        )


def shut_down(engine: LLMEngine) -> None:
    """Free the engine's memory and end its workers.

    ``LLMEngine`` has no method for it; its core client has.
    """
    engine.engine_core.shutdown()


def leave_to_the_exit(engine: LLMEngine) -> None:
    """Keep vLLM from shutting the engine down when the process ends.

    Its core client does so by a ``weakref.finalize``: it collects all garbage, for up to a second,
    and frees memory that ends with the process anyway.
    """
    engine.engine_core._finalizer.atexit = False


# ---- weights: which tensors they are made of


@dataclass(kw_only=True, slots=True, frozen=True)
class HeldWeight:
    """One weight of a worker's model, and the published tensors that it is made of.

    The published tensors are stacked along the rows. With tensor parallelism the worker holds a
    share of each::

        qkv_proj.weight      q_proj.weight
                             k_proj.weight
                             v_proj.weight

    A model whose hub folder has such a weight as one tensor, as Phi-3's has ``qkv_proj``, publishes
    it as one. The worker then holds a share of each piece of that tensor (`shards_of_sources`).

    A layer's experts are two weights of three dimensions, made of three published stacks: in
    ``w13_weight`` each expert has its gate above its up, and ``w2_weight`` has the downs.

    On CPU vLLM packs the weight of a linear layer for its kernels and drops the weight itself.
    Experts are packed in their own place.
    """

    module: Layer
    name: str = "weight"
    """Name of the weight in its module."""
    parameter: torch.Tensor
    sources: tuple[str, ...]
    """Published names of the tensors that the weight is made of, from top to bottom."""
    packed: bool
    """True if the model computes with a packed copy of the weight."""

    @property
    def axis(self) -> int:
        """Dimension along which the sources lie below each other: the rows, of each expert."""
        return 1 if self.is_of_experts else 0

    @property
    def is_of_experts(self) -> bool:
        """True if the weight has a layer's experts."""
        return self.parameter.ndim == 3

    @property
    def plain(self) -> torch.Tensor | None:
        """The weight itself; None if vLLM keeps nothing but the packed copy."""
        weight = self.parameter.data
        if self.is_of_experts:
            return None if self.packed else weight
        return weight if weight.numel() else None


def held_weights(model: Layer, names: set[str]) -> Iterator[HeldWeight]:
    """Yield each weight of a worker's model that is made of published tensors.

    A tied head has the embedding's parameter and source, and may have a packed copy of its own.

    Args:
        names: published names of the version's tensors.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    stacked: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    sources_of_parameter: dict[int, tuple[str, ...]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RoutedExperts):
                sources = _sources_of_experts(module_name, module, name)
                packed = parameter.device.type == "cpu"
            else:
                sources = _sources(module_name, name, names, stacked)
                if not sources:  # a tied head
                    sources = sources_of_parameter.get(id(parameter), ())
                # vLLM packs an embedding like a head, but looks tokens up in the unpacked weight.
                is_linear = hasattr(module, "cpu_linear") and not _is_embedding(module)
                packed = name == "weight" and is_linear
            if sources:
                sources_of_parameter[id(parameter)] = sources
                yield HeldWeight(
                    module=module, name=name, parameter=parameter, sources=sources, packed=packed
                )


def _sources(
    module_name: str, weight_name: str, names: set[str], stacked: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the tensors that a weight is made of: one of its own name, or several; () for none.

    Args:
        names: published names.
        stacked: hub's modules that vLLM has as one, by the name of that one.
    """
    own = f"{module_name}.{weight_name}"
    if own in names:
        return (own,)
    parent, dot, leaf = module_name.rpartition(".")
    sources = tuple(f"{parent}{dot}{part}.{weight_name}" for part in stacked.get(leaf, ()))
    return sources if names.issuperset(sources) else ()


def _sources_of_experts(layer_name: str, layer: Layer, weight_name: str) -> tuple[str, ...]:
    """Return the stacks that a weight of experts is made of; () for others, such as scales."""
    projections = {
        "w13_weight": (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name),
        "w2_weight": (layer.ckpt_down_proj_name,),
    }.get(weight_name, ())
    parent, dot, _ = layer_name.rpartition(".")
    return tuple(f"{parent}{dot}*.{projection}.weight" for projection in projections)


def _is_embedding(module: Layer) -> bool:
    """Return whether tokens are looked up in a module, and no logits computed with it."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def parts_of_sources(held: HeldWeight, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of the weight, one for the part that comes from each source."""
    if held.is_of_experts or len(held.sources) == 1:
        return weight.chunk(len(held.sources), held.axis)
    return weight.split(list(held.module.output_partition_sizes))


def shards_of_sources(
    held: HeldWeight, weight: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """Yield the shards of published tensors that a worker's weight holds.

    A source that is fused in the hub has several shards, one for each piece: here a worker of two
    holds every second half of Phi-3's queries, keys and values::

        qkv_proj.weight   q0 q1 k0 k1 v0 v1       the first worker's weight   q0 k0 v0

    Args:
        weight: the weight itself, as the worker holds it.
        shapes: shapes of the whole published tensors, by name.

    Yields:
        Name of the source, region of the source, and the view of the weight that holds it.
    """
    for name, part in zip(held.sources, parts_of_sources(held, weight), strict=True):
        shape = shapes[name]
        if part.shape == shape:
            yield name, tuple(slice(0, size) for size in shape), part
            continue
        first = 0
        for rows, piece in _pieces_of_source(held, shape, part):
            whole_rows, *others = region(held, (rows, *shape[1:]), piece.shape)
            # A vocabulary is filled up: the rows behind its tokens belong to no source.
            filled = piece[: whole_rows.stop - whole_rows.start]
            yield name, (slice(first + whole_rows.start, first + whole_rows.stop), *others), filled
            first += rows


def _pieces_of_source(
    held: HeldWeight, shape: tuple[int, ...], part: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of rows of each piece of a source, and this worker's share of the piece.

    A source that is not fused in the hub is one piece.

    Args:
        shape: shape of the source.
        part: this worker's share of the source.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size

    sizes: Sequence[int] = getattr(held.module, "output_partition_sizes", ())
    if len(held.sources) > 1 or len(sizes) < 2:
        yield shape[0], part
        return
    workers = get_tensor_model_parallel_world_size()
    # If there are fewer key-value heads than workers, several workers hold the same head.
    replicas = getattr(held.module, "num_kv_head_replicas", 1)
    for index, piece in enumerate(part.split(list(sizes))):
        holders = workers if index == 0 else workers // replicas
        yield len(piece) * holders, piece


def region(held: HeldWeight, shape: tuple[int, ...], part: torch.Size) -> tuple[slice, ...]:
    """Return which region of a source this worker holds.

    Tensor parallelism divides rows or columns. If there are fewer key-value heads than workers,
    several workers hold the same head.

    Args:
        shape: shape of the source.
        part: shape of this worker's share of the source.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    if hasattr(held.module, "shard_indices"):  # a vocabulary, which is filled up and divided
        indices = held.module.shard_indices
        rows = slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
        return rows, *(slice(0, size) for size in shape[1:])
    rank = get_tensor_model_parallel_rank()
    workers = get_tensor_model_parallel_world_size()
    sides = []
    for size, part_size in zip(shape, part, strict=True):
        start = 0
        if part_size < size:
            parts = size // part_size
            start = part_size * (rank * parts // workers)
        sides.append(slice(start, start + min(part_size, size)))
    return tuple(sides)


# ---- weights: loading a version


def reload_weights(worker: Worker, tensors: VersionTensors) -> None:
    """Copy a version into the running model, in a worker process."""
    model = worker.get_model()
    names = set(tensors.shapes)
    weights = list(held_weights(model, names))
    if copying_suffices(model, weights, names):
        _copy_and_pack(weights, tensors)
    else:
        _reload_by_vllm(worker, weights, tensors)
    repack_tied_head(model)


def copying_suffices(model: Layer, weights: Sequence[HeldWeight], names: set[str]) -> bool:
    """Return whether a load has only to copy ``weights``, and to pack those that are packed.

    vLLM's own reload also prepares weights that are quantized, or from which others are computed.
    For that it takes every module apart and puts it together again, and copies each tensor twice.

    Args:
        names: published names of the tensors that are loaded.
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

    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    undivided = get_tensor_model_parallel_world_size() == 1
    every_tensor_has_a_place = {source for held in weights for source in held.sources} == names
    parameters = {id(parameter) for parameter in model.parameters()}
    every_parameter_is_known = parameters == {id(held.parameter) for held in weights}
    methods = {type(getattr(module, "quant_method", None)) for module in model.modules()}
    unquantized = methods <= {
        type(None),
        UnquantizedLinearMethod,
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
    }
    # Other attention has matrices that are computed from weights.
    plain_attention = all(
        type(module) is Attention
        for module in model.modules()
        if isinstance(module, AttentionLayerBase)
    )
    known_head = isinstance(getattr(model, "lm_head", None), ParallelLMHead)
    return (
        on_cpu
        and undivided
        and every_tensor_has_a_place
        and every_parameter_is_known
        and unquantized
        and plain_attention
        and known_head
    )


def _copy_and_pack(weights: Iterable[HeldWeight], tensors: VersionTensors) -> None:
    """Copy a version into each weight, and pack each module that is packed."""
    copied: set[int] = set()
    for module, of_module in groupby(weights, key=lambda held: held.module):
        # The weight of a tied head is the embedding's, which comes before it.
        to_copy = [held for held in of_module if id(held.parameter) not in copied]
        for held in to_copy:
            copied.add(id(held.parameter))
            _copy_sources(held, tensors)
        if any(held.is_of_experts for held in to_copy):
            pack_experts(module)
        elif to_copy and hasattr(module, "cpu_linear"):
            # An embedding is packed too, unless `packing_noted` is told that it is for nothing.
            module.quant_method.process_weights_after_loading(module)


def _copy_sources(held: HeldWeight, tensors: VersionTensors) -> None:
    """Copy a weight's sources to their places in it. A weight that vLLM dropped is made again."""
    axis = held.axis
    shapes = [tensors.shapes[name] for name in held.sources]
    rows = [shape[axis] for shape in shapes]
    weight = held.plain
    if weight is None:
        shape = (*shapes[0][:axis], sum(rows), *shapes[0][axis + 1 :])
        weight = torch.empty(shape, dtype=held.parameter.dtype)
        setattr(held.module, held.name, torch.nn.Parameter(weight, requires_grad=False))
    filled = weight.narrow(axis, 0, sum(rows))  # the rows after these pad a vocabulary
    for part, name in zip(filled.split(rows, axis), held.sources, strict=True):
        tensors.copy_to(name, part)


def _reload_by_vllm(worker: Worker, weights: Sequence[HeldWeight], tensors: VersionTensors) -> None:
    """Have vLLM load a version, and do what its reload leaves out.

    vLLM warns at each version that modules which own no weight, such as a tied head, "failed to
    load". The warning is silenced: digests of what is held say what failed.
    """
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    device = next(worker.get_model().parameters()).device
    worker.reload_weights(weights_iterator=_for_vllms_loader(weights, tensors, device))
    if device.type == "cuda":
        # From here on, the tensors' memory may be overwritten or unmapped.
        torch.cuda.synchronize(device)
        return
    experts = {id(held.module): held.module for held in weights if held.is_of_experts}
    for module in experts.values():
        pack_experts(module)


_SHARDS_OF_EXPERTS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}
"""vLLM's names of the sources of each weight of experts: gate and up, and down."""


def _for_vllms_loader(
    weights: Iterable[HeldWeight],
    tensors: VersionTensors | Mapping[str, torch.Tensor],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what vLLM's loader of the model takes, on ``device``, and load stacks of experts.

    The loader takes experts one by one, and each passes through vLLM's Python twice: 0.4 ms an
    expert, 8 s for the 18,432 of 30B-A3B. The function under it, which the weight itself has, takes
    a stack as well. If vLLM's own expert parallelism gives each worker some experts whole, that
    function takes one expert at a time, and they go through the loader by their hub names.

    On a GPU each tensor arrives whole, and its slices are taken there: torch packs a slice of CPU
    memory first.
    """
    stacks = {
        source: (held, shard)
        for held in weights
        if held.is_of_experts
        for source, shard in zip(held.sources, _SHARDS_OF_EXPERTS[held.name], strict=True)
    }
    for name, tensor in tensors.items():
        staged = tensor.to(device, non_blocking=True)
        if name not in stacks:
            yield name, staged
            continue
        held, shard = stacks[name]
        if held.module.use_ep:
            for number, expert in enumerate(staged):
                yield name.replace("*", str(number)), expert
            continue
        weight = getattr(held.module, held.name)  # a reload has put another in its place
        weight.weight_loader(
            param=weight,
            loaded_weight=staged,
            weight_name=held.name,
            shard_id=shard,
            expert_id=0,  # the first of the stack
        )


def pack_experts(module: Layer) -> None:
    """Pack the weights of a layer's experts for CPU, as a load left them.

    vLLM packs those of the first load only: after another one it would compute with rows in the
    wrong places.
    """
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def repack_tied_head(model: Layer) -> None:
    """Pack the head again after a reload, if it is tied to the embedding and on CPU.

    vLLM packs the head for CPU when the model is made, and a reload packs only modules that own a
    weight. A tied head owns none: it would go on with the old weights, and the policy would drift
    from the trainer without an error.
    """
    head = getattr(model, "lm_head", None)
    if head is None or not model.config.tie_word_embeddings:
        return
    if next(head.parameters()).device.type == "cpu":
        head.quant_method.process_weights_after_loading(head)


# ---- weights: packed copies


@contextmanager
def packing_noted(
    note: Callable[[Layer], object], *, unpacked: Iterable[Layer] = ()
) -> Iterator[None]:
    """Call ``note`` with each module that is about to be packed for CPU, and keep its result.

    `packed_from` returns the result. The note is stored on the owner of the packed copy: on the
    function ``cpu_linear``, which vLLM makes to compute with it, or on the packed parameters of
    experts. So an old copy keeps its old note.

    Args:
        note: returns a note of the module, or None for none.
        unpacked: modules that are not packed, and compute with the weight itself. For a vocabulary
            of 32,000 that saves a tenth of a reload, and the memory of a copy.
    """
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kernels: Any = cpu_moe.CPUUnquantizedExperts
    pack_linear = utils.dispatch_cpu_unquantized_gemm
    pack_kernel = kernels.process_weights_after_loading
    unpacked_ids = {id(module) for module in unpacked}

    def pack_linear_noted(layer: Layer, remove_weight: bool) -> None:
        if id(layer) in unpacked_ids:
            layer.cpu_linear = torch.nn.functional.linear
            return
        noted = note(layer)
        pack_linear(layer, remove_weight)
        if noted is not None:
            layer.cpu_linear.packed_from = noted

    def pack_kernel_noted(kernel: Any, layer: Layer) -> None:  # noqa: ANN401 - vLLM's kernel
        noted = note(layer)
        pack_kernel(kernel, layer)
        if noted is not None:
            layer.w13_weight.packed_from = noted
            layer.w2_weight.packed_from = noted

    utils.dispatch_cpu_unquantized_gemm = pack_linear_noted
    kernels.process_weights_after_loading = pack_kernel_noted
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack_linear
        kernels.process_weights_after_loading = pack_kernel


def packed_from(module: Layer, name: str = "weight") -> Any:  # noqa: ANN401 - what `note` returned
    """Return the note of the packed copy with which a module computes; None if there is none.

    Args:
        name: weight of the module that the copy is made of.
    """
    owner = module.cpu_linear if name == "weight" else getattr(module, name)
    return getattr(owner, "packed_from", None)


def packed_for_nothing(model: Layer) -> list[Layer]:
    """Return the embeddings that serve for look-up alone, which vLLM packs like a head.

    The list is empty if the model has no head of its own: its embedding may be the head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not isinstance(getattr(model, "lm_head", None), ParallelLMHead):
        return []
    return [module for module in model.modules() if _is_embedding(module)]


# ---- adapters


def adapters_in(names: Iterable[str]) -> dict[str, int]:
    """Return vLLM's number of each adapter in a version; none if the version is a whole model.

    Args:
        names: published names of the version's tensors: PEFT's, behind the adapter's name.
    """
    adapters = dict.fromkeys(
        name.rpartition("/")[0] for name in names if name.endswith(".lora_A.weight")
    )
    return {adapter: number for number, adapter in enumerate(adapters, 1)}


def lora_requests(names: Iterable[str]) -> dict[str, Any]:
    """Return vLLM's ``LoRARequest`` for each adapter of a version, by its name.

    Args:
        names: published names of the version's tensors.
    """
    from vllm.lora.request import LoRARequest

    # The path is never read: each worker has the adapter by its number before a request names it.
    return {
        adapter: LoRARequest(adapter or "policy", number, "in memory")
        for adapter, number in adapters_in(names).items()
    }


def set_adapters(worker: Worker, tensors: Mapping[str, torch.Tensor]) -> None:
    """Serve a version's adapters in place of those before, in a worker process.

    vLLM loads adapters from folders only. But its worker's manager accepts an adapter that was read
    already, and copies it to where the kernels read it. B includes the scale, so vLLM's is 1. Every
    version has the same adapters, so none of the version before is left.

    Args:
        tensors: tensors of the version in the host's memory, by published name.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    manager = _adapter_manager(worker)
    for adapter, number in adapters_in(tensors).items():
        prefix = f"{adapter}/" if adapter else ""
        matrices = {
            name.removeprefix(prefix): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        rank = next(
            len(matrix) for name, matrix in matrices.items() if name.endswith(".lora_A.weight")
        )
        config = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": []})
        model = LoRAModel.from_lora_tensors(
            number, matrices, config, device="cpu", dtype=manager.lora_config.lora_dtype
        )
        manager.remove_adapter(number)
        manager.add_adapter(model)
        manager.activate_adapter(number)
    for wrapper in manager.punica_wrapper_mapping.values():
        if isinstance(wrapper, PunicaWrapperCPU):
            vars(wrapper)["add_lora_linear"] = partial(_add_lora_linear, wrapper)


def _add_lora_linear(  # noqa: PLR0913 - vLLM's signature
    wrapper: PunicaWrapper,
    y: torch.Tensor,
    x: torch.Tensor,
    stacked_a: Sequence[torch.Tensor],
    stacked_b: Sequence[torch.Tensor],
    scale: float,
    sizes: Sequence[int],
    **options: object,
) -> None:
    """Add to ``y`` what each token's adapter makes of its row of ``x``, slice by slice.

    It replaces ``PunicaWrapperCPU.add_lora_linear``, which copies the adapter once for every token:
    at rank 64 that cuts the engine's sampling rate to a tenth. Here all tokens of an adapter take
    two matrix products a slice.

    Args:
        stacked_a: A of every slice, [slots, 1, rank, inputs].
        stacked_b: B of every slice, [slots, 1, outputs, rank].
        sizes: number of outputs of every slice.
        options: arguments that vLLM's function ignores as well.
    """
    if wrapper.no_lora:
        return
    slot_of_token = wrapper.token_lora_indices[: len(x)]
    slots = [0] if len(stacked_a[0]) == 1 else slot_of_token.unique().tolist()
    for slot in slots:
        if slot < 0:  # tokens of requests without an adapter
            continue
        rows: Any = slice(None)
        if len(slots) > 1:
            rows = (slot_of_token == slot).nonzero().squeeze(1)
        inputs = x[rows]
        start = 0
        for a, b, size in zip(stacked_a, stacked_b, sizes, strict=True):
            columns = slice(start, start + size)
            y[rows, columns] = torch.addmm(
                y[rows, columns], inputs @ a[slot, 0].T, b[slot, 0].T, alpha=scale
            )
            start += size


def held_adapters(
    worker: Worker, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each tensor of a version's adapters that a module of the worker computes with.

    Yields:
        Published name, what the module holds, and what it should hold: a view of the tensor in
        ``tensors``. It is the whole tensor, or a share of it if ranks share the module.
    """
    manager = _adapter_manager(worker)
    for adapter, number in adapters_in(tensors).items():
        slot = manager.lora_index_to_id.index(number)
        prefix = f"{adapter}/base_model.model" if adapter else "base_model.model"
        for module_name, module in manager.modules.items():
            sources = manager.packed_modules.get(module_name, [module_name])
            for matrix, stacked in (("A", module.lora_a_stacked), ("B", module.lora_b_stacked)):
                names = [f"{prefix}.{source}.lora_{matrix}.weight" for source in sources]
                wholes = [tensors.get(name) for name in names]
                shares = _shares_of_rank(module, matrix, wholes)
                for name, share, held in zip(names, shares, stacked, strict=True):
                    if share is not None:
                        rows, columns = share.shape
                        yield name, held[slot, 0, :rows, :columns], share


def _shares_of_rank(
    module: LoRALayer, matrix: str, wholes: list[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the share of each matrix that this rank's module computes with.

    Args:
        matrix: "A" or "B".
        wholes: matrix of each of the module's sources; None for one without an adapter.
    """
    if module.tp_size == 1:
        return wholes
    slice_of_rank = module.slice_lora_a if matrix == "A" else module.slice_lora_b
    if len(wholes) > 1:
        return slice_of_rank(wholes)
    return [None if whole is None else slice_of_rank(whole) for whole in wholes]


def _adapter_manager(worker: Worker) -> LoRAModelManager:
    """Return the worker's manager of adapters, which vLLM keeps private."""
    return worker.model_runner.lora_manager._adapter_manager


# ---- routes


def returns_routes(device: str) -> bool:
    """Return whether vLLM will take a model runner that has ``enable_return_routed_experts``."""
    from vllm import envs

    return device == "cuda" or bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def route_dtype(experts: int) -> str:
    """Return the dtype of routes, whose largest value names no expert.

    It differs from vLLM's for 256 experts, for which vLLM takes 8 bits.
    """
    return "uint8" if experts < 256 else "uint16"


class RecordedRoutes:
    """Experts that computed each token in a worker's key-value cache.

    They lie as the keys do: a prefix that is found in the cache has the experts it was computed
    with. A request that is preempted loses its places, but its tokens keep their first routes when
    they are computed again, because later log-probabilities were computed with those.

    vLLM returns routes from its V2 model runner only, which the CPU build does not have. But its
    routers tell a capturer each choice, and the context of a forward pass tells where each token's
    keys go. So this object takes the capturer's place, and is told of each step by
    ``execute_model`` of the model runner, which it wraps.
    """

    def __init__(self, worker: Worker):
        """Record what the worker's model chooses from now on."""
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_routes

        self._runner = worker.model_runner
        self._block_size: int = worker.cache_config.block_size
        layers, experts, chosen = vllm_routes._get_routed_experts_shape(worker.vllm_config)
        dtype = getattr(torch, route_dtype(experts))
        # One block more, for tokens of padding: their slot is -1, which is the last place.
        blocks = self._runner.kv_cache_config.num_blocks + 1
        shape = (blocks * self._block_size, layers, chosen)
        self._places = torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
        """Routes by place in the cache, [places, layers, k]."""
        self._kept: dict[str, torch.Tensor] = {}
        """Routes of the tokens that each request had when it was preempted."""
        capturer: Any = self  # vLLM's routers call its ``capture``, and nothing else of it
        vllm_routes.bind_routed_experts_capturer(self._runner.get_model(), capturer)
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._execute_model

    def capture(self, layer: int, ids: torch.Tensor) -> None:
        """Record the experts that a layer's router chose for the tokens of this forward pass.

        Args:
            ids: [tokens, k].
        """
        from vllm.forward_context import get_forward_context

        places_by_layer: Any = get_forward_context().slot_mapping
        places = next(iter(places_by_layer.values()))
        self._places[places[: len(ids)].long(), layer] = ids.to(self._places.dtype)

    def read(self, request_id: str, tokens: int) -> torch.Tensor:
        """Return the routes of a request's first tokens, [tokens, layers, k].

        The request may have ended in the last step.
        """
        block_ids = torch.tensor(self._runner.requests[request_id].block_ids[0])
        offsets = torch.arange(self._block_size)
        places = (block_ids[:, None] * self._block_size + offsets).flatten()
        kept = self._kept.get(request_id, self._places[:0])
        computed_since = self._places[places[len(kept) : tokens]]
        return torch.cat([kept, computed_since])[:tokens]

    def kept_tokens(self, request_id: str) -> int:
        """Return how many tokens of a request keep the routes of their first computation."""
        return len(self._kept.get(request_id, ()))

    def _execute_model(self, scheduled: SchedulerOutput, *others: object) -> ModelRunnerOutput:
        for request_id in scheduled.finished_req_ids:
            self._kept.pop(request_id, None)
        # Other requests may take the blocks of a preempted one in this step.
        for request_id in scheduled.preempted_req_ids or ():
            computed = self._runner.requests[request_id].num_tokens - 1
            self._kept[request_id] = self.read(request_id, computed)
        return self._execute(scheduled, *others)
