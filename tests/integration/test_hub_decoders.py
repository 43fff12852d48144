"""Models that transformers defines, trained by its modules: each computes what transformers does, packed, in trees and apart."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.fakes.hub_families import FAMILIES, WINDOW, load_family, write_family
from tests.integration.learners import (
    LAYOUTS,
    REFERENCE_LAYOUT,
    TOKENS,
    assert_same,
    full,
    learner_of,
    loss_and_gradient,
    one_step,
    parameters,
    tree_samples,
)
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig, policy_spec
from torchtitan.experiments.rl.models.transformers_decoder import TransformersPolicy
from torchtitan.experiments.rl.training.checkpoints import TrainerStart


def names_in(folder: str | Path) -> set[str]:
    """Return the names of the tensors in a hub folder."""
    return {name for file in Path(folder).glob("*.safetensors") for name in load_file(file)}


CHANGES = {"cohere2": {"sliding_window": WINDOW}}
"""Fields that differ from those of the models that engines serve."""
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns a function: the hub folder of a family's tiny model, which is written once."""
    folder = tmp_path_factory.mktemp("families")

    def of(family: str) -> str:
        if not (folder / family).exists():
            write_family(family, folder / family, **CHANGES.get(family, {}))
        return str(folder / family)

    return of


def logprobs_of(model: PreTrainedModel, tokens: np.ndarray, temperature: float = 1.0):
    """Log-probability of each token but the first, [T - 1], differentiable, by transformers."""
    tokens = torch.from_numpy(tokens.astype(np.int64))[None]
    logits = model(tokens).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)


@every_family
def test_log_probabilities_and_their_gradient_are_those_of_transformers(exact, folder_of, family):
    learner = exact(model=folder_of(family))
    assert isinstance(learner.model, TransformersPolicy)
    reference = load_family(folder_of(family), torch.float64)
    tokens = torch.from_numpy(TOKENS.astype(np.int64))[None]
    positions = torch.arange(len(TOKENS))[None]
    temperatures = torch.full(tokens.shape, 0.7, dtype=torch.float64)
    logprobs, _ = learner.model(tokens, positions, temperatures, positions > 0)
    expected = logprobs_of(reference, TOKENS, 0.7)
    # transformers computes norms, rotations and softmax in float32.
    torch.testing.assert_close(logprobs[0, 1:], expected, rtol=0, atol=1e-4)
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    (logprobs[0, 1:] * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in reference.named_parameters():
        if name == "lm_head.weight" and learner.model.config.enable_weight_tying:
            continue
        found = full(learner.model.get_parameter(name).grad)
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-4 * scale)
    learner.close()


@every_family
def test_a_step_does_not_depend_on_how_samples_are_packed_and_trees_are_the_samples_apart(
    exact, folder_of, family
):
    learner = exact(model=folder_of(family))
    loss, gradient = loss_and_gradient(learner, REFERENCE_LAYOUT)
    for layout in LAYOUTS.values():
        packed = loss_and_gradient(learner, layout)
        assert packed[0] == pytest.approx(loss, rel=1e-6)
        assert_same_gradient(packed[1], gradient)
    apart = loss_and_gradient(learner, REFERENCE_LAYOUT | {"share_prefixes": False}, tree_samples())
    together = loss_and_gradient(learner, LAYOUTS["long rows"], tree_samples())
    assert together[0] == pytest.approx(apart[0], rel=1e-6)
    assert_same_gradient(together[1], apart[1])
    learner.close()


def assert_same_gradient(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    assert_same(found, expected, rtol=1e-5, atol=1e-6 * scale)


@every_family
def test_what_is_exported_is_loaded_by_transformers_and_a_checkpoint_goes_on_exactly(
    one_rank, folder_of, tmp_path, family
):
    learner = learner_of(tmp_path / "first", model=folder_of(family))
    one_step(learner)
    learner.checkpoints.begin(tmp_path / "trainer", 1).result()
    after_one = parameters(learner)
    expected = one_step(learner)["parameters"]
    folder = learner.save_final(2)
    score = learner.score(TOKENS)
    learner.close()
    exported = load_family(folder)
    with torch.no_grad():
        np.testing.assert_allclose(score[1:], logprobs_of(exported, TOKENS), rtol=0, atol=1e-4)
    assert names_in(folder) == names_in(folder_of(family))

    start = TrainerStart(folder=tmp_path / "trainer", step=1)
    resumed = learner_of(tmp_path / "second", model=folder_of(family), start=start)
    assert_same(parameters(resumed), after_one, rtol=0, atol=0)
    assert_same(one_step(resumed)["parameters"], expected, rtol=0, atol=0)
    resumed.close()


@every_family
def test_adapters_are_beside_every_linear_layer_and_what_they_end_as_is_merged_for_transformers(
    one_rank, folder_of, tmp_path, family
):
    lora = LoRA.Config(rank=2, alpha=8)
    learner = learner_of(tmp_path, model=folder_of(family), lora=lora, lr=1e-2)
    plain = learner_of(tmp_path / "plain", model=folder_of(family))
    np.testing.assert_array_equal(learner.score(TOKENS), plain.score(TOKENS))
    plain.close()
    reference = load_family(folder_of(family))
    linear = {
        name
        for name, module in reference.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
    adapted = {
        name.removesuffix(".lora_a")
        for name, _ in learner.model.named_modules()
        if name.endswith(".lora_a")
    }
    assert adapted == linear
    one_step(learner)
    folder, score = learner.save_final(1), learner.score(TOKENS)
    with torch.no_grad():
        np.testing.assert_allclose(
            score[1:], logprobs_of(load_family(folder), TOKENS), rtol=0, atol=1e-4
        )
        before = logprobs_of(reference, TOKENS)
    assert np.abs(score[1:] - before.numpy()).max() > 1e-2, "nothing was learned"
    learner.close()


def test_the_embedding_of_a_token_that_is_padding_too_is_trained(exact, folder_of):
    """A folder may name the end of a turn as padding. transformers gives its embedding no gradient."""
    learner = exact(model=folder_of("olmo2"))
    padding = 0
    assert load_family(folder_of("olmo2")).get_input_embeddings().padding_idx == padding
    tokens = torch.tensor([[5, padding, 7]])
    positions, temperatures = torch.arange(3)[None], torch.ones(1, 3, dtype=torch.float64)
    logprobs, _ = learner.model(tokens, positions, temperatures, positions > 0)
    logprobs.sum().backward()
    gradient = full(learner.model.tok_embeddings.weight.grad)
    assert all(gradient[token].abs().max() > 0 for token in (5, padding))
    learner.close()


def test_the_same_model_by_either_library_has_the_same_loss_and_gradient(exact, tied_model):
    found = []
    for library in ("torchtitan", "transformers"):
        model = ModelConfig(hf_assets_path=tied_model, trained_by=library)
        learner = exact(model=model)
        loss, gradient = loss_and_gradient(learner, LAYOUTS["long rows"])
        learner.close()
        spec = policy_spec(model, device="cpu", max_seq_len=512)
        found.append((loss, spec.state_dict_adapter(spec.model, None).to_hf(gradient)))
    (loss, gradient), (other_loss, other_gradient) = found
    assert loss == pytest.approx(other_loss, rel=1e-6)
    assert_same_gradient(gradient, other_gradient)
