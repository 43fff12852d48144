"""The Engine protocol: what every engine and its config must have, and the scripted engine that the tests use."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.fakes.engine import (
    ScriptedEngine,
    ScriptedEngineConfig,
    counting_table,
    save_table,
    snapshot_of,
)
from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import check, plan_run
from torchtitan.experiments.rl.command.command_line import load_config, parse_command
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import ConfigError, PeerGone, RunError
from torchtitan.experiments.rl.generation import engine as engine_module
from torchtitan.experiments.rl.generation.engine import (
    Engine,
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    RequestFailed,
    ScoreRequest,
    WrongWeights,
)
from torchtitan.experiments.rl.generation.references import HostedModel
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngine, VLLMEngineConfig
from torchtitan.experiments.rl.generation.vllm.worker import (
    NOT_HELD,
    QUANTIZED,
    UNKNOWN,
    whole_digests,
)
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig

ENGINES = (VLLMEngine, ScriptedEngine)


# ---- the protocol


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_what_the_protocol_names(engine):
    names = [name for name in vars(Engine) if not name.startswith("_")]
    assert set(names) == {
        "version",
        "busy",
        "add",
        "step",
        "occupancy",
        "withdraw",
        "load",
        "sleep",
        "abort",
        "close",
    }
    for name in names:
        promised, given = getattr(Engine, name), getattr(engine, name)
        assert isinstance(given, property) == isinstance(promised, property)
        if not isinstance(promised, property):
            assert inspect.signature(given) == inspect.signature(promised), name


def test_a_config_that_builds_no_engine_can_not_be_made():
    with pytest.raises(TypeError, match="abstract.*build"):
        EngineConfig(max_model_len=256)


# ---- configs


def test_vllm_is_imported_by_its_engine_alone_and_only_when_one_is_built():
    library = Path(engine_module.__file__).parents[1]
    importers = set()
    for file in library.rglob("*.py"):
        tree = ast.parse(file.read_text())
        inside = {
            node
            for scope in ast.walk(tree)
            if isinstance(scope, ast.FunctionDef)
            for node in ast.walk(scope)
        }
        for node in ast.walk(tree):
            if any(name.partition(".")[0] == "vllm" for name in imported_names(node)):
                importers.add(str(file.relative_to(library)))
                assert node in inside, f"{file}, line {node.lineno}: import it inside a function"
    files = {"generation/vllm/engine.py", "generation/vllm/requests.py"}
    assert importers == {"compat/vllm.py", *files}


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def override(*words: str):
    return load_config(parse_command(["--config", "rl_opd_qwen3_debug", *words]))


def test_the_command_line_reaches_every_field_of_the_engine_a_config_names():
    given = dict(
        dtype="bfloat16",
        max_model_len="300",
        tensor_parallel_degree="2",
        max_num_seqs="8",
        gpu_memory_utilization="0.5",
        kv_cache_gib="4",
        cpu_kv_cache_gib="3",
    )
    expected = VLLMEngineConfig(
        dtype="bfloat16",
        max_model_len=300,
        tensor_parallel_degree=2,
        max_num_seqs=8,
        gpu_memory_utilization=0.5,
        kv_cache_gib=4,
        cpu_kv_cache_gib=3,
        cuda_graphs=False,
        enable_prefix_caching=False,
        sleep=True,
    )
    assert {field.name for field in fields(VLLMEngineConfig)} == {
        *given,
        "cuda_graphs",
        "enable_prefix_caching",
        "sleep",
        "args",
    }
    for path, get in (
        ("generator.engine", lambda config: config.generator.engine),
        (
            "tasks.sum-digits.algorithm.teacher.engine",
            lambda config: config.tasks["sum_digits"].algorithm.teacher.engine,
        ),
    ):
        words = [
            word
            for name, value in given.items()
            for word in (f"--{path}.{name.replace('_', '-')}", value)
        ]
        words += [
            f"--{path}.no-cuda-graphs",
            f"--{path}.no-enable-prefix-caching",
            f"--{path}.sleep",
        ]
        assert get(override(*words)) == expected


def scripted_run(**settings):
    config = config_registry.rl_grpo_qwen3_debug()
    config.generator.engine = ScriptedEngineConfig(max_model_len=256, **settings)
    return config


def test_checks_and_plan_read_no_more_of_an_engine_than_its_base():
    config = scripted_run(dtype="bfloat16")
    check(config)
    assert plan_run(config, device="cpu").generator_gib == 0
    config.tasks["sum_digits"].sampling.stop = ["END"]
    with pytest.raises(
        ConfigError, match="sampling.stop = .*END.*ScriptedEngineConfig does not look for texts"
    ):
        check(config)
    config.tasks["sum_digits"].sampling.stop = []
    config.tasks["sum_digits"].algorithm = (
        config_registry.rl_opd_qwen3_debug().tasks["sum_digits"].algorithm
    )
    config.tasks["sum_digits"].algorithm.teacher = HostedModel(
        path="t", engine=ScriptedEngineConfig()
    )
    check(config)


@pytest.mark.parametrize("field", ["max_model_len", "tensor_parallel_degree"])
def test_bounds_of_the_base_hold_for_every_engine(field):
    config = scripted_run()
    setattr(config.generator.engine, field, 0)
    with pytest.raises(ConfigError, match=f"generator.engine.{field} = 0: must be at least 1"):
        check(config)


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_vllm_takes_weights_and_cache_on_cpu_and_a_share_on_cuda(dtype, size):
    config = VLLMEngineConfig(dtype=dtype, cpu_kv_cache_gib=3, gpu_memory_utilization=0.6)
    assert config.process_memory(parameters=2**30, device="cpu") == size + 3
    assert config.process_memory(parameters=2**30, device="cuda") == 0.6
    assert config.torch_dtype.itemsize == size


# ---- the scripted engine


def engine_of(table: torch.Tensor, **settings) -> ScriptedEngine:
    return ScriptedEngine(ScriptedEngineConfig(**settings), table)


def request(
    request_id: int, *, last: int = 3, tokens: int = 5, seed: int = 0, stop=(), **sampling
) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=np.array([1, last], np.int32),
        sampling=SamplingConfig(max_tokens=tokens, **sampling),
        seed=seed,
        stop_token_ids=list(stop),
    )


def finish(engine: Engine) -> dict[int, GenerateResult]:
    results = {}
    while engine.busy:
        results |= {result.request_id: result for result in engine.step()}
    return results


def test_a_checkpoint_is_version_0_and_greedy_counts_up_to_the_stop_token(tmp_path):
    path = save_table(counting_table(0.5), tmp_path)
    engine = ScriptedEngineConfig().build(model_path=path, device="cpu")
    engine.add(request(1, temperature=0.0))
    engine.add(request(2, temperature=0.0, stop=[5]))
    results = finish(engine)
    long, stopped = results[1].completion, results[2].completion
    assert (long.token_ids.tolist(), long.finish_reason) == ([4, 5, 6, 7, 8], "length")
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([4, 5], "stop")
    assert long.policy_versions.tolist() == [0] * 5
    np.testing.assert_allclose(long.logprobs, np.log([0.5] * 5), rtol=1e-6)


def test_tokens_come_with_the_tables_probabilities_sharpened_by_temperature():
    # Two tokens: after 0 comes 1 with 0.8. At temperature 1/2 that is 0.64 / (0.64 + 0.04).
    table = counting_table(0.8, size=2)
    engine = engine_of(table, max_num_seqs=1000)
    for seed in range(1000):
        engine.add(request(seed, last=0, tokens=1, seed=seed, temperature=0.5))
    completions = [result.completion for result in finish(engine).values()]
    successors = np.mean([completion.token_ids[0] == 1 for completion in completions])
    expected = 0.64 / 0.68
    assert successors == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 1000))
    for completion in completions:
        probability = expected if completion.token_ids[0] == 1 else 1 - expected
        assert completion.logprobs[0] == pytest.approx(np.log(probability), rel=1e-5)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch():
    alone = engine_of(counting_table(0.2))
    alone.add(request(1, seed=7, tokens=20))
    among = engine_of(counting_table(0.2), max_num_seqs=2)
    for seed in range(10):
        among.add(request(seed, seed=seed, tokens=20))
    expected = finish(alone)[1].completion.token_ids.tolist()
    tokens = {seed: result.completion.token_ids.tolist() for seed, result in finish(among).items()}
    assert tokens[7] == expected and len({tuple(each) for each in tokens.values()}) == 10


def test_a_version_loaded_in_mid_completion_samples_the_rest_and_scores_what_comes():
    engine = engine_of(counting_table(0.5))
    engine.add(request(1, tokens=4, temperature=0.0))
    engine.step()
    engine.add(request(2, tokens=4, temperature=0.0))
    assert [withdrawn.request_id for withdrawn in engine.withdraw()] == [2]
    engine.load(snapshot_of(3, counting_table(0.9)), recompute=False)
    engine.add(ScoreRequest(request_id=-1, token_ids=np.array([4, 5, 5], np.int32)))
    results = finish(engine)
    completion = results[1].completion
    assert engine.version == 3 and completion.policy_versions.tolist() == [0, 3, 3, 3]
    np.testing.assert_allclose(completion.logprobs, np.log([0.5, 0.9, 0.9, 0.9]), rtol=1e-6)
    np.testing.assert_allclose(results[-1].logprobs, [0, np.log(0.9), np.log(0.1 / 15)], rtol=1e-5)


@pytest.mark.parametrize(
    "gone, kind", [(["", "the weights are gone"], PeerGone), (["", ""], WrongWeights)]
)
def test_a_vllm_engine_whose_load_breaks_can_go_on_only_if_nothing_has_changed(
    gone, kind, monkeypatch
):
    def collective_rpc(method, args):
        assert engine._early_results == ["ended"], "no step is in flight while weights change"
        if method == "map_snapshot":
            return gone
        assert method == "load_snapshot" and not any(gone)
        raise ValueError("no such tensor")

    engine = object.__new__(VLLMEngine)
    engine._engine = SimpleNamespace(collective_rpc=collective_rpc)
    engine._version = 4
    engine._asleep = False
    engine._early_results = []
    engine._take_results = list
    monkeypatch.setattr(compat, "finish_steps", lambda engine: ["ended"])
    with pytest.raises(
        RunError, match="gone|version 5 are not loaded: ValueError: no such tensor"
    ) as caught:
        engine.load(snapshot_of(5, counting_table(0.9)), recompute=False)
    assert type(caught.value) is kind and engine.version == 4


def test_shares_of_workers_add_up_and_copies_that_differ_equal_no_digest():
    whole, left, right = ((0, 4),), ((0, 2),), ((2, 4),)
    workers = [
        {
            "norm": [(whole, 7)],
            "rows": [(left, 2**63 - 1)],
            "tied": [(whole, 5), (whole, 5)],
            "stale": [(whole, 5), (whole, 6)],
        },
        {"norm": [(whole, 7)], "rows": [(right, 3)], "tied": [(whole, 5)], "stale": [(whole, 5)]},
    ]
    workers[0] |= {"gone": [], "packed": [(whole, 1), ((), UNKNOWN)], "fp8": [((), QUANTIZED)]}
    workers[1] |= {"gone": [], "packed": [(whole, 1)], "fp8": [((), QUANTIZED)]}
    assert whole_digests(workers) == {
        "norm": "0000000000000007",
        "rows": "8000000000000002",
        "tied": "0000000000000005",
        "stale": "0000000000000005 and 0000000000000006",
        "gone": NOT_HELD,
        "packed": f"0000000000000001 and {UNKNOWN}",
        "fp8": QUANTIZED,
    }


def test_aborted_requests_give_no_result_and_too_long_ones_are_refused():
    engine = engine_of(counting_table(0.5), max_model_len=10)
    assert engine.add(request(1)) is None and engine.add(request(2)) is None
    assert isinstance(engine.add(request(3, tokens=9)), RequestFailed)
    engine.abort([1, 3, 99])
    assert set(finish(engine)) == {2}
