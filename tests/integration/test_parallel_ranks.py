"""Tensor-parallel and expert-parallel ranks, alone and beside sharded ones: every number is that of one rank. Four processes do
all of it."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learners import (
    LAYOUTS,
    REFERENCE_LAYOUT,
    TOKENS,
    assert_same,
    assert_same_after_adam,
    assert_same_step,
    compute_in_float64,
    fused_config,
    learner_of,
    loss_and_gradient,
    one_step,
    parameters,
    routed_samples,
    snapshot,
    snapshot_of_two_hosts,
    tree_samples,
)
from tests.integration.models import MODEL, MOE_MODEL, llama_folder
from tests.integration.ranks import process_groups, run_ranks
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.config import Parallelism
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.types import DataParallel
from torchtitan.experiments.rl.weights.snapshot import stack_name

LR = 1e-4
"""Adam's first step is about this for every weight, also for one whose gradient is rounding."""
MESHES = {
    "tensor 2": Parallelism(tensor_parallel_degree=2),
    "tensor 2, shards 2": Parallelism(tensor_parallel_degree=2, data_parallel_shard_degree=2),
    "copies 2, shards 2": Parallelism(data_parallel_replicate_degree=2),
    "context 2": Parallelism(context_parallel_degree=2),
    "context 2, shards 2": Parallelism(context_parallel_degree=2),
    "mixture, shards 2": Parallelism(),
    "mixture, experts 2": Parallelism(expert_parallel_degree=2),
    "mixture, experts 2, shards 4": Parallelism(expert_parallel_degree=2),
    "mixture, experts 4, tensor 2": Parallelism(expert_parallel_degree=4, tensor_parallel_degree=2),
}
RANKS = {
    "tensor 2": 2,
    "tensor 2, shards 2": 4,
    "copies 2, shards 2": 4,
    "context 2": 2,
    "context 2, shards 2": 4,
    "mixture, shards 2": 2,
    "mixture, experts 2": 2,
    "mixture, experts 2, shards 4": 4,
    "mixture, experts 4, tensor 2": 4,
}
SLOW = {
    "tensor 2",
    "copies 2, shards 2",
    "context 2",
    "mixture, shards 2",
    "mixture, experts 2, shards 4",
}
"""Meshes whose kinds of parallelism the others have too."""
EVERY_MESH = [
    pytest.param(mesh, marks=pytest.mark.slow) if mesh in SLOW else mesh for mesh in MESHES
]


def model_of(mesh: str) -> str:
    return str(MOE_MODEL if "mixture" in mesh else MODEL)


def work_of_a_rank(rank: int, folder: str, meshes: set[str], fused: str, llama: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    results = {}
    for world_size in process_groups(rank, (4, 2), folder):
        for mesh, parallelism in MESHES.items():
            if mesh in meshes and RANKS[mesh] == world_size:
                results[mesh] = work_on(mesh, parallelism, f"{folder}/{mesh}", fused, llama)
    torch.save(results, f"{folder}/results-{rank}.pt")


def work_on(mesh: str, parallelism: Parallelism, folder: str, fused: str, llama: str) -> dict:
    own = dict(model=model_of(mesh), parallelism=parallelism)
    learner = learner_of(f"{folder}/float32", lr=LR, **own)
    results = one_step(learner) | {
        "snapshot": snapshot(learner),
        "two hosts": snapshot_of_two_hosts(learner),
    }
    if mesh == "mixture, experts 2":
        learner.checkpoints.begin(Path(folder, "trainer"), 1).result()
        results |= {
            "start": TrainerStart(folder=Path(folder, "trainer"), step=1),
            "next": one_step(learner),
        }
        results["policy"] = learner.save_final(2)
    results["rows"] = learner.broadcast_rows(f"of rank {learner.rank}".encode())
    learner.close()
    if mesh == "tensor 2, shards 2":
        for name, model in (("fused", fused_config(fused)), ("llama", llama)):
            learner = learner_of(f"{folder}/{name}", model=model, parallelism=parallelism)
            results[name] = snapshot(learner), learner.score(TOKENS)
            learner.close()
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(patch.setattr)
        learner = learner_of(f"{folder}/float64", dtype=torch.float64, **own)
        results["float64"] = loss_and_gradient(learner, LAYOUTS["short rows"])
        results["trees"] = loss_and_gradient(learner, LAYOUTS["long rows"], tree_samples())
        learner.close()
        if "mixture" in mesh:
            learner = learner_of(
                f"{folder}/replay", dtype=torch.float64, router_replay="ids", **own
            )
            results["replay"] = loss_and_gradient(
                learner, LAYOUTS["short rows"], routed_samples(None)
            )
            learner.close()
    return results


@pytest.fixture(scope="module")
def llama_of_two_key_heads(tmp_path_factory) -> str:
    return llama_folder(
        tmp_path_factory.mktemp("llama2"), tie_word_embeddings=False, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def ranks_of(fused_model, llama_of_two_key_heads, tmp_path_factory) -> Callable[[str], list[dict]]:
    """Return a function: what each rank of a mesh made, rank 0 first.

    Four processes work through the meshes that are not slow, and once more through those that are.
    """

    @functools.cache
    def results(slow: bool) -> list[dict]:
        folder = tmp_path_factory.mktemp("four_ranks")
        meshes = SLOW if slow else MESHES.keys() - SLOW
        models = (fused_model, llama_of_two_key_heads)
        run_ranks(work_of_a_rank, str(folder), meshes, *models, count=4)
        return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(4)]

    return lambda mesh: [found[mesh] for found in results(mesh in SLOW) if mesh in found]


@pytest.fixture(scope="module")
def alone_with(one_rank, tmp_path_factory) -> dict[str, dict]:
    """By model."""
    found = {}
    for model in {model_of(mesh) for mesh in MESHES}:
        learner = learner_of(tmp_path_factory.mktemp("alone"), lr=LR, model=model)
        found[model] = one_step(learner)
        learner.close()
    return found


@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_loss_gradient_norm_and_published_parameters_are_those_of_one_rank(
    alone_with, ranks_of, mesh
):
    alone, before = alone_with[model_of(mesh)], load_file(Path(model_of(mesh), "model.safetensors"))
    assert (
        max((alone["parameters"][name] - before[name]).abs().max() for name in before) > LR / 2
    ), "the step changed nothing"
    results = ranks_of(mesh)
    for result in results:
        for metric in ("loss/total", "train/grad_norm"):
            assert result["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-5)
        assert result["denominators"] == alone["denominators"]
        assert_same_after_adam(result["parameters"], alone["parameters"])
    assert_same(results[0]["snapshot"], results[0]["parameters"], rtol=0, atol=0)


@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_two_hosts_publish_a_half_each_without_a_rank_that_gathers_a_tensor(ranks_of, mesh):
    result = ranks_of(mesh)[0]
    published, nbytes = result["two hosts"], result["two hosts"]["nbytes"]
    assert_same(published["tensors"], result["parameters"], rtol=0, atol=0)
    assert published["published"] == published["seen"]
    stacks = {stack_name(name) for name in result["parameters"]}
    assert published["seen"].keys() == stacks, "a digest for each stack, and for each other tensor"
    if mesh == "copies 2, shards 2":
        assert nbytes == {"a": nbytes["whole"], "whole": nbytes["whole"]}, (
            "the copy on the other host is not published"
        )
    else:
        assert max(nbytes["a"], nbytes["b"]) < 0.6 * nbytes["whole"]


@pytest.mark.parametrize("mesh", EVERY_MESH)
def test_in_float64_nothing_but_rounding_depends_on_the_mesh(
    one_rank, ranks_of, mesh, tmp_path, monkeypatch
):
    compute_in_float64(monkeypatch.setattr)
    learner = learner_of(tmp_path, dtype=torch.float64, model=model_of(mesh))
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT)
    of_trees = loss_and_gradient(
        learner, REFERENCE_LAYOUT | {"share_prefixes": False}, tree_samples()
    )
    learner.config.router_replay = "ids"
    replayed = (
        loss_and_gradient(learner, REFERENCE_LAYOUT, routed_samples(None))
        if "mixture" in mesh
        else None
    )
    learner.close()
    for result in ranks_of(mesh):
        assert_same_step(result["float64"], expected)
        if replayed is not None:
            assert_same_step(result["replay"], replayed)
        loss, gradient = result["trees"]
        assert loss == pytest.approx(of_trees[0], rel=1e-6)
        # torchtitan rotates queries and keys in float32, here those of a whole tree at once.
        assert_same(gradient, of_trees[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mesh", [mesh for mesh in EVERY_MESH if "mixture" in str(mesh)])
def test_every_choice_of_every_rank_is_computed_and_its_load_counted(alone_with, ranks_of, mesh):
    alone = alone_with[model_of(mesh)]["metrics"]
    for result in ranks_of(mesh):
        metrics = {
            name: value for name, value in result["metrics"].items() if name.startswith("experts/")
        }
        assert metrics["experts/dropped"] == 0 and len(metrics) == 1 + 2 * 4
        assert (
            1 <= metrics["experts/layer_0/load_max"] <= 4 and metrics["experts/layer_0/unused"] < 1
        )
        if "tensor" not in mesh:  # sequence-parallel ranks count padding too
            # A token that two samples share is computed, and counted, as often as the ranks that have one of them.
            assert metrics == pytest.approx({name: alone[name] for name in metrics}, rel=0.005)


def test_what_expert_parallel_ranks_saved_one_rank_goes_on_with(one_rank, ranks_of, tmp_path):
    saved = ranks_of("mixture, experts 2")[0]
    learner = learner_of(tmp_path, model=str(MOE_MODEL), lr=LR, start=saved["start"])
    assert_same(parameters(learner), saved["parameters"], rtol=0, atol=0)
    found = one_step(learner)
    assert found["metrics"]["loss/total"] == pytest.approx(
        saved["next"]["metrics"]["loss/total"], rel=1e-5
    )
    assert_same(found["parameters"], saved["next"]["parameters"], rtol=0, atol=1e-5)
    (file,) = saved["policy"].glob("*.safetensors")
    assert_same(load_file(file), saved["next"]["parameters"], rtol=0, atol=0)
    learner.close()


@pytest.mark.parametrize(
    ("mesh", "ranks", "size"),
    [
        pytest.param("tensor 2", [0, 0], 1, marks=pytest.mark.slow),
        ("tensor 2, shards 2", [0, 0, 1, 1], 2),
        ("context 2, shards 2", [0, 0, 1, 1], 2),
    ],
)
def test_ranks_that_share_their_rows_have_one_data_parallel_coordinate(ranks_of, mesh, ranks, size):
    results = ranks_of(mesh)
    firsts = [index - index % (len(results) // size) for index in range(len(results))]
    assert [result["rows"] for result in results] == [b"of rank %d" % first for first in firsts]
    coordinates = [result["coordinate"] for result in results]
    assert coordinates == [DataParallel(rank=rank, size=size) for rank in ranks]


@pytest.mark.parametrize("name", ["fused", "llama"])
def test_fused_and_reordered_weights_of_tensor_parallel_ranks_are_published_as_they_were_loaded(
    ranks_of,
    name,
    fused_model,
    llama_of_two_key_heads,
    one_rank,
    tmp_path,
    reference,
):
    folder = {"fused": fused_model, "llama": llama_of_two_key_heads}[name]
    published, score = ranks_of("tensor 2, shards 2")[0][name]
    assert_same(published, load_file(Path(folder) / "model.safetensors"), rtol=0, atol=0)
    if name == "llama":
        expected = reference(folder, TOKENS)
    else:
        expected = score_of(learner_of(tmp_path, model=fused_config(folder)))
    np.testing.assert_allclose(score, expected, rtol=1e-5, atol=1e-4)


def score_of(learner: Learner) -> np.ndarray:
    score = learner.score(TOKENS)
    learner.close()
    return score
