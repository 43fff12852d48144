"""The numbers of a trainer of one rank: whatever the packing, and those of transformers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from tests.integration.learners import (
    LAYOUTS,
    REFERENCE_LAYOUT,
    accumulate,
    assert_same,
    assert_same_step,
    by_hub_name,
    compile_by,
    fused_config,
    learner_of,
    loss_and_gradient,
    parameters,
    samples_of,
    step,
    tree_samples,
)
from tests.integration.models import MOE_MODEL, llama_folder
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.losses import LossConfig, PPOClip, TruncatedImportance
from torchtitan.experiments.rl.models.lora import LoRA, trained_state
from torchtitan.experiments.rl.training.config import Compile
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.experiments.rl.weights import publisher as publisher_module
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.reader import manifest_key
from torchtitan.experiments.rl.weights.snapshot import SnapshotReader


def test_loss_and_gradient_do_not_depend_on_recomputed_activations_or_logit_chunks(exact):
    expected = loss_and_gradient(exact(), REFERENCE_LAYOUT)
    assert_same_step(
        loss_and_gradient(exact(activation_checkpoint="full"), REFERENCE_LAYOUT), expected
    )
    assert_same_step(loss_and_gradient(exact(logprob_chunk_tokens=3), REFERENCE_LAYOUT), expected)


@pytest.mark.parametrize("activation_checkpoint", ["selective", "full"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_learner_computes_what_the_eager_one_does(
    exact, activation_checkpoint, backend, monkeypatch
):
    """`aot_eager` computes the captured graphs; Inductor, which runs use, also compiles them, for minutes on a CPU."""
    compile_by(backend, monkeypatch.setattr)
    # A reference adds the passes without a gradient.
    options = {"mixed_precision_param": "float64", "reference": ReferenceConfig(kl_coef=0.5)}
    expected = loss_and_gradient(exact(**options), REFERENCE_LAYOUT)
    compiled = exact(**options, compile=Compile(), activation_checkpoint=activation_checkpoint)
    assert_same_step(loss_and_gradient(compiled, REFERENCE_LAYOUT), expected)


def test_a_rank_that_is_alone_computes_without_fsdp_what_it_computes_with_it(exact):
    with_fsdp, without = exact(), exact(mixed_precision_param="float64")
    assert isinstance(with_fsdp.model, FSDPModule) and not isinstance(without.model, FSDPModule)
    expected = loss_and_gradient(with_fsdp, REFERENCE_LAYOUT)
    assert_same_step(loss_and_gradient(without, REFERENCE_LAYOUT), expected)
    recomputed = exact(mixed_precision_param="float64", activation_checkpoint="full")
    assert_same_step(loss_and_gradient(recomputed, REFERENCE_LAYOUT), expected)
    assert_same(step(without), step(with_fsdp), rtol=1e-9, atol=1e-12)


def test_prefix_trees_change_nothing_of_adapters(exact):
    learner = exact(lora=LoRA.Config(rank=4))
    random = torch.Generator().manual_seed(0)
    for name, parameter in trained_state(learner.model).items():
        torch.nn.init.normal_(parameter, std=0.05, generator=random) if "lora_b" in name else None
    apart = loss_and_gradient(learner, REFERENCE_LAYOUT | {"share_prefixes": False}, tree_samples())
    assert_same_step(loss_and_gradient(learner, LAYOUTS["long rows"], tree_samples()), apart)
    assert apart[1].keys() == trained_state(learner.model).keys() and all(
        tensor.any() for tensor in apart[1].values()
    )


# ---- checkpoints


def test_log_probabilities_of_a_folder_saved_by_transformers_are_those_of_transformers(
    one_rank, tmp_path, tied_model, untied_model, llama_model, reference
):
    unscaled = llama_folder(tmp_path / "unscaled", tie_word_embeddings=False)
    models = (
        (tied_model, 768),
        (untied_model, 96),
        (llama_model, 768),
        (unscaled, 768),
        (str(MOE_MODEL), 768),
    )
    for path, vocabulary in models:
        learner = learner_of(tmp_path / "runs" / Path(path).name, model=path)
        tokens = np.random.default_rng(1).integers(0, vocabulary, 200).astype(np.int32)
        logprobs = learner.score(tokens)
        assert logprobs.dtype == np.float32 and logprobs[0] == 0 and np.ptp(logprobs) > 1
        np.testing.assert_allclose(logprobs, reference(path, tokens), rtol=1e-5, atol=2e-5)


def test_packed_samples_have_the_log_probabilities_of_each_alone(
    one_rank, tmp_path, tied_model, reference
):
    learner = learner_of(tmp_path)
    samples = samples_of(9)
    (batch,) = (
        Batcher.Config(row_length=128, rows_per_microbatch=8)
        .build()
        .plan(samples, 1)
        .microbatches[0]
    )
    logprobs, _ = learner.model(
        batch.token_ids, batch.positions, batch.temperatures, batch.positions != 0
    )
    starts = [tuple(start) for start in (batch.positions == 0).nonzero().tolist()]
    seen = 0
    for row, start in starts:
        later = [column for other, column in starts if other == row and column > start]
        end = min(later, default=batch.token_ids.shape[1])
        if batch.task_ids[row, start] < 0:  # padding
            continue
        temperature = batch.temperatures[row, start].item()
        expected = reference(tied_model, batch.token_ids[row, start:end].numpy(), temperature)
        np.testing.assert_allclose(
            logprobs[row, start:end].detach().numpy(), expected, rtol=1e-5, atol=2e-5
        )
        seen += 1
    assert seen == len(samples)


def test_samples_of_a_step_get_the_log_probabilities_of_each_alone(
    one_rank, tmp_path, tied_model, reference
):
    """Beside others in a row, and where a prefix is shared."""
    learner = learner_of(tmp_path)
    samples = samples_of(12)
    for one in samples[:3]:
        one.token_ids[:4], one.temperature = samples[0].token_ids[:4], 0.7
    plan = Batcher.Config(row_length=200, rows_per_microbatch=1).build().plan(samples, 1)
    assert plan.shared_fraction > 0 and len(plan.microbatches[0]) > 1
    learner.forward_backward(plan.microbatches[0], 0)
    placed = list(plan.of_samples([learner.logprobs()]))
    assert len(placed) == 12
    for one, logprobs in placed:
        expected = reference(tied_model, one.token_ids, one.temperature)
        np.testing.assert_allclose(
            logprobs, np.where(one.loss_mask, expected, 0), rtol=1e-5, atol=2e-5
        )


def test_published_tensors_are_the_hub_folders_in_the_generators_dtype(
    one_rank, tmp_path, untied_model, monkeypatch
):
    on_disk = load_file(Path(untied_model) / "model.safetensors")
    assert "lm_head.weight" in on_disk
    assert_same(
        published(learner_of(tmp_path, model=untied_model), monkeypatch), on_disk, rtol=0, atol=0
    )


def test_experts_are_published_as_three_stacks_a_layer_that_have_the_hubs_tensors_in_order(
    one_rank, tmp_path, monkeypatch
):
    on_disk = load_file(MOE_MODEL / "model.safetensors")
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in on_disk
    found = published(learner_of(tmp_path, model=str(MOE_MODEL)), monkeypatch)
    assert sum("*" in name for name in found) == 4 * 3  # of four layers
    assert found["model.layers.3.mlp.experts.*.down_proj.weight"].shape == (8, 128, 64)
    assert_same(by_hub_name(found), on_disk, rtol=0, atol=0)


def test_fused_flavor_publishes_the_tensors_it_loaded(one_rank, tmp_path, fused_model, monkeypatch):
    learner = learner_of(tmp_path, model=fused_config(fused_model))
    assert any("wqkv" in name for name, _ in learner.model.named_parameters()), (
        "the flavor under test fuses q, k and v"
    )
    on_disk = load_file(f"{fused_model}/model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in on_disk and "lm_head.weight" not in on_disk
    assert_same(published(learner, monkeypatch), on_disk, rtol=0, atol=0)


def published(learner: Learner, monkeypatch) -> dict[str, torch.Tensor]:
    """What a generator would read."""
    store = {}

    async def put(key, value):
        store[key] = value

    monkeypatch.setattr(publisher_module.torchstore, "put", put)
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.float32)
    publisher.write(1, learner.hub_tensors)
    asyncio.run(publisher.announce(False))
    manifest = asyncio.run(publisher.prove())
    assert store == {manifest_key(1): manifest}
    return {name: tensor.clone() for name, tensor in SnapshotReader().tensors(manifest).items()}


# ---- steps that must not be taken


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(
    one_rank, tmp_path, poison
):
    learner = learner_of(tmp_path)
    before = parameters(learner)
    samples = samples_of()
    samples[3].advantages[samples[3].loss_mask] = poison
    accumulate(learner, LAYOUTS["long rows"], samples)
    with pytest.raises(RunError, match="gradient norm is (nan|inf): the step was not taken"):
        learner.optim_step()
    assert_same(parameters(learner), before, rtol=0, atol=0)


def test_what_is_of_the_whole_step_does_not_depend_on_how_it_is_packed(exact):
    """Advantages normalised over the step, the sum of weights as denominator, a constant, and a correction of the loss."""
    loss = LossConfig(
        rl=PPOClip.Config(),
        corrections=[TruncatedImportance.Config()],
        normalize_advantages=True,
        rl_denominator="weights",
        ce_denominator=100.0,
    )
    learner = exact(loss=loss)
    expected = loss_and_gradient(learner, REFERENCE_LAYOUT)
    for layout in LAYOUTS.values():
        assert_same_step(loss_and_gradient(learner, layout), expected)
    normalised = accumulate(learner, REFERENCE_LAYOUT, samples_of())["loss/rl"]
    learner.config.loss.normalize_advantages = False
    assert abs(normalised) > 0 and accumulate(learner, REFERENCE_LAYOUT, samples_of())[
        "loss/rl"
    ] != pytest.approx(normalised)
