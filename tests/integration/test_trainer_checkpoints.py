"""A trainer that loads its checkpoint goes on from it: the next step is the same, bit for bit, and on another number of ranks but for rounding."""

import os
import shutil
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.learners import (
    LAYOUTS,
    TOKENS,
    accumulate,
    assert_same,
    full,
    fused_config,
    learner_of,
    parameters,
    samples_of,
    tree_samples,
)
from tests.integration.models import MODEL, MOE_MODEL
from tests.integration.ranks import run_ranks
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.process.setup import set_up_process
from torchtitan.experiments.rl.training.checkpoints import TrainerStart, export_checkpoint
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.reference import ReferenceConfig
from torchtitan.experiments.rl.training.trainer import init_process_group
from torchtitan.experiments.rl.types import TrainingSample


def step(learner: Learner, number: int) -> dict[str, float]:
    """Metrics of one step on samples of its own."""
    loss = accumulate(learner, LAYOUTS["long rows"], samples_of(seed=number))
    return {"loss": loss["loss/total"]} | learner.optim_step()


def saved(learner: Learner, folder: Path, number: int) -> TrainerStart:
    learner.checkpoints.begin(folder, number).result()
    return TrainerStart(folder=folder, step=number)


@pytest.fixture(scope="module")
def uninterrupted(one_rank, tmp_path_factory) -> dict:
    """Three steps, saved after the second while the third is taken."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    learner = learner_of(folder)
    first, second = step(learner, 1), step(learner, 2)
    weights = parameters(learner)
    writing = learner.checkpoints.begin(folder / "trainer", 2)
    third = step(learner, 3)
    writing.result()
    learner.close()
    start = TrainerStart(folder=folder / "trainer", step=2)
    return dict(
        start=start, weights=weights, metrics=[first, second, third], final=parameters(learner)
    )


def test_the_step_after_a_checkpoint_is_the_uninterrupted_runs_bit_for_bit(
    uninterrupted, one_rank, tmp_path
):
    learner = learner_of(tmp_path, start=uninterrupted["start"])
    assert learner.steps_taken == 2
    assert_same(parameters(learner), uninterrupted["weights"], rtol=0, atol=0)
    assert step(learner, 3) == uninterrupted["metrics"][2]
    assert_same(parameters(learner), uninterrupted["final"], rtol=0, atol=0)
    assert learner.steps_taken == 3
    learner.close()


def test_a_run_with_muon_goes_on_bit_for_bit_with_one_moment_of_each_matrix(one_rank, tmp_path):
    learner = learner_of(tmp_path / "first", optimizer="muon")
    step(learner, 1)
    start, expected = saved(learner, tmp_path / "trainer", 1), (step(learner, 2), learner)
    again = learner_of(tmp_path / "again", optimizer="muon", start=start)
    assert step(again, 2) == expected[0]
    assert_same(parameters(again), parameters(learner), rtol=0, atol=0)
    moments = saved_moments(start)
    assert moments["layers.0.attention.wo.weight"] == {"momentum_buffer"}
    assert moments["tok_embeddings.weight"] == {"exp_avg", "exp_avg_sq", "step"}
    learner.close()
    again.close()


def saved_moments(start: TrainerStart) -> dict[str, set[str]]:
    """Names of the optimizer's state in a checkpoint, by the parameter's name."""
    keys = FileSystemReader(start.folder / f"step-{start.step}").read_metadata().state_dict_metadata
    found: dict[str, set[str]] = {}
    for key in keys:
        _, is_state, rest = key.partition("state.")
        if is_state:
            name, _, moment = rest.rpartition(".")
            found.setdefault(name, set()).add(moment)
    return found


def test_adapters_are_trained_by_muon_and_go_on_bit_for_bit(one_rank, tmp_path):
    options = dict(optimizer="muon", lora=LoRA.Config(rank=2))
    learner = learner_of(tmp_path / "first", **options)
    step(learner, 1)
    start, expected = saved(learner, tmp_path / "trainer", 1), step(learner, 2)
    again = learner_of(tmp_path / "again", start=start, **options)
    assert step(again, 2) == expected
    assert_same(parameters(again), parameters(learner), rtol=0, atol=0)
    learner.close()
    again.close()


def test_a_mixture_of_experts_goes_on_bit_for_bit_and_is_exported_by_the_hubs_names(
    one_rank, tmp_path
):
    learner = learner_of(tmp_path / "first", model=str(MOE_MODEL))
    step(learner, 1)
    start, weights = saved(learner, tmp_path / "trainer", 1), parameters(learner)
    expected = step(learner, 2), parameters(learner)
    learner.close()
    again = learner_of(tmp_path / "again", model=str(MOE_MODEL), start=start)
    assert_same(parameters(again), weights, rtol=0, atol=0)
    assert step(again, 2) == expected[0]
    assert_same(parameters(again), expected[1], rtol=0, atol=0)
    again.close()
    export_checkpoint(start.folder, ModelConfig(hf_assets_path=str(MOE_MODEL)), tmp_path / "policy")
    assert_same(load_file(tmp_path / "policy" / "model.safetensors"), weights, rtol=0, atol=0)


def test_a_new_learning_rate_holds_from_the_first_step_after_a_checkpoint(
    uninterrupted, one_rank, tmp_path
):
    learner = learner_of(tmp_path, start=uninterrupted["start"], lr=5e-4)
    # The schedule decays linearly to 0 over the 10 steps: half the rate of the uninterrupted run, at the same place in it.
    assert step(learner, 3)["train/lr"] == pytest.approx(
        uninterrupted["metrics"][2]["train/lr"] / 2
    )
    learner.close()


def test_a_run_that_starts_from_weights_only_has_a_new_optimizer_and_schedule(
    uninterrupted, one_rank, tmp_path
):
    start = TrainerStart(folder=uninterrupted["start"].folder, step=0, weights_only=True)
    learner = learner_of(tmp_path, start=start)
    assert_same(parameters(learner), uninterrupted["weights"], rtol=0, atol=0)
    assert learner.steps_taken == 0
    assert step(learner, 3)["train/lr"] == uninterrupted["metrics"][0]["train/lr"]
    learner.close()


def test_a_step_that_fails_in_its_middle_leaves_a_state_that_is_not_saved(
    one_rank, tmp_path, monkeypatch
):
    learner = learner_of(tmp_path)
    accumulate(learner, LAYOUTS["long rows"], samples_of())

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(learner.trained[""].lr_schedulers, "step", fail)
    with pytest.raises(RuntimeError):
        learner.optim_step()
    assert learner.steps_taken is None
    learner.close()


def test_a_checkpoint_is_written_after_one_that_could_not_be(one_rank, tmp_path):
    learner = learner_of(tmp_path)
    no_folder = tmp_path / "full"
    no_folder.write_text("")
    assert learner.checkpoints.begin(no_folder / "trainer", 0).exception() is not None
    again = learner_of(tmp_path / "again", start=saved(learner, tmp_path / "trainer", 0))
    assert_same(parameters(again), parameters(learner), rtol=0, atol=0)
    again.close()
    learner.checkpoints.begin(no_folder / "trainer", 1)
    learner.close()  # and the end of the run meets no error of it


def test_an_exported_checkpoint_is_a_hub_folder_with_the_trainers_weights(uninterrupted, tmp_path):
    target = tmp_path / "exports" / "policy"
    export_checkpoint(uninterrupted["start"].folder, ModelConfig(hf_assets_path=str(MODEL)), target)
    assert_same(load_file(target / "model.safetensors"), uninterrupted["weights"], rtol=0, atol=0)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto").state_dict()
    assert_same(
        {name: loaded[name] for name in uninterrupted["weights"]},
        uninterrupted["weights"],
        rtol=0,
        atol=0,
    )
    assert AutoTokenizer.from_pretrained(target).encode("<|im_end|>")
    assert os.listdir(tmp_path / "exports") == ["policy"], "nothing is left beside it"


# ---- adapters

LORA = dict(lora=LoRA.Config(rank=4), lr=1e-2)


@pytest.fixture(scope="module")
def adapted(one_rank, tmp_path_factory) -> dict:
    """Three steps of adapters, saved after the second."""
    folder = tmp_path_factory.mktemp("adapted")
    learner = learner_of(folder, **LORA)
    step(learner, 1), step(learner, 2)
    weights, start = parameters(learner), saved(learner, folder / "trainer", 2)
    third = step(learner, 3)
    policy = learner.checkpoints.export(3, rank=0)
    scores = learner.score(TOKENS)
    learner.close()
    return dict(
        start=start,
        weights=weights,
        third=third,
        final=parameters(learner),
        policy=policy,
        scores=scores,
    )


def test_adapters_that_add_nothing_leave_the_policy_as_it_is_bit_for_bit(one_rank, tmp_path):
    plain, learner = learner_of(tmp_path), learner_of(tmp_path, **LORA)
    assert (learner.score(TOKENS) == plain.score(TOKENS)).all()


def test_a_run_of_adapters_goes_on_bit_for_bit_and_saves_nothing_of_the_base(
    adapted, one_rank, tmp_path
):
    learner = learner_of(tmp_path, start=adapted["start"], **LORA)
    assert_same(parameters(learner), adapted["weights"], rtol=0, atol=0)
    assert step(learner, 3) == adapted["third"]
    assert_same(parameters(learner), adapted["final"], rtol=0, atol=0)
    learner.close()
    written = (
        FileSystemReader(adapted["start"].folder / "step-2").read_metadata().state_dict_metadata
    )
    assert any("lora_a" in name for name in written)
    assert not [name for name in written if "weight" in name and "lora" not in name], "of the base"


def test_adapters_of_another_base_are_refused(adapted, one_rank, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(MODEL, base)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match="another base"):
        learner_of(tmp_path, model=str(base), start=adapted["start"], **LORA)


def test_a_run_of_adapters_does_not_begin_with_a_whole_model(
    adapted, uninterrupted, one_rank, tmp_path
):
    start = replace(uninterrupted["start"], weights_only=True)
    with pytest.raises(RunError, match="goes on from adapters"):
        learner_of(tmp_path, start=start, **LORA)
    learner = learner_of(tmp_path, start=replace(adapted["start"], weights_only=True), **LORA)
    assert_same(parameters(learner), adapted["weights"], rtol=0, atol=0)
    learner.close()


def test_what_adapters_end_as_is_a_hub_folder_and_a_peft_folder(
    adapted, one_rank, tmp_path, reference
):
    np.testing.assert_allclose(
        reference(str(adapted["policy"]), TOKENS), adapted["scores"], rtol=0, atol=1e-4
    )
    init = LoRA.Config(rank=4, init_from=str(adapted["policy"] / "adapter"))
    learner = learner_of(tmp_path, lora=init)
    assert (learner.score(TOKENS) == adapted["scores"]).all()
    export_checkpoint(
        adapted["start"].folder,
        ModelConfig(hf_assets_path=str(MODEL)),
        tmp_path / "merged",
        lora=LORA["lora"],
    )
    export_checkpoint(
        adapted["start"].folder,
        ModelConfig(hf_assets_path=str(MODEL)),
        tmp_path / "alone",
        lora=LORA["lora"],
        adapter=True,
    )
    assert {file.name for file in (tmp_path / "alone").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    for name, tensor in adapted["weights"].items():
        torch.testing.assert_close(
            tensor, alone[name] * (4 if "lora_B" in name else 1), rtol=0, atol=0
        )
    merged = learner_of(tmp_path, model=str(tmp_path / "merged"))
    served = learner_of(tmp_path, start=adapted["start"], **LORA)
    np.testing.assert_allclose(merged.score(TOKENS), served.score(TOKENS), rtol=0, atol=1e-4)


def test_the_reference_of_adapters_is_the_base_for_the_price_of_adapters(one_rank, tmp_path):
    plain = learner_of(tmp_path)
    learner = learner_of(tmp_path, reference=ReferenceConfig(kind="lagged", every=100), **LORA)
    step(learner, 1)
    with learner.trained[""].reference.in_place():
        assert (learner.score(TOKENS) == plain.score(TOKENS)).all()
    assert np.abs(learner.score(TOKENS) - plain.score(TOKENS)).max() > 1e-3
    assert sum(tensor.numel() for tensor in held(learner).values()) < 50_000


# ---- several adapters

NAMES = ("code", "math")
APART = dict(
    lora=LoRA.Config(rank=4),
    lr=1e-2,
    reference=ReferenceConfig(kind="lagged", every=2, kl_coef=0.1),
)
TRAINED = {1: NAMES, 2: ("math",), 3: NAMES}
"""By step: those that have samples in it."""


def adapted_samples(name: str, number: int, adapter: str) -> list[TrainingSample]:
    samples = [*samples_of(seed=10 * number + len(name)), *tree_samples()]
    return [
        replace(sample, adapter=adapter, task_name=name)
        for sample in samples
        if name == "code" or len(sample) % 3
    ]


def step_of_several(learner: Learner, number: int) -> dict[str, float]:
    """Rows of each adapter that has samples in the step, which lie mixed."""
    own = [adapted_samples(name, number, name) for name in TRAINED[number]]
    mixed = [sample for pair in zip_longest(*own) for sample in pair if sample is not None]
    return (
        accumulate(learner, LAYOUTS["rows of another length, three at a time"], mixed)
        | learner.optim_step()
    )


def test_two_adapters_that_are_trained_together_are_those_that_are_trained_alone_bit_for_bit(
    one_rank, tmp_path
):
    """The second step has no sample of one of them: no momentum, decay or schedule moves it."""
    together, metrics, held = learner_of(tmp_path, adapters=NAMES, **APART), [], []
    for number in TRAINED:
        metrics.append(step_of_several(together, number))
        held.append(together.adapters.peft())
        if number == 2:
            start = saved(together, tmp_path / "trainer", 2)
    assert all(torch.equal(held[0]["code"][key], held[1]["code"][key]) for key in held[0]["code"])
    for name in NAMES:
        alone, numbers = (
            learner_of(tmp_path, **APART),
            [number for number in TRAINED if name in TRAINED[number]],
        )
        for number in numbers:
            samples = adapted_samples(name, number, "")
            own = (
                accumulate(alone, LAYOUTS["rows of another length, three at a time"], samples)
                | alone.optim_step()
            )
            for metric in ("train/grad_norm", "train/lr", "reference/version"):
                assert metrics[number - 1][f"{name}/{metric}"] == own[metric]
        assert_same(held[2][name], alone.adapters.peft()[""], rtol=0, atol=0)
        assert (together.score(TOKENS, name) == alone.score(TOKENS)).all()
    (canary, other), second = together.canary(TOKENS).reshape(2, -1), together.score(TOKENS, "math")
    assert (other == second).all() and np.abs(canary - other).max() > 0.1
    # What is published, saved and written of each is its own.
    published = parameters(together)
    assert len(published) == 2 * len(held[2]["code"]) and list(compat.adapters_in(published)) == [
        "code",
        "math",
    ]
    for name in NAMES:
        for key, tensor in held[2][name].items():
            assert torch.equal(published[f"{name}/{key}"], tensor * (4 if "lora_B" in key else 1))
    resumed = learner_of(tmp_path, start=start, adapters=NAMES, **APART)
    assert step_of_several(resumed, 3) == metrics[2]
    for name in NAMES:
        assert_same(resumed.adapters.peft()[name], held[2][name], rtol=0, atol=0)
    begun = learner_of(tmp_path, start=replace(start, weights_only=True), adapters=NAMES, **APART)
    policy, exported = together.checkpoints.export(3, rank=0), tmp_path / "exported"
    model = ModelConfig(hf_assets_path=str(MODEL))
    export_checkpoint(start.folder, model, exported, lora=APART["lora"], names=NAMES, adapter=True)
    for name in NAMES:
        assert_same(begun.adapters.peft()[name], held[1][name], rtol=0, atol=0)
        assert_same(
            load_file(policy / name / "adapter" / "adapter_model.safetensors"),
            held[2][name],
            rtol=0,
            atol=0,
        )
        assert_same(
            load_file(exported / name / "adapter_model.safetensors"), held[1][name], rtol=0, atol=0
        )
        merged = learner_of(tmp_path, model=str(policy / name))
        np.testing.assert_allclose(
            merged.score(TOKENS), together.score(TOKENS, name), rtol=0, atol=1e-4
        )
    with pytest.raises(RunError, match="adapters, of its names"):
        learner_of(
            tmp_path, start=replace(start, weights_only=True), adapters=("code", "physics"), **APART
        )


# ---- another number of ranks


def held(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        name: full(tensor) for name, tensor in learner.trained[""].reference.state_dict().items()
    }


@pytest.mark.parametrize("kind", ["ema", "lagged"])
def test_a_reference_follows_the_policy_is_saved_with_it_and_changes_it_by_its_term_alone(
    one_rank, tmp_path, kind
):
    config = ReferenceConfig(kind=kind, decay=0.75, every=2, kl_coef=0.1)
    learner = learner_of(tmp_path, reference=config)
    policies, references, metrics = [], [], []
    for number in range(4):
        if number == 3:
            start = saved(learner, tmp_path / "trainer", 3)
        policies.append(
            {name: full(parameter) for name, parameter in learner.model.named_parameters()}
        )
        references.append(held(learner))
        metrics.append(
            accumulate(learner, LAYOUTS["long rows"], samples_of(seed=number))
            | learner.optim_step()
        )
    # Before the first step the two are one; 0.75 and 0.25 by hand after it.
    assert metrics[0]["reference/kl"] == 0 and metrics[3]["reference/kl"] > 0
    assert [entry["reference/version"] for entry in metrics] == (
        [0, 1, 2, 3] if kind == "ema" else [0, 0, 2, 2]
    )
    expected = policies[0]
    for number in range(4):
        if kind == "ema":
            expected = {
                name: 0.75 * tensor + 0.25 * policies[number][name]
                for name, tensor in expected.items()
            }
        else:
            expected = policies[number // 2 * 2]
        found = {name: references[number][name] for name in expected}
        assert_same(found, expected, rtol=0, atol=1e-6 if kind == "ema" else 0)
    resumed = learner_of(tmp_path, start=start, reference=config)
    assert_same(held(resumed), references[3], rtol=0, atol=0)
    again = accumulate(resumed, LAYOUTS["long rows"], samples_of(seed=3)) | resumed.optim_step()
    assert again == metrics[3]
    assert_same(parameters(resumed), parameters(learner), rtol=0, atol=0)
    assert_same(held(resumed), held(learner), rtol=0, atol=0)
    # Without a weight it only measures: the policy is that of a run without a reference, bit for bit.
    steps = []
    for reference in (None, ReferenceConfig(kind=kind)):
        other = learner_of(tmp_path, start=start, reference=reference)
        accumulate(other, LAYOUTS["long rows"], samples_of(seed=3))
        other.optim_step()
        steps.append(parameters(other))
    assert_same(steps[0], steps[1], rtol=0, atol=0)
    new = learner_of(tmp_path, start=replace(start, weights_only=True), reference=config)
    assert_same(
        {name: full(p) for name, p in new.model.named_parameters()}, policies[3], rtol=0, atol=0
    )
    assert_same(held(new), policies[3] | {"version": torch.tensor(0)}, rtol=0, atol=0)


def work_of_a_rank(rank: int, folder: str, start: TrainerStart, fused_model: str) -> None:
    torch.set_num_threads(1)
    set_up_process()
    init_process_group(device="cpu", rank=rank, world_size=2, url=f"file://{folder}/store")
    learner = learner_of(folder, start=start)
    result = {"weights": parameters(learner), "third": step(learner, 3)}
    saved(learner, Path(folder) / "trainer", 3)
    learner.close()
    fused = learner_of(f"{folder}/fused", model=fused_config(fused_model))
    result["fused"] = parameters(fused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "redistribute", None)  # a rank that gathers a tensor fails
        saved(fused, Path(folder) / "fused", 1)
    fused.close()
    torch.save(result, f"{folder}/result-{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_go_on_from_one_and_one_from_two(uninterrupted, one_rank, tmp_path, fused_model):
    run_ranks(work_of_a_rank, str(tmp_path), uninterrupted["start"], fused_model, count=2)
    wide = torch.load(tmp_path / "result-0.pt", weights_only=False)
    assert_same(wide["weights"], uninterrupted["weights"], rtol=0, atol=0)
    assert wide["third"] == pytest.approx(uninterrupted["metrics"][2], rel=1e-4)
    learner = learner_of(
        tmp_path / "narrow", start=TrainerStart(folder=tmp_path / "trainer", step=3)
    )
    # Rounding of a gradient near 0 may turn Adam's step around: by at most the learning rate of 1e-3.
    assert_same(parameters(learner), uninterrupted["final"], rtol=0, atol=1e-4)
    learner.close()
    start = TrainerStart(folder=tmp_path / "fused", step=1)
    fused = learner_of(tmp_path / "one", model=fused_config(fused_model), start=start)
    assert_same(parameters(fused), wide["fused"], rtol=0, atol=0)
    policy = fused.checkpoints.export(1, rank=0)
    fused.close()
    export_checkpoint(start.folder, fused_config(fused_model), tmp_path / "exported")
    for folder in (policy, tmp_path / "exported"):
        (file,) = folder.glob("*.safetensors")
        assert_same(load_file(file), wide["fused"], rtol=0, atol=0)
