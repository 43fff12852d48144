"""A real engine, the versions published to it, and the checks of generator and controller, with transformers as the trainer."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.sabotage.kinds import Delivery, Sabotage, Tensors
from torchtitan.experiments.rl.compat import vllm as compat
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.generation.engine import (
    GenerateRequest,
    GenerateResult,
    LoadReport,
    Request,
    Result,
    ScoreRequest,
    check_held,
)
from torchtitan.experiments.rl.generation.vllm import worker
from torchtitan.experiments.rl.generation.vllm.engine import VLLMEngineConfig
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.watch.mismatch import MismatchAlarm
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    RankParts,
    SharedBuffer,
    WeightReceipt,
    buffer_bytes,
    digest,
    fingerprint,
    named,
    stack_name,
    views,
    whole,
)
from torchtitan.experiments.rl.weights.sync import CANARY_TOKENS, CanaryBound, CopiedOut, WeightSync

VOCABULARY = 96
_TEXT = np.random.default_rng(0).integers(0, VOCABULARY, CANARY_TOKENS).astype(np.int32)
RANK = 4
"""Of adapters."""
COMPLETIONS, TOKENS = 4, 6
"""Sampled from a version for the alarm."""


def read_model(folder: str) -> tuple[PreTrainedModel, Tensors]:
    """The model of a hub folder with one file, and the file's tensors."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), load_file(
        Path(folder, "model.safetensors")
    )


def make_mixture(folder: str) -> tuple[PreTrainedModel, Tensors]:
    """As ``make_model``, of a mixture of four experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return read_model(folder)


def stacked(tensors: Tensors) -> Tensors:
    """Return a checkpoint's tensors as they are published: the experts of a layer as three stacks."""
    found: dict[str, list[torch.Tensor]] = {}
    experts = sorted(
        tensors, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]
    )
    for name in experts:
        found.setdefault(stack_name(name), []).append(tensors[name])
    return {
        name: torch.stack(found[name]) if "*" in name else found[name][0]
        for name in map(stack_name, tensors)
    }


def of_transformers(tensors: Tensors) -> Tensors:
    """Return published tensors as transformers' models have them: each expert's gate above its up."""
    found = {name: tensor for name, tensor in tensors.items() if "*" not in name}
    for name, gate in tensors.items():
        if "*.gate_proj" in name:
            up, down = (tensors[name.replace("gate", other)] for other in ("up", "down"))
            prefix = name.removesuffix("*.gate_proj.weight")
            found[f"{prefix}gate_up_proj"] = torch.cat([gate, up], 1)
            found[f"{prefix}down_proj"] = down
    return found


def make_model(folder: str) -> tuple[PreTrainedModel, Tensors]:
    """Write a random checkpoint that vLLM can serve; returns the model, and the checkpoint's tensors."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():  # vLLM's Qwen3 has no bias here
        for layer in model.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    model.save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    tensors = {
        name: value for name, value in load_file(file).items() if not name.endswith("o_proj.bias")
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return model, tensors


def adapters_of(weights: Tensors, seed: int) -> Tensors:
    """Random ones, by PEFT's names."""
    random, found = torch.Generator().manual_seed(seed), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            out, width = weight.shape
            for part, shape in (("A", (RANK, width)), ("B", (out, RANK))):
                found[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] = (
                    torch.randn(shape, generator=random) / 8
                )
    return found


def merged(base: Tensors, version: Tensors) -> Tensors:
    """The weights that a version is: itself, or the base and its adapters."""
    if not compat.adapters_in(version):
        return version
    found = dict(base)
    for name in version:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if f"{module}.weight" in base:
            a, b = (
                version[f"base_model.model.{module}.lora_{part}.weight"].float() for part in "AB"
            )
            found[f"{module}.weight"] = base[f"{module}.weight"].float() + b @ a
    return found


class World:
    """``deliver`` publishes the next version to two replicas, which are one engine that loads twice."""

    def __init__(
        self,
        folder: str,
        dtype: Literal["float32", "bfloat16"],
        seed: int,
        *,
        make: Callable[[str], tuple[PreTrainedModel, Tensors]] = make_model,
        adapters: bool = False,
    ):
        """
        Args:
            make: makes the model in ``folder``, or reads the one that is there.
            adapters: a version is an adapter of each matrix of the layers, and not the whole model.
        """
        model, tensors = make(folder)
        tensors = stacked(tensors)
        config = VLLMEngineConfig(max_model_len=64, max_num_seqs=COMPLETIONS, dtype=dtype)
        self.engine = config.build(
            model_path=folder, device="cpu", adapters={"": RANK} if adapters else {}
        )
        self._base = tensors
        if adapters:
            tensors = adapters_of(tensors, seed)
        self._trainer = model.to(config.torch_dtype)
        self._alarm, self._bound = MismatchAlarm(dtype, exact=True), CanaryBound(dtype)
        self._random = torch.Generator().manual_seed(seed)
        self._master = {name: value.float().clone() for name, value in tensors.items()}
        self._shards, self._dtype = (
            {name: whole(tensor.shape) for name, tensor in tensors.items()},
            config.torch_dtype,
        )
        self._buffers = [
            SharedBuffer.create(buffer_bytes(self._shards, self._dtype)) for _ in range(2)
        ]
        self._published: list[Manifest] = []
        self.names = set(tensors)
        self.version = 0
        self._publish(1e-4)
        self._load(self._published[-1])

    def deliver(self, sabotage: Sabotage | None, lr: float, *, sampled: bool = False) -> str:
        """Deliver the next version to two replicas. Returns the error that ends the run, "" if there is none.

        Args:
            sampled: the alarm sees tokens that are sampled from the version. Without a sabotage the canary is scored in any
                case.
        """
        self._publish(lr)
        old, published = self._published
        buffer = self._buffers[self.version % 2]
        written = self._views(self.version)
        delivery = Delivery(
            published=published,
            views=written,
            before={name: view.clone() for name, view in self._views(self.version - 1).items()},
            published_before=old,
            engine=self.engine._engine,
        )
        intended = buffer.bytes.clone()
        self._trainer.load_state_dict(of_transformers(merged(self._base, written)), strict=False)

        def replica(wrongly: Sabotage | None, canary: np.ndarray) -> WeightReceipt:
            """As Generator.update_weights: what the store has, a load, and the check of what is held."""
            with wrongly(delivery) if wrongly else _honest() as found:
                report = self._load(found or published)
            return WeightReceipt(
                version=(found or published).version,
                fingerprint=fingerprint(report.digests),
                canary_logprobs=self._scored(canary)
                if sabotage is None
                else np.zeros(len(canary), np.float32),
                verify_s=0.0,
                reload_s=0.0,
            )

        async def answer(value: Any) -> Any:
            return value

        async def receipts(version: int, canary_token_ids: np.ndarray) -> dict[int, WeightReceipt]:
            second = replica(
                sabotage, canary_token_ids
            )  # first, so that the engine holds the version before
            return {0: replica(None, canary_token_ids), 1: second}

        def proof() -> tuple[str, np.ndarray]:
            tokens = sync.canary_token_ids
            canary = (
                self._trainers(tokens) if sabotage is None else np.zeros(len(tokens), np.float32)
            )
            return fingerprint(published.digests), canary

        rank0 = SimpleNamespace(
            proof=SimpleNamespace(choose=lambda: answer(proof())),
        )
        trainer = SimpleNamespace(size=lambda dim: 1, slice=lambda procs: rank0)
        generators = cast(Any, SimpleNamespace(update_weights=receipts))
        sync = WeightSync(trainer, generators, text=_TEXT, bound=self._bound)
        try:
            asyncio.run(sync.update(CopiedOut(version=self.version, seconds=0.0)))
            if sampled:
                self._alarm.check(self.version, {"mismatch/replica/0/age/0": self._mismatch()})
        except RunError as error:
            return str(error)
        finally:
            buffer.bytes.copy_(intended)
            gc.collect()  # a failed update's frames hold copies of the model
        return ""

    def _publish(self, lr: float) -> None:
        self.version += 1
        written = self._views(self.version)
        for name, view in written.items():
            self._master[name] += lr * (2 * torch.rand(view.shape, generator=self._random) - 1)
            view.copy_(self._master[name])
        manifest = Manifest(
            version=self.version,
            shapes={name: tuple(view.shape) for name, view in written.items()},
            dtype=self._dtype,
            parts=(RankParts("here", self._buffers[self.version % 2].path, self._shards),),
            publication=f"publication {self.version}",
            digests=named((name, int(digest(view))) for name, view in written.items()),
        )
        self._published = [*self._published[-1:], manifest]

    def _views(self, version: int) -> Tensors:
        return views(self._buffers[version % 2].bytes, self._shards, self._dtype)

    def _load(self, published: Manifest) -> LoadReport:
        # Of every other version digests are taken beside the load, as those of a large model are.
        worker.BESIDE_BYTES = 2**18 * (published.version % 2)
        report = self.engine.load(published, recompute=False)
        check_held(report, published.version, published.digests)
        return report

    def _answers(self, requests: list[Request]) -> list[Result]:
        for request in requests:
            assert self.engine.add(request) is None
        results = []
        while self.engine.busy:
            results += self.engine.step()
        return results

    def _scored(self, token_ids: np.ndarray) -> np.ndarray:
        (result,) = self._answers([ScoreRequest(request_id=0, token_ids=token_ids)])
        return cast(Any, result).logprobs

    @torch.no_grad()
    def _trainers(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [L]: the log-probability of each token but the first, as the trainer computes it."""
        tokens = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        logprobs = self._trainer(tokens).logits[0, :-1].float().log_softmax(-1)
        return np.concatenate(
            [[0.0], logprobs.gather(1, tokens[0, 1:, None]).squeeze(1).numpy()]
        ).astype(np.float32)

    def _mismatch(self) -> float:
        """Mean distance, in nats, of what engine and trainer say of tokens that are sampled now."""
        prompts = (
            np.random.default_rng(self.version)
            .integers(0, VOCABULARY, (COMPLETIONS, TOKENS))
            .astype(np.int32)
        )
        sampling = SamplingConfig(max_tokens=TOKENS)
        results = self._answers(
            [
                GenerateRequest(
                    request_id=i,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    seed=i,
                    stop_token_ids=[],
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        distances = []
        for result in results:
            assert (
                isinstance(result, GenerateResult)
                and (result.completion.policy_versions == self.version).all()
            )
            sampled = result.completion
            theirs = self._trainers(
                np.concatenate([prompts[result.request_id], sampled.token_ids])
            )[TOKENS:]
            distances.append(np.abs(theirs - sampled.logprobs))
        return float(np.mean(distances))

    def both_ways_differ(self) -> str:
        """How an engine that copies a version differs from one that loads it by vLLM's own reload; "" if it does not."""
        model, names = (
            self.engine._engine.model_executor.driver_worker.worker.get_model(),
            set(self._master),
        )
        if not compat.copying_suffices(model, list(compat.held_weights(model, names)), names):
            return "this model is not loaded by copying"
        tokens = np.random.default_rng(self.version).integers(0, VOCABULARY, 50).astype(np.int32)
        wanted, scored = self._master, []
        for way in (nullcontext, reloaded_by_vllm):
            self._master = {name: value.clone() for name, value in wanted.items()}
            self._publish(1e-2)
            self._load(
                self._published[-1]
            )  # the engine holds other weights, of which a load may leave none
            self._master = wanted
            self._publish(0.0)
            with way():
                self._load(self._published[-1])
            scored.append(self._scored(tokens))
        return (
            ""
            if np.array_equal(*scored)
            else f"by up to {np.abs(scored[0] - scored[1]).max()} nats"
        )


@contextmanager
def reloaded_by_vllm() -> Iterator[None]:
    """Loads in it are vLLM's own, which a run has with tensor parallelism and on GPUs."""
    suffices = compat.copying_suffices
    compat.copying_suffices = lambda *arguments: False
    try:
        yield
    finally:
        compat.copying_suffices = suffices


@contextmanager
def _honest() -> Iterator[None]:
    yield None
