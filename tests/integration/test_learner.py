"""The trainer's numbers: the same whatever the packing, the microbatches and the ranks, and those of transformers."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from safetensors.torch import load_file, save_file
from torchtitan.config import ParallelismConfig

from tests.integration.conftest import MODEL, llama_folder
from tests.unit.tree_samples import random_tree, tree_sample
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.parallelism import Parallelism
from torchtitan.experiments.rl.training.process_group import init_process_group
from torchtitan.experiments.rl.types import DataParallel, LossDenominators, TrainingSample
from torchtitan.experiments.rl.weights import publisher as publisher_module
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import SharedBuffer

LAYOUTS = {
    "short rows": dict(row_length=64, rows_per_microbatch=1),
    "long rows": dict(row_length=512, rows_per_microbatch=8),
    "rows of another length, three at a time": dict(row_length=150, rows_per_microbatch=3),
}
TOKENS = np.arange(3, 40, dtype=np.int32)
REFERENCE_LAYOUT = dict(row_length=512, rows_per_microbatch=1)


def samples_of(count: int = 24, *, vocabulary: int = 768, seed: int = 0) -> list[TrainingSample]:
    """Samples of 8 to 60 tokens with every kind of weight, sampled near the policy at several temperatures."""
    random = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        length = int(random.integers(8, 60))
        sampled = np.arange(length) >= length // 2
        samples.append(
            TrainingSample(
                token_ids=random.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=sampled,
                generator_logprobs=np.where(sampled, random.normal(-8, 1, length), 0).astype(np.float32),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, random.normal(), 0).astype(np.float32),
                ce_weights=np.where(~sampled & (np.arange(length) > 1), 0.1, 0).astype(np.float32),
                temperature=float(random.choice([0.7, 1.0, 1.3])),
                task_name="test",
                rollout_id=str(index),
            )
        )
    return samples


def forks_of_forks(count: int = 30) -> list[TrainingSample]:
    """Samples of up to 60 tokens whose prefixes make a few trees, with every kind of weight."""
    return [tree_sample(tokens, seed) for seed, tokens in enumerate(random_tree(3, count, 60))]


class RepeatedLearner(Learner):
    """All ranks have one data-parallel coordinate: they lie in the mesh's pipeline dimension, each with the whole model."""

    def _parallelism(self) -> ParallelismConfig:
        parallelism = super()._parallelism()
        parallelism.pipeline_parallel_degree = dist.get_world_size()
        return parallelism


def learner_of(
    run_dir,
    *,
    model: str | ModelConfig = str(MODEL),
    dtype=None,
    lr: float = 1e-3,
    kind: type[Learner] = Learner,
    start: TrainerStart | None = None,
    **config,
) -> Learner:
    model = model if isinstance(model, ModelConfig) else ModelConfig(hf_assets_path=model)
    config = TrainerConfig(optimizer=OptimizerConfig(lr=lr), **config)
    config.lr_scheduler.warmup_steps = 0
    sizes = dict(max_seq_len=512, total_steps=10)
    return kind(config, model=model, device="cpu", **sizes, run_dir=str(run_dir), start=start, dtype=dtype)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in learner.hub_tensors().items()}


def accumulate(learner: Learner, layout: dict, samples: list[TrainingSample]) -> dict[str, float]:
    plan = Batcher.Config(**layout).build().plan(samples, learner.data_parallel.size)
    return learner.forward_backward(plan.microbatches[learner.data_parallel.rank], 0).compute()


def loss_and_gradient(learner: Learner, layout: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one step on the fixed samples; the learner's own gradient is cleared."""
    loss = accumulate(learner, layout, samples_of())["loss/total"]
    gradient = {name: full(parameter.grad) for name, parameter in learner.model.named_parameters()}
    learner.optimizers.zero_grad()
    return loss, {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in gradient.items()}


def shared_and_apart(learner: Learner) -> dict[bool, tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Metrics and gradient of one step on forks of forks, with and without shared prefixes."""
    results = {}
    for share in (True, False):
        layout = dict(row_length=90, rows_per_microbatch=3, share_prefixes=share)
        metrics = accumulate(learner, layout, forks_of_forks())
        results[share] = metrics, {name: full(parameter.grad) for name, parameter in learner.model.named_parameters()}
        learner.optimizers.zero_grad()
    return results


def step(learner: Learner) -> dict[str, torch.Tensor]:
    """Parameters after one optimizer step on the fixed samples."""
    accumulate(learner, LAYOUTS["long rows"], samples_of())
    learner.optim_step()
    return parameters(learner)


def assert_same(left, right, *, rtol: float, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def fused_config(path: str) -> ModelConfig:
    return ModelConfig(hf_assets_path=path, flavor="qwen3/debugmodel")


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory) -> str:
    """A torchtitan flavor with fused q, k and v, saved to a hub folder by torchtitan's adapter."""
    folder = tmp_path_factory.mktemp("debugmodel")
    spec = policy_spec(fused_config(str(folder)), device="cpu", max_seq_len=512)
    model = spec.model.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    tensors = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}))
    return str(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compute_in_float64(monkeypatch_setattr) -> None:
    """FSDP casts parameters to the configured compute dtype, which names no float64: let float32 mean that."""
    from torchtitan.models.qwen3 import parallelize

    monkeypatch_setattr(parallelize, "TORCH_DTYPE_MAP", parallelize.TORCH_DTYPE_MAP | {"float32": torch.float64})


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process is the only rank. Threads are one, for the same bits each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    init_process_group(device="cpu", rank=0, world_size=1, url=f"tcp://127.0.0.1:{free_port()}")
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


# ---- two ranks, in processes of their own: everything that is asked of them at once


def work_of_a_rank(rank: int, port: int, folder: str, fused_model: str, llama_model: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    init_process_group(device="cpu", rank=rank, world_size=2, url=f"tcp://127.0.0.1:{port}")
    results = {}
    for name, copies in (("sharded", 1), ("copied", 2)):
        learner = learner_of(f"{folder}/{name}", parallelism=Parallelism(data_parallel_replicate_degree=copies))
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
    learner = learner_of(f"{folder}/repeated", kind=RepeatedLearner)
    results["repeated"] = one_step(learner)
    results["repeated"]["snapshot"] = snapshot(learner)
    learner.close()
    learner = learner_of(f"{folder}/llama", model=llama_model)
    results["snapshot llama"], results["score llama"] = snapshot(learner), learner.score(TOKENS)
    learner.close()
    compute_in_float64(setattr)
    learner = learner_of(f"{folder}/float64", dtype=torch.float64)
    results["float64"] = {name: loss_and_gradient(learner, layout) for name, layout in LAYOUTS.items()}
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
    learner.optimizers.zero_grad()
    return counts


def one_step(learner: Learner) -> dict:
    """Everything that one step on the fixed samples makes, and what it was made from."""
    plan = Batcher.Config(**LAYOUTS["long rows"]).build().plan(samples_of(), learner.data_parallel.size)
    microbatches = plan.microbatches[learner.data_parallel.rank]
    metrics = learner.forward_backward(microbatches, 0).compute()
    denominators = learner._denominators(microbatches)
    metrics |= learner.optim_step()
    coordinate = learner.data_parallel
    return dict(metrics=metrics, denominators=denominators, parameters=parameters(learner), coordinate=coordinate)


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    """What this rank wrote into shared memory; on the first rank, what the ranks wrote together."""
    publisher = SnapshotPublisher(rank=learner.rank, one_host=True, dtype=torch.float32)
    publisher.write(1, learner.hub_tensors())
    if learner.rank:
        return {name: view.clone() for name, view in publisher._targets[1].items()}
    return {name: view.clone() for name, view in publisher._buffers[1].views(publisher._layout)}


@pytest.fixture(scope="module")
def both_ranks(fused_model, llama_model, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two_ranks")
    multiprocessing.spawn(work_of_a_rank, args=(free_port(), str(folder), fused_model, llama_model), nprocs=2)
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
    assert max((stepped[name] - before[name]).abs().max() for name in stepped) > 5e-4, "the step changed nothing"
    assert_same(two_ranks[f"parameters {mesh}"], stepped, rtol=0, atol=1e-5)


def test_shards_keep_no_whole_gradient_between_microbatches_and_copies_add_theirs_up_once(two_ranks, stepped):
    first, *others = two_ranks["gradients sharded"]
    assert first == 0 and len(others) > 2 and set(others) == {len(stepped)}
    assert set(two_ranks["gradients copied"]) == {0}


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_ranks_that_write_their_shards_write_the_whole_snapshot(two_ranks, mesh):
    assert_same(two_ranks[f"snapshot {mesh}"], two_ranks[f"parameters {mesh}"], rtol=0, atol=0)


@pytest.mark.parametrize("mesh", ["sharded", "copied"])
def test_fused_weights_of_a_sharded_model_are_published_apart(two_ranks, fused_model, mesh):
    assert_same(two_ranks[f"snapshot fused {mesh}"], load_file(f"{fused_model}/model.safetensors"), rtol=0, atol=0)


def test_more_ranks_than_key_heads_keep_every_row_in_its_place(two_ranks, llama_model, reference):
    # transformers and torchtitan order the rows of each head's queries and keys differently, and a rank holds half a head.
    assert_same(two_ranks["snapshot llama"], load_file(f"{llama_model}/model.safetensors"), rtol=0, atol=0)
    np.testing.assert_allclose(two_ranks["score llama"], reference(llama_model, TOKENS), rtol=1e-5, atol=2e-5)


def test_every_mesh_scores_alike(stepped, two_ranks, one_rank, tmp_path):
    learner = learner_of(tmp_path)
    step(learner)
    for mesh in ("sharded", "copied"):
        np.testing.assert_allclose(two_ranks[f"score {mesh}"], learner.score(TOKENS), rtol=0, atol=1e-4)


def test_ranks_of_one_data_parallel_coordinate_step_as_one_rank_alone(both_ranks, one_rank, tmp_path):
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


# ---- float64: nothing but rounding may depend on how samples are laid out


@pytest.fixture
def exact(one_rank, tmp_path, monkeypatch):
    compute_in_float64(monkeypatch.setattr)

    def build(**config) -> Learner:
        learner = learner_of(tmp_path, dtype=torch.float64, **config)
        assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float64}
        return learner

    return build


def assert_same_step(result, expected) -> None:
    assert result[0] == pytest.approx(expected[0], rel=1e-6)
    scale = max(gradient.abs().max() for gradient in expected[1].values())
    assert scale > 1e-3
    assert_same(result[1], expected[1], rtol=1e-6, atol=1e-6 * float(scale) * 1e-3)


def test_loss_and_gradient_do_not_depend_on_rows_microbatches_or_ranks(exact, two_ranks):
    learner = exact()
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT)
    for layout in LAYOUTS.values():
        assert_same_step(loss_and_gradient(learner, layout), expected)
    for result in two_ranks["float64"].values():
        assert_same_step(result, expected)


def test_shared_prefixes_change_nothing_on_one_rank_or_on_two(exact, two_ranks, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # torchtitan turns queries and keys in float32
    alone = shared_and_apart(exact())
    metrics, gradient = alone[False]
    scale = max(float(tensor.abs().max()) for tensor in gradient.values())
    assert scale > 1e-3 and len(metrics) > 20
    for result in (alone[True], two_ranks["shared"][True], two_ranks["shared"][False]):
        assert result[0] == pytest.approx(metrics, rel=1e-9, abs=1e-12)
        assert_same(result[1], gradient, rtol=0, atol=1e-9 * scale)


def test_loss_and_gradient_do_not_depend_on_recomputed_activations_or_logit_chunks(exact):
    expected = loss_and_gradient(exact(), REFERENCE_LAYOUT)
    assert_same_step(loss_and_gradient(exact(activation_checkpoint=True), REFERENCE_LAYOUT), expected)
    assert_same_step(loss_and_gradient(exact(logprob_chunk_tokens=3), REFERENCE_LAYOUT), expected)


# ---- checkpoints


def test_log_probabilities_of_a_folder_saved_by_transformers_are_those_of_transformers(
    one_rank, tmp_path, tied_model, untied_model, llama_model, reference
):
    unscaled = llama_folder(tmp_path / "unscaled", tie_word_embeddings=False)
    for path, vocabulary in ((tied_model, 768), (untied_model, 96), (llama_model, 768), (unscaled, 768)):
        learner = learner_of(tmp_path / "runs" / Path(path).name, model=path)
        tokens = np.random.default_rng(1).integers(0, vocabulary, 200).astype(np.int32)
        logprobs = learner.score(tokens)
        assert logprobs.dtype == np.float32 and logprobs[0] == 0 and np.ptp(logprobs) > 1
        np.testing.assert_allclose(logprobs, reference(path, tokens), rtol=1e-5, atol=2e-5)


def test_packed_samples_have_the_log_probabilities_of_each_alone(one_rank, tmp_path, tied_model, reference):
    learner = learner_of(tmp_path)
    samples = samples_of(9)
    (batch,) = Batcher.Config(row_length=128, rows_per_microbatch=8).build().plan(samples, 1).microbatches[0]
    logprobs, _ = learner.model(batch.token_ids, batch.positions, batch.temperatures, batch.positions != 0)
    starts = [tuple(start) for start in (batch.positions == 0).nonzero().tolist()]
    seen = 0
    for row, start in starts:
        later = [column for other, column in starts if other == row and column > start]
        end = min(later, default=batch.token_ids.shape[1])
        if batch.task_ids[row, start] < 0:  # padding
            continue
        temperature = batch.temperatures[row, start].item()
        expected = reference(tied_model, batch.token_ids[row, start:end].numpy(), temperature)
        np.testing.assert_allclose(logprobs[row, start:end].detach().numpy(), expected, rtol=1e-5, atol=2e-5)
        seen += 1
    assert seen == len(samples)


def test_published_tensors_are_the_hub_folders_in_the_generators_dtype(one_rank, tmp_path, untied_model, monkeypatch):
    on_disk = load_file(Path(untied_model) / "model.safetensors")
    assert "lm_head.weight" in on_disk
    assert_same(published(learner_of(tmp_path, model=untied_model), monkeypatch), on_disk, rtol=0, atol=0)


def test_fused_flavor_publishes_the_tensors_it_loaded(one_rank, tmp_path, fused_model, monkeypatch):
    learner = learner_of(tmp_path, model=fused_config(fused_model))
    assert any("wqkv" in name for name, _ in learner.model.named_parameters()), "the flavor under test fuses q, k and v"
    on_disk = load_file(f"{fused_model}/model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in on_disk and "lm_head.weight" not in on_disk
    assert_same(published(learner, monkeypatch), on_disk, rtol=0, atol=0)


def published(learner: Learner, monkeypatch) -> dict[str, torch.Tensor]:
    """What a generator would read."""
    store = {}

    async def put(key, value):
        store[key] = value

    monkeypatch.setattr(publisher_module.torchstore, "put", put)
    publisher = SnapshotPublisher(rank=0, one_host=True, dtype=torch.float32)
    publisher.write(1, learner.hub_tensors())
    asyncio.run(publisher.publish(1, remote_readers=False))
    (manifest,) = store.values()
    return {name: view.clone() for name, view in SharedBuffer.attach(manifest.path).views(manifest.layout)}


# ---- steps that must not be taken


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(one_rank, tmp_path, poison):
    learner = learner_of(tmp_path)
    before = parameters(learner)
    samples = samples_of()
    samples[3].advantages[samples[3].loss_mask] = poison
    accumulate(learner, LAYOUTS["long rows"], samples)
    with pytest.raises(RunError, match="gradient norm is (nan|inf): the step was not taken"):
        learner.optim_step()
    assert_same(parameters(learner), before, rtol=0, atol=0)
