"""transformers' modules over ranks: shards, copies of shards, and ranks that divide each row, compute what one rank does."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

from tests.fakes.hub_families import write_family
from tests.integration.learners import (
    LAYOUTS,
    assert_same,
    assert_same_after_adam,
    compute_in_float64,
    full,
    learner_of,
    loss_and_gradient,
    one_step,
    samples_of,
    snapshot,
    tree_samples,
)
from tests.integration.ranks import process_groups, run_ranks
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training.config import Parallelism
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.types import TrainingSample

FAMILIES = ["gemma3_text", "gpt_oss"]
"""Windows and two rotary bases with a tied head; sinks, biases and experts with a head of its own."""
MESHES = {
    "shards 2": Parallelism(),
    "context 2": Parallelism(context_parallel_degree=2),
    "copies 2, shards 2": Parallelism(data_parallel_replicate_degree=2),
}
RANKS = {"shards 2": 2, "context 2": 2, "copies 2, shards 2": 4}
LR = 1e-4
LORA = LoRA.Config(rank=2, alpha=8)


def work_of_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    results = {}
    for world_size in process_groups(rank, (4, 2), folder):
        for mesh, parallelism in MESHES.items():
            for family in FAMILIES if RANKS[mesh] == world_size else ():
                own = dict(model=f"{folder}/{family}", parallelism=parallelism)
                results[family, mesh] = work_on(f"{folder}/{family} {mesh}", own)
    torch.save(results, f"{folder}/results-{rank}.pt")


def work_on(folder: str, own: dict) -> dict:
    """Take a step in float32, and the gradient of packed rows and of trees in float64."""
    learner = learner_of(f"{folder}/float32", lr=LR, **own)
    results = one_step(learner) | {"snapshot": snapshot(learner)}
    learner.close()
    learner = learner_of(f"{folder}/adapters", lr=LR, lora=LORA, **own)
    results["adapted"] = one_step(learner)["metrics"]
    learner.close()
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(patch.setattr)
        learner = learner_of(f"{folder}/float64", dtype=torch.float64, **own)
        results["float64"] = loss_and_gradient(learner, LAYOUTS["short rows"])
        results["trees"] = loss_and_gradient(learner, LAYOUTS["long rows"], tree_samples())
        learner.close()
    return results


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory) -> Callable[[], tuple[str, list[dict]]]:
    """Return a function: the models' folder, and what each rank made, rank 0 first."""

    @functools.cache
    def results() -> tuple[str, list[dict]]:
        folder = tmp_path_factory.mktemp("hub_ranks")
        for family in FAMILIES:
            write_family(family, folder / family)
        run_ranks(work_of_a_rank, str(folder), count=4)
        made = [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(4)]
        return str(folder), made

    return results


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradient_and_published_parameters_are_those_of_one_rank(
    one_rank, ranks_of, tmp_path, family, mesh
):
    folder, made = ranks_of()
    learner = learner_of(tmp_path, lr=LR, model=f"{folder}/{family}")
    alone = one_step(learner)
    learner.close()
    learner = learner_of(tmp_path / "adapters", lr=LR, lora=LORA, model=f"{folder}/{family}")
    adapted = one_step(learner)["metrics"]
    learner.close()
    results = [result[family, mesh] for result in made if (family, mesh) in result]
    assert len(results) == RANKS[mesh]
    for result in results:
        for metric in ("loss/total", "train/grad_norm"):
            assert result["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-5)
            assert result["adapted"][metric] == pytest.approx(adapted[metric], rel=1e-5)
        assert_same_after_adam(result["parameters"], alone["parameters"])
    assert_same(results[0]["snapshot"], results[0]["parameters"], rtol=0, atol=0)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_nothing_but_the_order_of_sums_depends_on_the_ranks(
    one_rank, ranks_of, tmp_path, monkeypatch, family, mesh
):
    """One rank takes the ranks' own rows: transformers computes norms in float32, whose rounding depends on a row.

    Gemma adds up the gradient of a norm's weight in float32 too, over the tokens that a rank has of a row.
    """
    folder, made = ranks_of()
    compute_in_float64(monkeypatch.setattr)
    learner = learner_of(tmp_path, dtype=torch.float64, model=f"{folder}/{family}")
    size = RANKS[mesh] // MESHES[mesh].context_parallel_degree
    expected = {
        "float64": of_all_ranks(learner, LAYOUTS["short rows"], samples_of(), size),
        "trees": of_all_ranks(learner, LAYOUTS["long rows"], tree_samples(), size),
    }
    learner.close()
    for result in made:
        if (family, mesh) in result:
            for kind, (loss, gradient) in expected.items():
                found_loss, found = result[family, mesh][kind]
                assert found_loss == pytest.approx(loss, rel=1e-9)
                if mesh == "context 2" and family == "gemma3_text":
                    assert_same(found, gradient, rtol=1e-5, atol=1e-7)
                else:
                    assert_same(found, gradient, rtol=1e-9, atol=1e-9)


def of_all_ranks(
    learner: Learner, layout: dict, samples: list[TrainingSample], size: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of what so many data-parallel ranks compute, by one rank."""
    plan = Batcher.Config(**layout).build().plan(samples, size)
    loss = learner.forward_backward(list(itertools.chain(*plan.microbatches)), 0).compute()
    held = learner.model.named_parameters()
    gradient = {name: full(parameter.grad) for name, parameter in held}
    learner.trained[""].optimizers.zero_grad()
    return loss["loss/total"], gradient
