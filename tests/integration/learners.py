"""Learners on fixed samples: how tests make them, what they ask of them, and how they compare it."""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig

from tests.integration.models import MODEL
from torchtitan.experiments.rl.batching.batcher import Batcher
from torchtitan.experiments.rl.models import logprob_head, transformers_decoder
from torchtitan.experiments.rl.models.experts import mixtures_of
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.training import model as building
from torchtitan.experiments.rl.training.checkpoints import TrainerStart
from torchtitan.experiments.rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.types import TrainingSample
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    SnapshotReader,
    digest,
    named,
    volume,
)

LAYOUTS = {
    "short rows": dict(row_length=64, rows_per_microbatch=1),
    "long rows": dict(row_length=512, rows_per_microbatch=8),
    "rows of another length, three at a time": dict(row_length=150, rows_per_microbatch=3),
}
TOKENS = np.arange(3, 40, dtype=np.int32)
REFERENCE_LAYOUT = dict(row_length=512, rows_per_microbatch=1)
LAYERS, EXPERTS, K = 4, 8, 2
"""Of the tiny mixture."""


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
                generator_logprobs=np.where(sampled, random.normal(-8, 1, length), 0).astype(
                    np.float32
                ),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                advantages=np.where(sampled, random.normal(), 0).astype(np.float32),
                ce_weights=np.where(~sampled & (np.arange(length) > 1), 0.1, 0).astype(np.float32),
                temperature=float(random.choice([0.7, 1.0, 1.3])),
                task_name="test",
                rollout_id=str(index),
            )
        )
    return samples


def tree_samples() -> list[TrainingSample]:
    """The fixed samples, as completions of one prompt: they become prefix trees."""
    samples = samples_of()
    prompt = np.random.default_rng(9).integers(0, 768, 60).astype(np.int32)
    for sample in samples:
        sample.temperature = 1.0
        sample.token_ids[: len(sample) // 2] = prompt[: len(sample) // 2]
    return samples


def own_routes(learner: Learner, tokens: np.ndarray) -> np.ndarray:
    """uint8 [L, layers, k]: what the learner's routers choose, in their order."""
    found: list[torch.Tensor] = []
    hooks = [
        moe.router.register_forward_hook(lambda *of: found.append(of[2][1]))
        for moe in mixtures_of(learner.model).values()
    ]
    learner.score(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 2)[0].numpy().astype(np.uint8)


def routed_samples(learner: Learner | None, seed: int = 0, **options) -> list[TrainingSample]:
    """The fixed samples with the experts that the learner would take, or with random ones."""
    random, samples = np.random.default_rng(seed), samples_of(**options)
    for sample in samples:
        others = random.permuted(
            np.tile(np.arange(EXPERTS, dtype=np.uint8), (len(sample), LAYERS, 1)), axis=-1
        )[..., :K]
        sample.routes = others if learner is None else own_routes(learner, sample.token_ids)
    return samples


def conditioned_samples(*, given=None) -> list[TrainingSample]:
    """The fixed samples, distilled: every third one from what the reference says behind another prompt.

    Args:
        given: scores these tokens where no reference of the trainer is to do it.
    """
    random = np.random.default_rng(5)
    samples = samples_of()
    for index, sample in enumerate(samples):
        sample.ref_kl_weights = sample.loss_mask.astype(np.float32)
        sample.rl_weights = np.zeros(len(sample), np.float32)
        sample.ref_logprobs = np.where(
            sample.loss_mask, random.normal(-8, 1, len(sample)), 0
        ).astype(np.float32)
        tail = sample.token_ids[len(sample) // 2 :]  # sampled
        ids = np.concatenate([random.integers(0, 768, 3 + index).astype(np.int32), tail])
        sample.temperature = 1.0
        if index % 3:
            continue
        sample.reference_ids, sample.ref_logprobs = ids, None
        if given is not None:
            scores = given(ids)[-len(tail) :]
            sample.reference_ids = None
            sample.ref_logprobs = np.concatenate(
                [np.zeros(len(sample) - len(tail), np.float32), scores]
            )
    return samples


def learner_of(
    run_dir,
    *,
    model: str | ModelConfig = str(MODEL),
    dtype=None,
    lr: float = 1e-3,
    optimizer: Literal["adamw", "muon"] = "adamw",
    start: TrainerStart | None = None,
    adapters: Sequence[str] = ("",),
    **config,
) -> Learner:
    model = model if isinstance(model, ModelConfig) else ModelConfig(hf_assets_path=model)
    config = TrainerConfig(optimizer=OptimizerConfig(name=optimizer, lr=lr), **config)
    config.lr_scheduler.warmup_steps = 0
    sizes = dict(max_seq_len=512, total_steps=10)
    return Learner(
        config,
        model=model,
        device="cpu",
        **sizes,
        run_dir=str(run_dir),
        start=start,
        dtype=dtype,
        adapters=adapters,
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def by_hub_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return published tensors as a hub folder has them, each expert of a stack by itself."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "*" not in name:
            found[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            found[name.replace("*", str(expert))] = own
    return found


def parameters(learner: Learner) -> dict[str, torch.Tensor]:
    """Return the whole parameters by hub name. Collective."""
    return by_hub_name({name: full(tensor) for name, tensor in learner.hub_tensors.items()})


def accumulate(learner: Learner, layout: dict, samples: list[TrainingSample]) -> dict[str, float]:
    plan = Batcher.Config(**layout).build().plan(samples, learner.data_parallel.size)
    return learner.forward_backward(plan.microbatches[learner.data_parallel.rank], 0).compute()


def loss_and_gradient(
    learner: Learner, layout: dict, samples=None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one step on the fixed samples; the learner's own gradient is cleared."""
    loss = accumulate(learner, layout, samples or samples_of())["loss/total"]
    held = learner.model.named_parameters()
    gradient = {name: full(parameter.grad) for name, parameter in held if parameter.requires_grad}
    learner.trained[""].optimizers.zero_grad()
    return loss, {
        name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in gradient.items()
    }


def step(learner: Learner) -> dict[str, torch.Tensor]:
    """Parameters after one optimizer step on the fixed samples."""
    accumulate(learner, LAYOUTS["long rows"], samples_of())
    learner.optim_step()
    return parameters(learner)


def assert_same(left, right, *, rtol: float, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name],
            right[name],
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_same_after_adam(left, right) -> None:
    """Compare parameters after one step of Adam with a learning rate of 1e-3.

    They are 1e-5 apart at most. Adam divides each gradient by its own size, so rounding of a
    gradient near 0, which differs between kinds of processors, may move a single entry further: one
    in 10,000, and by 3e-5 at most.
    """
    assert_same(left, right, rtol=0, atol=3e-5)
    for name in left:
        further = int(((left[name] - right[name]).abs() > 1e-5).sum())
        assert further <= max(1, left[name].numel() // 10_000), f"{name}: {further} entries"


def fused_config(path: str) -> ModelConfig:
    return ModelConfig(hf_assets_path=path, flavor="qwen3/debugmodel")


def compile_by(backend: str, setattr: Callable[..., None]) -> None:
    """Have learners that are made from now on compile with another backend of torch than Inductor."""
    setattr(building, "CompileConfig", functools.partial(CompileConfig, backend=backend))
    compiled = functools.partial(torch.compile, backend=backend)
    setattr(logprob_head, "_compiled", functools.cache(compiled))


def compute_in_float64(monkeypatch_setattr) -> None:
    """FSDP casts parameters to the configured compute dtype, which names no float64: let float32 mean that."""
    from torchtitan.models.qwen3 import parallelize

    for module in (parallelize, transformers_decoder):
        dtypes = module.TORCH_DTYPE_MAP | {"float32": torch.float64}
        monkeypatch_setattr(module, "TORCH_DTYPE_MAP", dtypes)


def one_step(learner: Learner) -> dict:
    """Everything that one step on the fixed samples makes, and what it was made from."""
    plan = (
        Batcher.Config(**LAYOUTS["long rows"])
        .build()
        .plan(samples_of(), learner.data_parallel.size)
    )
    microbatches = plan.microbatches[learner.data_parallel.rank]
    metrics = learner.forward_backward(microbatches, 0).compute()
    denominators = learner._denominators(microbatches)
    metrics |= learner.optim_step()
    coordinate = learner.data_parallel
    return dict(
        metrics=metrics,
        denominators=denominators,
        parameters=parameters(learner),
        coordinate=coordinate,
    )


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    """Return what this rank wrote into shared memory; on the first rank what all wrote together, by hub name."""
    publisher = SnapshotPublisher(rank=learner.rank, host="here", dtype=torch.float32)
    publisher.write(1, learner.hub_tensors)
    found = by_hub_name(compare_paths(publisher, learner))
    return (
        {name: view.clone() for name, view in publisher._targets[1].items()}
        if learner.rank
        else found
    )


def read(publisher: SnapshotPublisher) -> dict[str, torch.Tensor]:
    """What a generator of the publisher's host finds."""
    manifest = Manifest(
        version=1,
        shapes=publisher._shapes,
        dtype=torch.float32,
        parts=publisher._parts[1],
        publication="",
        digests={},
    )
    return {name: tensor.clone() for name, tensor in SnapshotReader().tensors(manifest).items()}


def compare_paths(host: SnapshotPublisher, learner: Learner) -> dict[str, torch.Tensor]:
    """Ranks that keep their parts on their own devices publish the digests and the bytes of ``host``, which are returned.
    Collective."""
    kept = SnapshotPublisher(
        rank=learner.rank, host="here", dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", None)  # a rank that gathers a tensor fails
        kept.write(1, learner.hub_tensors)
        assert kept._digests(1) == host._digests(1)  # returns when every rank has written
    own = list(kept._targets[1].values())
    assert (
        sum(buffer.bytes.numel() for buffer in kept._buffers)
        < sum(part.nbytes + 64 for part in own) + 1
    ), "its own parts"
    found, wanted = read(kept), read(host)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    dist.barrier()  # the buffers are gone with the publisher that made them
    return wanted


def snapshot_of_two_hosts(learner: Learner) -> dict:
    """What the ranks publish where one half of them is on host "a" and the other on "b"; on the first rank, put together."""
    host = "ab"[learner.rank * 2 // dist.get_world_size()]
    publisher = SnapshotPublisher(rank=learner.rank, host=host, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", None)  # a rank that gathers a tensor fails
        publisher.write(1, learner.hub_tensors)
        digests = publisher._digests(1)  # returns when every rank has written
    found = {}
    if learner.rank == 0:
        tensors = read(publisher)
        found["tensors"] = by_hub_name(tensors)
        nbytes: Counter[str] = Counter()
        for host, _, shards in publisher._parts[1]:
            nbytes[host] += 4 * sum(map(volume, shards.values()))
        found["nbytes"] = nbytes | {"whole": sum(tensor.nbytes for tensor in tensors.values())}
        found["seen"] = named((name, int(digest(tensor))) for name, tensor in tensors.items())
        found["published"] = digests
    dist.barrier()  # the buffers are gone with the publisher that made them
    return found


def assert_same_step(result, expected) -> None:
    assert result[0] == pytest.approx(expected[0], rel=1e-6)
    scale = max(gradient.abs().max() for gradient in expected[1].values())
    assert scale > 1e-3
    assert_same(
        result[1], expected[1], rtol=1e-6, atol=5e-8 * float(scale)
    )  # torchtitan rotates queries and keys in float32
