"""Two ranks, in processes of their own: every number is that of one rank, whatever each of them holds."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.config import ParallelismConfig

from tests.integration.learners import (
    LAYERS,
    LAYOUTS,
    REFERENCE_LAYOUT,
    TOKENS,
    accumulate,
    assert_same,
    assert_same_after_adam,
    assert_same_step,
    compute_in_float64,
    conditioned_samples,
    full,
    fused_config,
    learner_of,
    loss_and_gradient,
    one_step,
    samples_of,
    snapshot,
    step,
)
from tests.integration.models import MODEL
from tests.integration.ranks import run_ranks
from tests.unit.tree_samples import random_tree, tree_sample
from torchtitan.experiments.rl.compat.torchtitan.optimizers import ShardedMuon
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training.config import Parallelism
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.experiments.rl.training.trainer import init_process_group
from torchtitan.experiments.rl.types import DataParallel, LossDenominators, TrainingSample


def forks_of_forks(count: int = 30) -> list[TrainingSample]:
    """Samples of up to 60 tokens whose prefixes make a few trees, with every kind of weight."""
    return [tree_sample(tokens, seed) for seed, tokens in enumerate(random_tree(3, count, 60))]


REFERENCE = ReferenceConfig(kl_coef=0.5)


def steps_of_muon(
    optimizer: type[torch.optim.Muon], shard: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Matrices of several shapes after two steps, also of one that two ranks can't halve."""
    random = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (7, 5), (5, 7), (1, 16), (64, 16)]
    matrices = [torch.nn.Parameter(shard(torch.randn(s, generator=random))) for s in shapes]
    built = optimizer(matrices, lr=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        for matrix, shape in zip(matrices, shapes, strict=True):
            matrix.grad = shard(torch.randn(shape, generator=random))
        built.step()
    return [full(matrix) for matrix in matrices]


def compared(learner: Learner) -> Learner:
    """With a reference that is another model than the policy."""
    with learner.trained[""].reference.in_place():
        for parameter in learner.model.parameters():
            parameter.mul_(1.05)
    return learner


class Repeated(Parallelism):
    """All ranks have one data-parallel coordinate: they lie in the mesh's pipeline dimension, each with the whole model."""

    def for_torchtitan(self) -> ParallelismConfig:
        parallelism = super().for_torchtitan()
        parallelism.pipeline_parallel_degree = dist.get_world_size()
        return parallelism


def shared_and_apart(
    learner: Learner,
) -> dict[bool, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Metrics and gradient of one step on forks of forks, with and without shared prefixes."""
    results = {}
    for share in (True, False):
        layout = dict(row_length=90, rows_per_microbatch=3, share_prefixes=share)
        metrics = accumulate(learner, layout, forks_of_forks())
        results[share] = (
            metrics,
            {name: full(parameter.grad) for name, parameter in learner.model.named_parameters()},
        )
        learner.trained[""].optimizers.zero_grad()
    return results


def work_of_a_rank(rank: int, folder: str, fused_model: str, llama_model: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    init_process_group(device="cpu", rank=rank, world_size=2, url=f"file://{folder}/store")
    results = {}
    for name, copies in (("sharded", 1), ("copied", 2)):
        learner = learner_of(
            f"{folder}/{name}", parallelism=Parallelism(data_parallel_replicate_degree=copies)
        )
        results[f"gradients {name}"] = gradients_before_each_microbatch(learner)
        results[f"parameters {name}"] = step(learner)
        results[f"snapshot {name}"] = snapshot(learner)
        results[f"score {name}"] = learner.score(TOKENS)
        learner.close()
        learner = learner_of(
            f"{folder}/fused {name}",
            model=fused_config(fused_model),
            parallelism=Parallelism(data_parallel_replicate_degree=copies),
        )
        results[f"snapshot fused {name}"] = snapshot(learner)
        learner.close()
        learner = learner_of(
            f"{folder}/muon {name}",
            optimizer="muon",
            parallelism=Parallelism(data_parallel_replicate_degree=copies),
        )
        results[f"muon {name}"] = step(learner)
        learner.close()
    mesh = init_device_mesh("cpu", (2,))
    results["muon of one gradient"] = steps_of_muon(
        ShardedMuon, lambda whole: distribute_tensor(whole, mesh, [Shard(0)])
    )
    learner = learner_of(f"{folder}/repeated", parallelism=Repeated())
    results["repeated"] = one_step(learner)
    results["repeated"]["snapshot"] = snapshot(learner)
    learner.close()
    learner = learner_of(f"{folder}/llama", model=llama_model)
    results["snapshot llama"], results["score llama"] = snapshot(learner), learner.score(TOKENS)
    learner.close()
    compute_in_float64(setattr)
    learner = learner_of(f"{folder}/float64", dtype=torch.float64)
    results["float64"] = {
        name: loss_and_gradient(learner, layout) for name, layout in LAYOUTS.items()
    }
    learner.config.loss.normalize_advantages = True
    results["normalized"] = {
        name: loss_and_gradient(learner, layout) for name, layout in LAYOUTS.items()
    }
    learner.close()
    learner = compared(learner_of(f"{folder}/compared", dtype=torch.float64, reference=REFERENCE))
    results["compared"] = loss_and_gradient(learner, LAYOUTS["short rows"])
    results["conditioned"] = loss_and_gradient(
        learner, LAYOUTS["short rows"], conditioned_samples()
    )
    results["conditioned on one"] = loss_and_gradient(
        learner, LAYOUTS["long rows"], conditioned_samples()[:1]
    )
    learner.close()
    torch.Tensor.float = torch.Tensor.double
    learner = learner_of(f"{folder}/shared", dtype=torch.float64)
    results["shared"] = shared_and_apart(learner)
    learner.close()
    torch.save(results, f"{folder}/results-{rank}.pt")
    dist.destroy_process_group()


def gradients_before_each_microbatch(learner: Learner) -> list[int]:
    """How many parameters have a sharded gradient; the others' is whole on each rank, or there is none yet."""
    counts: list[int] = []

    def count(*_) -> None:
        counts.append(sum(parameter.grad is not None for parameter in learner.model.parameters()))

    with learner.model.register_forward_pre_hook(count):
        accumulate(learner, LAYOUTS["short rows"], samples_of())
    learner.trained[""].optimizers.zero_grad()
    return counts


@pytest.fixture(scope="module")
def both_ranks(fused_model, llama_model, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two_ranks")
    run_ranks(work_of_a_rank, str(folder), fused_model, llama_model, count=2)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def two_ranks(both_ranks) -> dict:
    """What the first rank has to say."""
    return both_ranks[0]


@pytest.fixture(scope="module")
def stepped(one_rank, tmp_path_factory) -> dict[str, torch.Tensor]:
    return step(learner_of(tmp_path_factory.mktemp("stepped")))


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_one_step_gives_the_same_parameters_on_one_rank_and_on_two(stepped, two_ranks, mesh):
    before = load_file(MODEL / "model.safetensors")
    assert max((stepped[name] - before[name]).abs().max() for name in stepped) > 5e-4, (
        "the step changed nothing"
    )
    assert_same_after_adam(two_ranks[f"parameters {mesh}"], stepped)


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_a_step_of_muon_on_two_ranks_is_that_of_one(two_ranks, one_rank, tmp_path, mesh):
    alone = step(learner_of(tmp_path, optimizer="muon"))
    before = load_file(MODEL / "model.safetensors")
    # Ranks add gradients up in other orders. The iteration rounds them to bfloat16, and makes the
    # smallest singular values, which are of the rounding, several hundred times as large.
    matrices = [name for name in alone if ".layers." in name and alone[name].ndim == 2]
    assert len(matrices) == 7 * LAYERS
    for name in matrices:
        moved, moved_by_two = (
            stepped[name] - before[name] for stepped in (alone, two_ranks[f"muon {mesh}"])
        )
        assert moved.norm() > 0, name
        assert (moved_by_two - moved).norm() < 0.1 * moved.norm(), name


def test_a_step_of_muon_by_one_gradient_is_the_same_bit_for_bit_on_two_ranks(two_ranks):
    alone = steps_of_muon(torch.optim.Muon, lambda whole: whole)
    for sharded, whole in zip(two_ranks["muon of one gradient"], alone, strict=True):
        torch.testing.assert_close(sharded, whole, rtol=0, atol=0)


def test_shards_keep_no_whole_gradient_between_microbatches_and_copies_add_theirs_up_once(
    two_ranks, stepped
):
    first, *others = two_ranks["gradients sharded"]
    assert first == 0 and len(others) > 2 and set(others) == {len(stepped)}
    assert set(two_ranks["gradients copied"]) == {0}


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_ranks_that_write_their_shards_write_the_whole_snapshot(two_ranks, mesh):
    assert_same(two_ranks[f"snapshot {mesh}"], two_ranks[f"parameters {mesh}"], rtol=0, atol=0)


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_fused_weights_of_a_sharded_model_are_published_apart(two_ranks, fused_model, mesh):
    assert_same(
        two_ranks[f"snapshot fused {mesh}"],
        load_file(f"{fused_model}/model.safetensors"),
        rtol=0,
        atol=0,
    )


def test_more_ranks_than_key_heads_keep_every_row_in_its_place(two_ranks, llama_model, reference):
    # transformers and torchtitan order the rows of each head's queries and keys differently, and a rank holds half a head.
    assert_same(
        two_ranks["snapshot llama"], load_file(f"{llama_model}/model.safetensors"), rtol=0, atol=0
    )
    np.testing.assert_allclose(
        two_ranks["score llama"], reference(llama_model, TOKENS), rtol=1e-5, atol=2e-5
    )


def test_every_mesh_scores_alike(stepped, two_ranks, one_rank, tmp_path):
    learner = learner_of(tmp_path)
    step(learner)
    for mesh in ("sharded", "copied"):
        np.testing.assert_allclose(
            two_ranks[f"score {mesh}"], learner.score(TOKENS), rtol=0, atol=1e-4
        )


def test_ranks_of_one_data_parallel_coordinate_step_as_one_rank_alone(
    both_ranks, one_rank, tmp_path
):
    learner = learner_of(tmp_path)
    alone = one_step(learner)
    learner.close()
    # Member tokens of the fixed samples, counted here: sampled ones, and those with a cross-entropy weight.
    samples = samples_of()
    rl = sum(int(sample.loss_mask.sum()) for sample in samples)
    ce = sum(int((sample.ce_weights > 0).sum()) for sample in samples)
    assert alone["denominators"] == LossDenominators(rl=rl, ce=ce, ref_kl=1)
    for rank in both_ranks:
        repeated = rank["repeated"]
        assert repeated["coordinate"] == alone["coordinate"] == DataParallel(rank=0, size=1)
        assert repeated["denominators"] == alone["denominators"]
        assert repeated["metrics"].keys() == alone["metrics"].keys() and len(alone["metrics"]) > 10
        assert repeated["metrics"] == pytest.approx(alone["metrics"], rel=1e-6, abs=1e-9)
        assert_same(repeated["parameters"], alone["parameters"], rtol=0, atol=1e-6)


def test_what_several_ranks_hold_is_written_by_one(both_ranks):
    first, second = both_ranks
    assert_same(first["repeated"]["snapshot"], first["repeated"]["parameters"], rtol=0, atol=0)
    assert second["repeated"]["snapshot"] == second["snapshot copied"] == {}
    assert second["snapshot sharded"].keys() == first["snapshot sharded"].keys()


def test_loss_and_gradient_do_not_depend_on_rows_microbatches_or_ranks(exact, two_ranks):
    learner = exact()
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT)
    for layout in LAYOUTS.values():
        assert_same_step(loss_and_gradient(learner, layout), expected)
    for result in two_ranks["float64"].values():
        assert_same_step(result, expected)


def test_advantages_are_normalised_over_the_tokens_of_all_rows_microbatches_and_ranks(
    exact, two_ranks
):
    learner, samples = exact(), samples_of()
    advantages = np.concatenate(
        [sample.advantages[sample.loss_mask].astype(np.float64) for sample in samples]
    )
    for sample in samples:
        normalized = (sample.advantages - advantages.mean()) / (advantages.std() + 1e-6)
        sample.advantages = np.where(sample.loss_mask, normalized, 0).astype(np.float32)
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT, samples)
    assert expected[0] != pytest.approx(loss_and_gradient(learner, REFERENCE_LAYOUT)[0], rel=1e-3)
    learner.config.loss.normalize_advantages = True
    for result in [
        loss_and_gradient(learner, LAYOUTS["short rows"]),
        *two_ranks["normalized"].values(),
    ]:
        assert_same_step(result, expected)


def test_the_distance_to_a_reference_does_not_depend_on_ranks_or_rows(exact, two_ranks):
    learner = exact()
    plain = loss_and_gradient(learner, REFERENCE_LAYOUT)
    learner = compared(exact(reference=REFERENCE))
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT)
    assert expected[0] > plain[0] + 1e-3
    assert_same_step(two_ranks["compared"], expected)


def test_the_reference_scores_samples_behind_other_prompts_whatever_their_rows_and_ranks(
    exact, two_ranks
):
    learner = compared(exact(reference=REFERENCE))

    def behind(token_ids: np.ndarray) -> np.ndarray:
        with learner.trained[""].reference.in_place():
            return learner.score(token_ids)

    expected = loss_and_gradient(learner, REFERENCE_LAYOUT, conditioned_samples(given=behind))
    for result in (
        loss_and_gradient(learner, LAYOUTS["short rows"], conditioned_samples()),
        two_ranks["conditioned"],
    ):
        assert_same_step(result, expected)
    # One rank alone has such a sample; the other computes padding with it.
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT, conditioned_samples(given=behind)[:1])
    assert_same_step(two_ranks["conditioned on one"], expected)


def test_samples_that_leave_scoring_to_a_reference_need_one(exact):
    with pytest.raises(
        RunError, match="leaves its reference to the trainer, which has none: set trainer.reference"
    ):
        loss_and_gradient(exact(), REFERENCE_LAYOUT, conditioned_samples())


def test_shared_prefixes_change_nothing_on_one_rank_or_on_two(exact, two_ranks, monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "float", torch.Tensor.double
    )  # torchtitan turns queries and keys in float32
    alone = shared_and_apart(exact())
    metrics, gradient = alone[False]
    scale = max(float(tensor.abs().max()) for tensor in gradient.values())
    assert scale > 1e-3 and len(metrics) > 20
    for result in (alone[True], two_ranks["shared"][True], two_ranks["shared"][False]):
        assert result[0] == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        assert_same(result[1], gradient, rtol=0, atol=1e-9 * scale)
