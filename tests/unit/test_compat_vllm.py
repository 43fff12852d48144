"""vLLM 0.32 has what ``compat/vllm.py`` relies on; a test names what an upgrade takes away. No engine is started.

What takes a running engine is asserted in ``tests/integration/test_generator.py`` (the tied head) and
``tests/integration/test_weight_updates.py`` (withdrawn requests, keys and values computed again, salts).
"""

import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.generation.vllm.engine import LORA_RANKS
from torchtitan.experiments.rl.generation.vllm.worker import HeldWeights, whole_digests
from torchtitan.experiments.rl.weights.snapshot import Manifest, digest, named


@pytest.fixture(scope="module", autouse=True)
def quiet_vllm():
    """vLLM reads its environment when it is imported: here it logs nothing and sends no statistics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        compat.set_environment(device="cpu")
        yield


def source_of(thing) -> str:
    return inspect.getsource(thing)


def test_version_is_the_one_that_compat_is_written_for():
    from vllm import __version__

    assert __version__.startswith("0.32."), (
        f"compat/vllm.py holds for vLLM 0.32, installed is {__version__}: check every function"
    )


def test_environment_variables_are_read_by_vllm(monkeypatch):
    from vllm import EngineArgs, envs

    monkeypatch.setattr(os, "environ", {"VLLM_CPU_KVCACHE_SPACE": "3"})
    compat.set_environment(device="cpu")
    unknown = set(os.environ) - set(envs.environment_variables) - {"OMP_NUM_THREADS"}
    assert not unknown, f"vLLM no longer reads {unknown}"
    assert (
        "VLLM_CPU_KVCACHE_SPACE" not in os.environ
        and "kv_cache_memory_bytes" in EngineArgs.__dataclass_fields__
    )
    assert int(os.environ.pop("OMP_NUM_THREADS")) == torch.get_num_threads()
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    compat.set_environment(device="cpu", workers=2 * torch.get_num_threads())
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
    told = "import torch; print(torch._dynamo.config.disable)"
    ran = subprocess.run(
        [sys.executable, "-c", told], env=os.environ, capture_output=True, text=True
    )
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, None),
        (
            {"quantisation": "fp8"},
            ["quantisation", "vLLM has no such argument of its engine"],
        ),
    ],
)
def test_an_argument_that_vllm_does_not_have_is_named(monkeypatch, capsys, arguments, answer):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(arguments)))
    compat.answer_refused_argument()
    assert json.loads(capsys.readouterr().out) == answer


def test_every_system_library_that_the_cpu_build_links_is_looked_for_or_comes_with_python():
    """The dynamic loader itself says what it needs, and where it finds it."""
    needed = set()
    for extension in Path(find_spec("vllm").origin).parent.glob("_C*.so"):
        told = subprocess.run(["ldd", extension], capture_output=True, text=True, check=True).stdout
        needed |= {line.split()[0] for line in told.splitlines()}
    of_torch = {path.name for path in (Path(torch.__file__).parent / "lib").iterdir()}
    of_c = {"linux-vdso", "/lib64/ld-linux-x86-64", "libc", "libm", "libdl", "libpthread"}
    of_python = of_c | {"libstdc++", "libgcc_s"}  # numpy and torch can't be imported without them
    rest = {name for name in needed - of_torch if name.partition(".so")[0] not in of_python}
    assert rest == set(compat.CPU_LIBRARIES)


def test_a_library_that_can_not_be_loaded_is_named_with_its_package(monkeypatch):
    assert compat.library_lack() is None
    monkeypatch.setattr(compat, "CPU_LIBRARIES", {"libm.so.6": "libc6", "libgone.so.1": "libgone1"})
    assert compat.library_lack() == (
        "its CPU build can't load a library of the system (libgone.so.1: cannot open shared object file: No such file or "
        "directory): install it (Debian and Ubuntu: apt-get install libgone1)"
    )


@pytest.mark.parametrize("build, lacks", [("0.32.0", False), ("0.32.0+cpu", True)])
def test_only_the_cpu_build_needs_these_libraries(monkeypatch, build, lacks):
    monkeypatch.setattr(compat, "version", {"vllm": build}.__getitem__)
    monkeypatch.setattr(compat, "CPU_LIBRARIES", {"libgone.so.1": "libgone1"})
    assert (compat.library_lack() is not None) == lacks


def test_the_core_client_shuts_its_engine_down_by_a_finalizer():
    from vllm.v1.engine.core_client import InprocClient

    assert "self._finalizer = weakref.finalize(self, self.engine_core.shutdown)" in source_of(
        InprocClient
    ), "leave_to_the_exit has to find what shuts the engine down when the process ends"


def test_scheduler_counts_requests_and_the_cache_in_use():
    from vllm.v1.core.sched.scheduler import Scheduler

    engine = SimpleNamespace(
        engine_core=SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=object.__new__(Scheduler))
        )
    )
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting = ["a", "b"], ["c"], []
    scheduler.kv_cache_manager = SimpleNamespace(usage=0.5)
    assert compat.occupancy(engine) == (2, 1, 0.5), (
        "Scheduler.get_request_counts, get_kv_cache_usage"
    )


def test_output_processor_keeps_a_counting_detokenizer_for_each_open_request():
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert "self.output_processor = " in source_of(LLMEngine.__init__), "LLMEngine.output_processor"
    assert "self.request_states[request_id] = " in source_of(OutputProcessor.add_request), (
        "OutputProcessor.request_states"
    )
    assert "self.detokenizer = " in source_of(RequestState.__init__), "RequestState.detokenizer"
    assert "tokenizer=self.tokenizer" in source_of(OutputProcessor.add_request), (
        "OutputProcessor.tokenizer"
    )
    # Without a tokenizer there is nothing to detokenize, and the tokens are counted all the same.
    counter = IncrementalDetokenizer.from_new_request(
        None, SimpleNamespace(sampling_params=object())
    )
    engine = SimpleNamespace(
        output_processor=SimpleNamespace(
            request_states={"0-a": SimpleNamespace(detokenizer=counter)}
        ),
    )
    assert compat.output_token_count(engine, "0-a") == 0
    counter.update([5, 6], False)
    assert compat.output_token_count(engine, "0-a") == 2


def test_add_request_returns_the_id_under_which_the_state_is_kept():
    from vllm.v1.engine.llm_engine import LLMEngine

    assert inspect.signature(LLMEngine.add_request).return_annotation is str
    assert "internal" in inspect.signature(LLMEngine.abort_request).parameters, (
        "abort_request takes our own ids by default"
    )


def test_scheduler_is_reached_from_the_engine_in_this_process():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "reset_running_requests" in inspect.signature(LLMEngine.reset_prefix_cache).parameters
    assert "self.engine_core = " in source_of(LLMEngine.__init__), "LLMEngine.engine_core"
    assert "self.engine_core = EngineCore(" in source_of(InprocClient.__init__), (
        "InprocClient.engine_core"
    )
    assert re.search(r"self\.scheduler\b.*= ", source_of(EngineCore.__init__)), (
        "EngineCore.scheduler"
    )
    assert "self.requests: dict[str, Request]" in source_of(Scheduler.__init__), (
        "Scheduler.requests"
    )
    assert "engine_core.shutdown" in source_of(InprocClient.shutdown), "InprocClient.shutdown"


def test_steps_in_flight_end_while_the_scheduler_is_paused_and_none_follows():
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.llm_engine import LLMEngine

    scheduler = SimpleNamespace(pause_state=PauseState.UNPAUSED)
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    core = object.__new__(EngineCore)
    core.scheduler = scheduler
    core.model_executor = SimpleNamespace(
        collective_rpc=lambda method: method == "synchronize_device" or pytest.fail(method),
        is_sleeping=False,
    )
    core.batch_queue = deque(["second", "first"])
    client = object.__new__(InprocClient)
    client.engine_core = core
    engine = object.__new__(LLMEngine)
    engine.engine_core = client
    engine.logger_manager = None

    def step() -> list[str]:
        assert scheduler.pause_state is PauseState.PAUSED_ALL, "a step would begin another"
        return [core.batch_queue.pop()]

    engine.step = step
    assert compat.finish_steps(engine) == ["first", "second"]
    assert scheduler.pause_state is PauseState.UNPAUSED
    core.batch_queue = None  # without asynchronous scheduling
    assert compat.finish_steps(engine) == []


def test_a_request_with_a_new_salt_has_the_block_hashes_of_one_that_always_had_it():
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)

    def request(salt: str, prompt: list[int]) -> Request:
        hasher = get_request_block_hasher(4, sha256)
        return Request(
            "r", prompt, SamplingParams(max_tokens=20), None, cache_salt=salt, block_hasher=hasher
        )

    changed = request("1", [1, 2, 3, 4, 5, 6])
    changed.append_output_token_ids([7, 8, 9])
    old = list(changed.block_hashes)
    compat.replace_cache_salt(changed, "2")
    expected = request("2", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(old) == 2 and changed.block_hashes == expected.block_hashes != old
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=SimpleNamespace(requests={"r": changed}))
        ),
        reset_prefix_cache=lambda *, reset_running_requests: None,
    )
    compat.recompute_open_requests(engine, cache_salt="1")
    assert changed.block_hashes == old


def test_worker_reloads_weights_and_gives_its_model():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    assert "weights_iterator" in inspect.signature(GPUModelRunner.reload_weights).parameters
    assert callable(Worker.reload_weights) and callable(WorkerBase.get_model)


def test_only_a_tied_head_on_cpu_is_packed_again():
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    assert (
        "layer"
        in inspect.signature(UnquantizedEmbeddingMethod.process_weights_after_loading).parameters
    )
    packed = []

    def model(*, tied: bool, device: str = "cpu") -> torch.nn.Module:
        made = torch.nn.Module()
        made.lm_head = torch.nn.Linear(2, 2, device=device)
        made.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)
        made.config = SimpleNamespace(tie_word_embeddings=tied)
        return made

    compat.repack_tied_head(model(tied=False))
    compat.repack_tied_head(model(tied=True, device="meta"))
    assert packed == []
    tied = model(tied=True)
    compat.repack_tied_head(tied)
    assert packed == [tied.lm_head]


def test_parameters_that_skip_their_clone_are_copied_shallowly():
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3, seed=1, stop_token_ids=[1, 2], skip_clone=True)
    clone = params.clone()
    assert clone is not params and clone == params and clone.stop_token_ids is params.stop_token_ids


def test_weights_are_copied_only_where_a_load_takes_nothing_else(monkeypatch):
    import vllm.distributed
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    def made(kind: type) -> torch.nn.Module:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        return module

    def model() -> torch.nn.Module:
        whole = torch.nn.Module()
        whole.norm, whole.attention = torch.nn.LayerNorm(4, bias=False), made(Attention)
        whole.lm_head = made(ParallelLMHead)
        whole.lm_head.weight = torch.nn.Parameter(torch.zeros(6, 4))
        whole.lm_head.quant_method = UnquantizedEmbeddingMethod()
        return whole

    def weights(of: torch.nn.Module) -> list[compat.HeldWeight]:
        return [
            compat.HeldWeight(
                module=of.norm, parameter=of.norm.weight, sources=("norm.weight",), packed=False
            ),
            compat.HeldWeight(
                module=of.lm_head,
                parameter=of.lm_head.weight,
                sources=("lm_head.weight",),
                packed=True,
            ),
        ]

    names, world = {"norm.weight", "lm_head.weight"}, 1
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: world)
    plain = model()
    assert compat.copying_suffices(plain, weights(plain), names)
    assert not compat.copying_suffices(plain, weights(plain), names | {"more.weight"}), (
        "a tensor that nothing is made of"
    )
    assert not compat.copying_suffices(plain, weights(plain)[:1], names), (
        "a parameter of unknown origin"
    )
    quantized, derived, other_head = model(), model(), model()
    quantized.norm.quant_method = SimpleNamespace()
    derived.attention = made(MLAAttention)  # has matrices of its own that are computed from weights
    other_head.lm_head.__class__ = torch.nn.Embedding
    for changed in (quantized, derived, other_head, model().to("meta")):
        assert not compat.copying_suffices(changed, weights(changed), names)
    world = 2
    assert not compat.copying_suffices(plain, weights(plain), names), "shares of tensors"


# ---- where a model holds a checkpoint's tensors


def test_linear_modules_are_packed_by_the_function_that_is_replaced(monkeypatch):
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    assert list(inspect.signature(utils.dispatch_cpu_unquantized_gemm).parameters) == [
        "layer",
        "remove_weight",
    ]
    for method in (
        linear.UnquantizedLinearMethod,
        vocab_parallel_embedding.UnquantizedEmbeddingMethod,
    ):
        source = inspect.getsource(method.process_weights_after_loading)
        assert (
            "from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm" in source
        ), "packed in another way"


def test_models_say_which_tensors_lie_below_each_other():
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    for model in (LlamaForCausalLM, Qwen3ForCausalLM):
        assert model.packed_modules_mapping["qkv_proj"] == ["q_proj", "k_proj", "v_proj"]
        assert model.packed_modules_mapping["gate_up_proj"] == ["gate_proj", "up_proj"]


def test_a_packed_copy_has_the_note_of_what_it_was_made_of():
    from vllm.model_executor.layers import utils

    layer, pack = torch.nn.Linear(4, 4, bias=False), utils.dispatch_cpu_unquantized_gemm
    seen = []

    def note(module: torch.nn.Module) -> str:
        seen.append(module.weight.numel())
        return f"note {len(seen)}"

    with compat.packing_noted(note):
        pack_noted = utils.dispatch_cpu_unquantized_gemm
        pack_noted(layer, remove_weight=False)
        first = layer.cpu_linear
        assert compat.packed_from(layer) == "note 1"
        pack_noted(layer, remove_weight=True)
        assert compat.packed_from(layer) == "note 2" and layer.weight.numel() == 0
    layer.cpu_linear = first
    assert compat.packed_from(layer) == "note 1", "an old copy has its old note"
    assert seen == [16, 16] and utils.dispatch_cpu_unquantized_gemm is pack
    other = torch.nn.Linear(4, 4, bias=False)
    pack(other, remove_weight=False)
    assert compat.packed_from(other) is None


def test_a_module_that_is_not_to_be_packed_computes_with_its_weight():
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(4, 3, bias=False)
    pack = utils.dispatch_cpu_unquantized_gemm
    pack(layer, remove_weight=False)
    with compat.packing_noted(lambda module: "note", unpacked=[layer]):
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    x = torch.randn(2, 4)
    with torch.no_grad():
        layer.weight.add_(1.0)  # no copy of what it was
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)
    assert compat.packed_from(layer) is None


def test_only_an_embedding_beside_a_head_of_its_own_is_packed_for_nothing():
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    def made(kind: type) -> torch.nn.Module:
        module = kind.__new__(kind)
        torch.nn.Module.__init__(module)
        return module

    model, embedding = torch.nn.Module(), made(VocabParallelEmbedding)
    model.embed_tokens = embedding
    assert compat.packed_for_nothing(model) == [], "it may be the head"
    model.lm_head = embedding
    assert compat.packed_for_nothing(model) == []
    model.lm_head = made(ParallelLMHead)
    assert compat.packed_for_nothing(model) == [embedding]
    for kind in (LlamaForCausalLM, Qwen3ForCausalLM):
        assert "self.logits_processor(self.lm_head, " in source_of(kind.compute_logits), (
            "logits are computed in another way"
        )


def held(
    rows: list[int], sources: int = 3, ndim: int = 2, name: str = "weight", **attributes
) -> compat.HeldWeight:
    """Make a weight of a linear module, or with three dimensions of a layer's experts."""
    return compat.HeldWeight(
        module=SimpleNamespace(output_partition_sizes=rows, **attributes),
        name=name,
        parameter=torch.empty([0] * ndim),
        sources=tuple(f"source_{i}" for i in range(sources)),
        packed=False,
    )


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Manifest(
        version=1, shapes=shapes, dtype=torch.float32, parts=(), publication="", digests={}
    )


@pytest.fixture
def rank(monkeypatch):
    """``rank(1, 2)``: this process is the second of two workers."""
    import vllm.distributed

    def set_rank(rank: int, world: int) -> None:
        monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: world)

    return set_rank


def test_a_worker_alone_holds_whole_tensors(rank):
    rank(0, 1)
    qkv, weight = held([8, 4, 4]), torch.arange(160.0).view(16, 10)
    query, key, value = compat.parts_of_sources(qkv, weight)
    assert (
        torch.equal(query, weight[:8])
        and torch.equal(key, weight[8:12])
        and torch.equal(value, weight[12:])
    )
    (own,) = compat.parts_of_sources(held([16], 1), weight)
    assert torch.equal(own, weight)
    assert compat.region(qkv, (4, 10), torch.Size((4, 10))) == (slice(0, 4), slice(0, 10))
    assert compat.region(qkv, (4,), torch.Size((4,))) == (slice(0, 4),)


def test_workers_divide_rows_or_columns_and_copy_few_heads(rank):
    rank(3, 4)
    assert compat.region(held([2, 1, 1]), (8, 10), torch.Size((2, 10))) == (
        slice(6, 8),
        slice(0, 10),
    )  # rows
    assert compat.region(held([8], 1), (8, 12), torch.Size((8, 3))) == (
        slice(0, 8),
        slice(9, 12),
    )  # columns
    # Two key-value heads of 2 rows over four workers: the last two have the second.
    assert compat.region(held([2, 2, 2]), (4, 10), torch.Size((2, 10))) == (
        slice(2, 4),
        slice(0, 10),
    )


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    "kind, pieces",
    [("gate_up_proj", {"gate": 24, "up": 24}), ("qkv_proj", {"q": 32, "k": 8, "v": 8})],
)
def test_a_tensor_that_is_fused_in_the_hub_is_read_where_vllms_own_loader_puts_its_pieces(
    kind, pieces, workers, monkeypatch
):
    """Phi-3's and GLM-4's matrices, by vLLM's own layers. Of two key-value heads, four workers hold each twice."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    tensors = {f"{kind}.weight": torch.randn(48, 5), f"{kind}.bias": torch.randn(48)}
    digests = named((name, int(digest(tensor))) for name, tensor in tensors.items())
    together = torch.zeros(48, 5)
    reports = []
    for rank in range(workers):
        group = SimpleNamespace(rank_in_group=rank, world_size=workers)
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda group=group: group)
        if kind == "qkv_proj":
            layer = QKVParallelLinear(5, 4, 8, 2)
        else:
            layer = MergedColumnParallelLinear(5, list(pieces.values()))
        model = torch.nn.Module()
        model.add_module(kind, layer)
        for name, parameter in layer.named_parameters():
            parameter.weight_loader(parameter, tensors[f"{kind}.{name}"])
        manifest = manifest_of(tensors)
        reports.append(HeldWeights(model, manifest).read())
        weights = compat.held_weights(model, set(tensors))
        (matrix,) = (weight for weight in weights if weight.name == "weight")
        for _, region, shard in compat.shards_of_sources(matrix, layer.weight, manifest.shapes):
            together[region] = shard.detach()
    assert torch.equal(together, tensors[f"{kind}.weight"])
    assert whole_digests(reports) == digests
    with torch.no_grad():
        layer.weight[-1, -1] += 1
    reports[-1] = HeldWeights(model, manifest).read()
    assert whole_digests(reports)[f"{kind}.weight"] != digests[f"{kind}.weight"]


def test_workers_divide_every_expert_of_a_stack(rank):
    rank(1, 2)
    weight = torch.arange(3.0 * 8 * 5).view(3, 8, 5)
    gate, up = compat.parts_of_sources(
        held([], 2, ndim=3), weight
    )  # of 8 rows each, in the checkpoint
    assert torch.equal(gate, weight[:, :4]) and torch.equal(up, weight[:, 4:])
    all_experts = slice(0, 3)
    rows = all_experts, slice(4, 8), slice(0, 5)
    assert compat.region(held([], 2, ndim=3), (3, 8, 5), gate.shape) == rows
    columns = all_experts, slice(0, 5), slice(4, 8)
    assert compat.region(held([], 1, ndim=3), (3, 5, 8), torch.Size((3, 5, 4))) == columns


def test_a_vocabulary_that_is_filled_up_is_read_where_it_has_tokens(rank):
    rank(1, 2)
    indices = SimpleNamespace(org_vocab_start_index=64, org_vocab_end_index=96)
    embedding = held([64], 1, shard_indices=indices)
    assert compat.region(embedding, (96, 8), torch.Size((64, 8))) == (slice(64, 96), slice(0, 8))


@pytest.mark.parametrize("worker", [0, 1])
def test_vllms_loader_of_a_weight_of_experts_takes_a_stack_and_no_more_of_it_than_the_workers_share(
    worker,
):
    """Two of vLLM's workers, by its own functions: gate and up are divided by rows, down by columns."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    experts, rows, columns = 3, 4, 6
    stacks = {name: torch.randn(experts, rows, columns) for name in ("gate", "up")}
    stacks["down"] = torch.randn(experts, columns, rows)
    module = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(module)
    module.quant_config = module.quant_method = module._fused_shared_expert_quantizer = None
    module.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)
    module.moe_config = SimpleNamespace(
        tp_rank=worker,
        tp_shard_with_padding=False,
        is_act_and_mul=True,
        moe_parallel_config=SimpleNamespace(tp_size=2, use_ep=False),
    )
    for name, shape in {
        "w13_weight": (experts, rows, columns),
        "w2_weight": (experts, columns, rows // 2),
    }.items():
        weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        weight.weight_loader = module.weight_loader
        module.register_parameter(name, weight)

    def weight_of(name: str, *sources: str) -> compat.HeldWeight:
        return compat.HeldWeight(
            module=module, name=name, parameter=getattr(module, name), sources=sources, packed=False
        )

    weights = [weight_of("w13_weight", "gate", "up"), weight_of("w2_weight", "down")]
    tensors = {"norm": torch.ones(2), **stacks}
    others = compat._for_vllms_loader(weights, tensors, torch.device("cpu"))
    assert [name for name, _ in others] == ["norm"], (
        "vLLM's loader of the model gets all but the stacks"
    )
    own = slice(2 * worker, 2 * worker + 2)
    assert torch.equal(module.w13_weight[:, :2], stacks["gate"][:, own])
    assert torch.equal(module.w13_weight[:, 2:], stacks["up"][:, own])
    assert torch.equal(module.w2_weight, stacks["down"][:, :, own])
    truncated = compat._for_vllms_loader(weights, {"down": stacks["down"][:2]}, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="must match the size"):
        list(truncated)
    module.moe_config.moe_parallel_config.use_ep = True
    stack = {"experts.*.down_proj.weight": stacks["down"]}
    one_by_one = compat._for_vllms_loader(
        [weight_of("w2_weight", *stack)], stack, torch.device("cpu")
    )
    names = [f"experts.{expert}.down_proj.weight" for expert in range(experts)]
    assert [name for name, _ in one_by_one] == names, "of which vLLM gives each worker its own"


def test_a_layers_experts_are_made_of_three_stacks_and_their_scales_of_nothing():
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = (
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(torch.zeros(3, 4, 2)) for _ in range(2))
    layer.w13_weight_scale = torch.nn.Parameter(torch.zeros(3))  # of one that is quantized
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.routed_experts = layer
    found = {weight.name: weight.sources for weight in compat.held_weights(model, set())}
    assert found == {
        "w13_weight": ("experts.*.gate_proj.weight", "experts.*.up_proj.weight"),
        "w2_weight": ("experts.*.down_proj.weight",),
    }


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_nothing_that_the_engine_asks_for_keeps_gpus_from_the_v2_model_runner(backend, monkeypatch):
    from vllm.config import vllm as configs

    monkeypatch.setattr(configs, "HAS_TRITON", True)
    monkeypatch.setattr(configs.envs, "VLLM_USE_V2_MODEL_RUNNER", None, raising=False)
    config = object.__new__(configs.VllmConfig)
    config.attention_config = SimpleNamespace(hisparse_config=None)
    config.speculative_config = None
    config.parallel_config = SimpleNamespace(
        distributed_executor_backend=backend, pipeline_parallel_size=1, use_ubatching=False
    )
    assert configs.VllmConfig.use_v2_model_runner.__get__(config) is True


def test_the_v2_runner_is_reloaded_and_put_to_sleep_by_the_calls_that_the_v1_runner_has():
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu_worker import Worker

    parameters = inspect.signature(GPUModelRunner.reload_weights).parameters
    assert "weights_iterator" in parameters and parameters["is_checkpoint_format"].default is True
    from vllm.model_executor.model_loader.reload import inplace

    assert "initialize_layerwise_reload(model)" in source_of(inplace.reload_weights), (
        "storage stays, and CUDA graphs with it"
    )
    assert "self.model_runner.reload_weights" in source_of(Worker.reload_weights)
    assert "return self.model_runner.get_model()" in source_of(Worker.get_model), (
        "compat's worker.get_model()"
    )
    # vllm/engine.py sleeps at level 2: buffers come back, parameters with the next version, and no prefix stays cached.
    assert "model.named_buffers()" in source_of(
        Worker.sleep
    ) and "_sleep_saved_buffers" in source_of(Worker.wake_up)
    assert "clear_prefix_cache = level >= 1" in source_of(EngineCore.sleep)
    # A request comes back from preemption as a new one, with its tokens; its noise depends on seed and position alone.
    assert "new_req_data.prefill_token_ids" in source_of(GPUModelRunner.add_requests)
    states = source_of(SamplingStates.__init__)
    assert "self.seeds = UvaBackedTensor(max_num_reqs, dtype=torch.int64)" in states, (
        "seeds of 63 bits fit"
    )


def test_routers_tell_their_choices_and_the_runner_where_each_tokens_keys_go():
    from vllm import EngineArgs, SamplingParams
    from vllm.forward_context import ForwardContext
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.outputs import CompletionOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # RecordedRoutes stands in for vLLM's capturer, and reads the runner's own record of a request.
    bind = source_of(routed_experts_capturer.bind_routed_experts_capturer)
    assert (
        "partial(capturer.capture, module.layer_id)" in bind
        and "module.router.set_capture_fn(capture_fn)" in bind
    )
    assert "self.capture_fn(topk_ids)" in source_of(BaseRouter._select_experts)
    assert "return num_layers, num_experts, num_experts_per_tok" in source_of(
        routed_experts_capturer._get_routed_experts_shape
    )
    assert (
        "slot_mapping" in ForwardContext.__annotations__
        and "slot_mapping=slot_mappings" in source_of(GPUModelRunner)
    )
    assert {"block_ids", "output_token_ids"} <= CachedRequestState.__annotations__.keys()
    schedule = source_of(Scheduler.schedule)
    assert (
        "preempted_req_ids=self.reset_preempted_req_ids" in schedule
        and "finished_req_ids=self.finished_req_ids" in schedule
    )
    # What the V2 runner returns.
    assert "enable_return_routed_experts" in EngineArgs.__dataclass_fields__
    assert "routed_experts" in CompletionOutput.__annotations__
    assert "routed_experts_prompt_start" in SamplingParams.__struct_fields__


# ---- adapters


def test_ranks_of_adapters_are_those_that_vllm_has_room_for():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


def test_a_matrix_without_an_adapter_is_left_out_where_ranks_share_the_module():
    """An adapter of attention alone, on an engine of two processes, is such a case."""

    def matrix(inputs: int, outputs: int) -> torch.Tensor:
        return torch.arange(float(inputs * outputs)).view(outputs, inputs)

    def shared_by_rows() -> SimpleNamespace:
        return SimpleNamespace(
            tp_size=2,
            slice_lora_a=lambda a: a[:, 2:4],
            slice_lora_b=lambda b: b,
            lora_a_stacked=(torch.zeros(1, 1, 8, 2),),
            lora_b_stacked=(torch.zeros(1, 1, 3, 8),),
        )

    manager = SimpleNamespace(
        lora_index_to_id=[1],
        packed_modules={},
        modules={"o_proj": shared_by_rows(), "down_proj": shared_by_rows()},
    )
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    )
    a, b = (f"base_model.model.o_proj.lora_{part}.weight" for part in "AB")
    tensors = {a: matrix(4, 2), b: matrix(2, 3)}
    found = {name: share for name, _, share in compat.held_adapters(worker, tensors)}
    assert found.keys() == {a, b}
    assert found[a].tolist() == [[2, 3], [6, 7]] and found[b].tolist() == tensors[b].tolist()


def test_each_token_gets_what_its_own_adapter_adds_slice_by_slice():
    """Tokens of two adapters and of none in one batch: against each token's own product."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    sizes = (3, 2)
    x, y = draw(6, 4), draw(6, sum(sizes))
    stacked_a = [draw(2, 1, 2, 4) for _ in sizes]
    stacked_b = [draw(2, 1, size, 2) for size in sizes]
    slots = [0, 1, -1, 0, 1, 1]
    expected = y.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            delta = [
                b[slot, 0] @ a[slot, 0] @ x[token]
                for a, b in zip(stacked_a, stacked_b, strict=True)
            ]
            expected[token] += 0.5 * torch.cat(delta)
    # vLLM's list of slots is longer than a step that is smaller than those before it.
    wrapper = SimpleNamespace(no_lora=False, token_lora_indices=torch.tensor([*slots, 0, 1]))
    untouched = y.clone()
    compat._add_lora_linear(
        SimpleNamespace(no_lora=True), untouched, x, stacked_a, stacked_b, 0.5, sizes
    )
    assert torch.equal(untouched, y)
    compat._add_lora_linear(wrapper, y, x, stacked_a, stacked_b, 0.5, sizes)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_a_module_of_several_matrices_is_shared_matrix_by_matrix():
    """Queries, keys and values in one module of two ranks, the keys without an adapter."""
    module = SimpleNamespace(
        tp_size=2,
        slice_lora_a=lambda wholes: wholes,
        slice_lora_b=lambda wholes: [None if whole is None else whole[2:] for whole in wholes],
        lora_a_stacked=tuple(torch.zeros(1, 1, 2, 4) for _ in "qkv"),
        lora_b_stacked=tuple(torch.zeros(1, 1, 4, 2) for _ in "qkv"),
    )
    sources = [f"{part}_proj" for part in "qkv"]
    manager = SimpleNamespace(
        lora_index_to_id=[1], packed_modules={"qkv_proj": sources}, modules={"qkv_proj": module}
    )
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    )
    tensors = {
        f"base_model.model.{part}_proj.lora_{matrix}.weight": torch.full(shape, float(index))
        for index, part in enumerate("qv")
        for matrix, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    found = {
        name: (held.shape, share) for name, held, share in compat.held_adapters(worker, tensors)
    }
    assert found.keys() == tensors.keys()
    for name, (shape, share) in found.items():
        whole = tensors[name]
        assert shape == share.shape and torch.equal(
            share, whole[2:] if ".lora_B." in name else whole
        )
