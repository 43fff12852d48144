"""One rank of the policy's training: model, optimizer, schedule, checkpoint. Synchronous; it knows tokens and weights only."""

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import (
    ActivationCheckpointing,
    FullAC,
    SelectiveAC,
)
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
from torchtitan.experiments.rl.compat.torch import compile_each_shape
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.losses import (
    LossConfig,
    MetricSums,
    advantage_sums,
    compute_loss,
    count_denominators,
    mismatch_metrics,
    reference_kl,
    step_denominators,
    with_normalized_advantages,
)
from torchtitan.experiments.rl.losses.loss import mismatch_of
from torchtitan.experiments.rl.losses.variants import loss_name
from torchtitan.experiments.rl.models.attention import divide_attention
from torchtitan.experiments.rl.models.decoder import (
    Policy,
    RowShapes,
    batch_logprobs,
    conditioned_logprobs,
    needed_places,
)
from torchtitan.experiments.rl.models.experts import (
    check_routes,
    count_load,
    load_metrics,
    mixtures_of,
    recorded,
)
from torchtitan.experiments.rl.models.lora import Adapters, of_adapter
from torchtitan.experiments.rl.models.policy import ModelConfig, decoder_config, policy_spec
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.training.checkpoints import Trained, TrainerCheckpoints, TrainerStart
from torchtitan.experiments.rl.training.config import TrainerConfig
from torchtitan.experiments.rl.training.recompute import CompiledFullAC
from torchtitan.experiments.rl.training.reference import Reference
from torchtitan.experiments.rl.types import DataParallel, LossDenominators, TrainingBatch
from torchtitan.experiments.rl.weights.publisher import Tensors
from torchtitan.experiments.rl.weights.snapshot import stack_name
from torchtitan.tools.utils import get_peak_flops


class HubTensors:
    """A model's parameters by hub name, and its experts as stacks (``weights/snapshot.py``).

    Sharded ones are DTensors: of a stack a rank holds some experts, or rows of each. A tied head is
    its embedding and not named again.

    They are made a part at a time: the embedding, a layer, the last norm or the head. torchtitan
    gathers the fused queries, keys and values of what it converts: of one layer here, where a whole
    state dict holds those of all layers at once.
    """

    def __init__(
        self,
        model: Any,
        to_hub: Callable[[dict[str, Any]], dict[str, Any]],
        adapters: Adapters | None = None,
    ):
        """
        Args:
            to_hub: converts a part of torchtitan's state dict.
            adapters: they are added to the weights that are given.
        """
        layers = {f"layers.{name}.": layer for name, layer in model.layers.named_children()}
        others = {f"{name}.": child for name, child in model.named_children() if name != "layers"}
        self._parts = {"tok_embeddings.": others.pop("tok_embeddings."), **layers, **others}
        self._to_hub = to_hub
        self._adapters = adapters
        self._stack_names: dict[str, str] = {}
        """Published name of each stack of experts, by torchtitan's."""

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each as it is when it is read, until the next is. Collective: every rank reads all."""
        for prefix, part in self._parts.items():
            with nullcontext() if self._adapters is None else self._adapters.merged(part):
                yield from self._items_of(prefix, part)

    def _items_of(self, prefix: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a part of the model. What was gathered for them goes with the last."""
        state = part.state_dict(prefix=prefix)
        held = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
        stacks = {name: tensor for name, tensor in held.items() if tensor.ndim == 3}
        others = {name: tensor for name, tensor in held.items() if tensor.ndim != 3}
        yield from self._to_hub(others).items()
        for name, stack in stacks.items():
            if name not in self._stack_names:
                experts = self._to_hub({name: torch.empty(stack.shape, device="meta")})
                self._stack_names[name] = stack_name(next(iter(experts)))
            yield self._stack_names[name], stack


A100 = 312e12


class ModelFlops:
    """Adds up the model FLOPs of batches, forward and backward; ``lap_utilisation`` is their share of the peak.

    As torchtitan counts them: 6 for each parameter that a token is multiplied with, and attention by the number of places that
    a token sees. Recomputation, padding and what prefix trees spare are no model FLOPs.
    """

    def __init__(self, *, per_token: float, per_place: float, peak: float | None, ranks: int = 1):
        """
        Args:
            per_place: of attention, for a token and one place of a sample of uniform length, as in torchtitan's ``seq_len``.
            peak: FLOPs a second of this rank's device in bfloat16; None where it is not known.
            ranks: that share the work on a batch (tensor parallelism).
        """
        self._per_token, self._per_place, self._peak, self._ranks = (
            per_token,
            per_place,
            peak,
            ranks,
        )
        self._done, self._since = 0.0, time.monotonic()

    @classmethod
    def of(
        cls, config: Any, model: torch.nn.Module, *, peak: float | None, ranks: int
    ) -> "ModelFlops":
        """A frozen weight has no gradient of its own: 4 for each.

        Args:
            config: torchtitan's of ``model``.
        """
        _, none = config.get_nparams_and_flops(model, 0)
        _, one = config.get_nparams_and_flops(model, 1)
        trained = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        frozen = (
            0
            if all(parameter.requires_grad for parameter in model.parameters())
            else none / 6 - trained
        )
        return cls(per_token=none - 2 * frozen, per_place=one - none, peak=peak, ranks=ranks)

    def add(self, batch: TrainingBatch) -> None:
        """A batch that was computed, forward and backward."""
        self._done += self.of_batch(batch)

    def of_batch(self, batch: TrainingBatch) -> float:
        """By convention each token of a sample of n tokens counts n places. Position p counts 2p + 1: their mean is n."""
        real = batch.task_ids >= 0
        places = batch.positions
        if batch.trees is not None:
            real, places = batch.trees.mask_to_trees(real), batch.trees.positions
        tokens, seen = int(real.sum()), int((2 * places[real].long() + 1).sum())
        return self._per_token * tokens + self._per_place * seen

    def lap_utilisation(self) -> float | None:
        """Share of the peak since the last call, waiting included; None where the peak is not known."""
        now, done = time.monotonic(), self._done
        seconds, self._since, self._done = now - self._since, now, 0.0
        return (
            None
            if self._peak is None or seconds <= 0
            else done / self._ranks / seconds / self._peak
        )


def peak_flops(device: torch.device) -> float | None:
    """FLOPs a second of a GPU in bfloat16, as torchtitan knows them; None of one that it does not know, and of a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = get_peak_flops(name)
    # torchtitan gives a device that it does not know the peak of an A100.
    return None if found == A100 and "A100" not in name else found


class Learner:
    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: ModelConfig,
        device: Literal["cpu", "cuda"],
        max_seq_len: int,
        rows: int = 1,
        total_steps: int,
        run_dir: str,
        start: TrainerStart | None = None,
        dtype: torch.dtype | None = None,
        serve_adapters: bool = True,
        adapters: Sequence[str] = ("",),
        on_microbatch: Callable[[], None] = lambda: None,
    ):
        """Needs a process set up by ``process.setup``, and a process group; every rank builds one.

        Args:
            max_seq_len: the longest row, in tokens.
            rows: the most that a microbatch has. On CUDA batches are padded to few shapes.
            start: a checkpoint to go on from; None: the weights of the model's hub folder.
            dtype: overrides config.dtype (tests: float64).
            serve_adapters: with config.lora: the generators hold the base, and a version is its adapters. Otherwise it is the
                whole model, the adapters added to the base in float32.
            adapters: names of those that tasks train, each with its own optimizer, schedule and reference.
            on_microbatch: called when a microbatch begins.
        """
        self.config, self._on_microbatch = config, on_microbatch
        self.rank = dist.get_rank()
        parallelism = config.parallelism.for_torchtitan()
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        set_spmd_backend(parallelism.spmd_backend)  # of the process: modules ask for it
        self._shards, self._shares_experts = dims.dp_shard, dims.ep_enabled
        # Ranks that are sent different rows (torchtitan's dp_replicate x dp_shard), and those that compute the same rows. None:
        # this rank alone.
        other_rows, same_rows, context = (
            dims.get_optional_mesh("batch"),
            dims.get_optional_mesh("tp"),
            None,
        )
        divided = config.parallelism.context_parallel_degree
        if divided > 1:  # there is no tensor parallelism then
            ranks = init_device_mesh(
                device,
                (dist.get_world_size() // divided, divided),
                mesh_dim_names=("rows", "context"),
            )
            other_rows = ranks["rows"]
            same_rows = context = ranks["context"]
        self._data_parallel_group = None if other_rows is None else other_rows.get_group()
        self._same_rows = None if same_rows is None else same_rows.get_group()
        self.data_parallel = DataParallel(rank=0, size=1)
        if other_rows is not None:
            self.data_parallel = DataParallel(
                rank=other_rows.get_local_rank(), size=other_rows.size()
            )
        self._device = (
            torch.device("cpu")
            if device == "cpu"
            else torch.device("cuda", torch.cuda.current_device())
        )
        spec = policy_spec(
            model,
            device=device,
            max_seq_len=max_seq_len,
            chunk_tokens=config.logprob_chunk_tokens,
            lora=config.lora,
        )
        if config.compile is not None and config.compile.float8 != "off":
            from torchtitan.components.quantization import (
                Float8LinearConverter,
            )  # its torchao takes seconds

            Float8LinearConverter.Config(
                recipe_name=config.compile.float8,
                filter_fqns=["lm_head"],
                emulate=device == "cpu",
                model_compile_enabled=True,
            ).build().convert(decoder_config(spec))
        if (
            dims.tp_enabled or dims.ep_enabled
        ):  # torchtitan's own entry, which sets how each part of the model is sharded
            decoder_config(spec).update_from_config(config=SimpleNamespace(parallelism=parallelism))
        dtype = dtype or getattr(torch, config.dtype)
        with torch.device("meta"):
            self.model = spec.model.build().to(dtype)
        self.flops = ModelFlops.of(
            spec.model, self.model, peak=peak_flops(self._device), ranks=dims.tp * divided
        )
        if context is not None:
            self.model.context = context
            divide_attention(self.model, context)
        parallelize(
            self.model,
            spec.parallelize_fn,
            dims=dims,
            parallelism=parallelism,
            config=config,
            dtype=dtype,
            device=self._device,
            run_dir=run_dir,
        )
        materialize(self.model, self._device, parameters_on_cpu=config.enable_cpu_offload)
        self.model.train()
        self._policy: Policy = self.model
        self._row_shapes = RowShapes.of(rows, max_seq_len)
        if device == "cuda" or config.compile is not None:
            self._policy = functools.partial(self._row_shapes.compute, self.model)
        assert spec.state_dict_adapter is not None, "every family has one"
        adapter = spec.state_dict_adapter(spec.model, model.hf_assets_path)
        self.adapters = (
            Adapters(self.model, spec, config.lora, adapters) if config.lora is not None else None
        )
        self.hub_tensors: Tensors = HubTensors(self.model, adapter.to_hf, self.adapters)
        """What a version is."""
        if self.adapters is not None and serve_adapters:
            self.hub_tensors = self.adapters
        options = config.optimizer
        adamw = default_adamw(
            lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
        )
        self.trained: dict[str, Trained] = {}
        """By adapter; of a model without, or with one that has no name, at ""."""
        for name in adapters:
            optimizers = adamw.build(model_parts=[self.model])
            self.trained[name] = Trained(
                optimizers=optimizers,
                lr_schedulers=config.lr_scheduler.build(
                    optimizers=optimizers, training_steps=total_steps
                ),
                reference=Reference(config.reference, self.model)
                if config.reference is not None
                else None,
            )
        self._moving: list[str] = []
        """Adapters that have a gradient."""
        self.checkpoints = TrainerCheckpoints(
            model=self.model,
            trained=self.trained,
            adapter=adapter,
            hub_folder=Path(model.hf_assets_path),
            run_dir=Path(run_dir),
            start=start,
            adapters=self.adapters,
            page_locked=device == "cuda",
        )
        if start is None or start.weights_only:
            for name, trained in self.trained.items():
                if trained.reference is not None:
                    self._activate(name)
                    trained.reference.restart()
        self.steps_taken: int | None = start.step if start is not None else 0
        """Optimizer steps behind the weights; None while one is taken, and for good if it failed in its middle."""
        if self._device.type == "cuda" or config.compile is not None:
            self._compile_shapes()
        self._logprobs: list[torch.Tensor] = []

    def _compile_shapes(self) -> None:
        """Compile each pass of a training step at every row shape, and the canary's. Collective.

        A pass that compiled during a step would stall it on every rank.
        """
        count_load(self.model, self._device)
        for rows, length in self._row_shapes.shapes:
            with self._traced(f"compile {rows} x {length}"):
                self._run_passes(rows, length)
        self.model.zero_grad()
        self.canary(np.zeros(2, np.int32))

    def _run_passes(self, rows: int, length: int) -> None:
        """Compute rows of one shape in each of the ways that `_accumulate` does, for a gradient of 0."""
        tokens = torch.zeros((rows, length), dtype=torch.int32, device=self._device)
        positions = torch.arange(length, dtype=torch.int32, device=self._device).expand(
            rows, length
        )
        compute = functools.partial(
            self._policy,
            tokens,
            positions,
            torch.ones_like(tokens, dtype=torch.float32),
            torch.arange(1, length, device=self._device),
            real=torch.ones_like(tokens, dtype=torch.bool),
        )
        routes = None
        if self.config.router_replay != "off":
            routers = [moe.router for moe in mixtures_of(self.model).values()]
            choice = torch.arange(routers[0].top_k, dtype=torch.int16, device=self._device)
            routes = choice.expand(rows, length, len(routers), -1)
            with torch.no_grad():
                compute(routes=None)
        if self.config.reference is not None:
            with torch.no_grad():
                compute(routes=routes)
        logprobs, _ = compute(routes=routes)
        (logprobs.sum() * 0).backward()

    def of_first_rank(self, content: bytes) -> bytes:
        """What the first of the ranks that compute the same rows was given. Collective."""
        held = [content]
        if self._same_rows is not None:
            dist.broadcast_object_list(held, group=self._same_rows, group_src=0)
        return held[0]

    def logprobs(self) -> list[np.ndarray]:
        """float32 [B, L] of each microbatch of the last step: log-probabilities of sampled tokens, 0 elsewhere."""
        return [values.numpy() for values in self._logprobs]

    def forward_backward(
        self, microbatches: list[TrainingBatch], policy_version: int
    ) -> MetricSums:
        """Accumulate the gradient of one optimizer step. Collective.

        Args:
            microbatches: the step's rows of this rank's data-parallel coordinate; every rank has the same number. Those of an
                adapter lie side by side: it is a step of its own, whose denominators count them alone.
            policy_version: version of the weights being trained, for metrics by policy age.

        Returns:
            Metrics of the whole step, the same on every rank.
        """
        sums, logprobs, self._moving = MetricSums(), list[torch.Tensor](), []
        for name, own in groupby(microbatches, key=lambda microbatch: microbatch.adapter):
            self._activate(name)
            self._moving.append(name)
            found, kept = self._accumulate([*own], self.trained[name].reference, policy_version)
            sums.merge(found)
            logprobs += kept
        self._logprobs = [
            values.float().masked_fill(~microbatch.loss_mask, 0)
            for values, microbatch in zip(logprobs, microbatches, strict=True)
        ]
        return sums

    def _activate(self, name: str) -> None:
        if self.adapters is not None:
            self.adapters.activate(name)

    def _accumulate(
        self, microbatches: list[TrainingBatch], reference: Reference | None, policy_version: int
    ) -> tuple[MetricSums, list[torch.Tensor]]:
        """The gradient of what the model computes with now. Returns metrics of all ranks, and log-probabilities [B, L] of each
        microbatch."""
        replay = self.config.router_replay != "off"
        for microbatch in microbatches if replay else ():
            check_routes(microbatch, self.model)
        denominators = self._denominators(microbatches)
        advantages = (
            self._summed(map(advantage_sums, microbatches))
            if self.config.loss.normalize_advantages
            else None
        )
        # All of it before the first: a copy to a GPU, or a question to it, waits for what it computes. 62 bytes a token.
        batches = [microbatch.to(self._device) for microbatch in microbatches]
        places = [needed_places(microbatch).to(self._device) for microbatch in microbatches]
        references, conditioned = self._reference_logprobs(reference, batches, places)
        sums, kept, own_logprobs = MetricSums(), list[torch.Tensor](), None
        count_load(self.model, self._device)
        if replay:
            with self._traced("forward without replay"), torch.no_grad():
                own_logprobs = batch_logprobs(self._policy, batches[0], places[0])[0]
        for index, batch in enumerate(batches):
            self._on_microbatch()
            synchronise_gradients(
                self.model, shards=self._shards, last=index == len(microbatches) - 1
            )
            if conditioned:
                batch = replace(batch, ref_logprobs=conditioned[index])
            if advantages is not None:
                batch = with_normalized_advantages(batch, advantages)
            with self._traced("forward"):
                logprobs, entropy = batch_logprobs(
                    self._policy, batch, places[index], replay=replay
                )
                loss, metrics = compute_loss(logprobs, batch, denominators, self.config.loss)
                if self.config.reference is not None:
                    coefficient = self.config.reference.kl_coef
                    distance, own = reference_kl(
                        logprobs, references[index], batch, denominators, coefficient
                    )
                    loss = loss + distance
                    metrics.merge(own)
            with self._traced("backward"):
                loss.backward()
            kept.append(logprobs.detach())
            metrics.add_mean("policy/entropy", entropy, batch.loss_mask)
            sums.merge(metrics)
        for index, microbatch in enumerate(microbatches):
            if conditioned:
                microbatch = replace(microbatch, ref_logprobs=conditioned[index].cpu())
            kept[index] = kept[index].cpu()
            sums.merge(mismatch_metrics(kept[index], microbatch, policy_version))
            if replay:
                followed = (microbatch.task_ids >= 0) & (
                    F.pad(microbatch.positions[:, 1:], (0, 1)) > 0
                )
                sums.add_mean("experts/unrecorded", ~recorded(microbatch), followed)
            self.flops.add(microbatch)
        if own_logprobs is not None:
            for name, values in {"own": own_logprobs.cpu(), "replayed": kept[0]}.items():
                _, kl, sampled = mismatch_of(values, microbatches[0])
                sums.add_mean(f"experts/mismatch_kl_{name}", kl, sampled)
        if self._data_parallel_group is not None:
            sums.all_reduce(self._data_parallel_group)
        for name, value in load_metrics(self.model).items():
            sums.add_mean(name, torch.tensor([value]), torch.tensor([True]))
        return sums, kept

    def _reference_logprobs(
        self, reference: Reference | None, batches: list[TrainingBatch], places: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """[B, L] of each microbatch, under the reference: log-probabilities of its tokens, and its ref_logprobs where samples
        have reference_ids. None where there is no reference, or are no such samples. Collective.

        Raises:
            RunError: samples have reference_ids, and there is no reference.
        """
        conditioned: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        if reference is None:
            if any(batch.conditioned is not None for batch in batches):
                raise RunError(
                    "an algorithm leaves its reference to the trainer, which has none: set trainer.reference"
                )
            return found, conditioned
        with self._traced("reference"), reference.in_place():
            for batch, needed in zip(batches, places, strict=True):
                self._on_microbatch()
                found.append(
                    batch_logprobs(
                        self._policy, batch, needed, replay=self.config.router_replay != "off"
                    )[0]
                )
                if batch.conditioned is not None:
                    conditioned.append(conditioned_logprobs(self._policy, batch))
        return found, conditioned

    def optim_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, clear gradients. Collective.

        Raises:
            RunError: the gradient is not finite; the step is not taken.
        """
        with self._traced("optimizer"):
            return self._optim_step()

    def _optim_step(self) -> dict[str, float]:
        metrics, clip = dict[str, Any](), self.config.optimizer.max_norm
        for name in self._moving:
            self._activate(name)
            norm = clip_grad_norm_(
                self.model.parameters(), clip, foreach=True, ep_enabled=self._shares_experts
            ).item()
            check_finite("gradient norm", norm, self.config.loss)
            metrics[of_adapter(name, "train/grad_norm")] = norm
        taken, self.steps_taken = self.steps_taken, None
        for name in self._moving:
            self._activate(name)
            trained = self.trained[name]
            metrics[of_adapter(name, "train/lr")] = trained.lr_schedulers.schedulers[
                0
            ].get_last_lr()[0]
            trained.optimizers.step()
            trained.lr_schedulers.step()
            trained.optimizers.zero_grad()
            if self.adapters is not None:
                self.adapters.hold()
            if trained.reference is not None:
                metrics[of_adapter(name, "reference/version")] = trained.reference.version
                trained.reference.follow(trained.lr_schedulers.schedulers[0].last_epoch)
        self.steps_taken = None if taken is None else taken + 1
        return metrics

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [adapters * L]: ``score`` with each adapter in turn. Collective."""
        return np.concatenate([self.score(token_ids, name) for name in self.trained])

    @torch.no_grad()
    def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        """float32 [L]: log-probabilities at temperature 1, entry 0 is 0. Collective: every rank scores the same tokens."""
        self._activate(adapter)
        tokens = torch.from_numpy(token_ids.astype(np.int32))[None].to(self._device)
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=self._device)[None]
        temperatures = torch.ones(tokens.shape, device=self._device)
        logprobs, _ = self._policy(tokens, positions, temperatures, positions != 0)
        return logprobs[0].float().cpu().numpy()

    def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder, and return it; None where the config says not to. Collective."""
        return (
            self.checkpoints.export(step, rank=self.rank) if self.config.save_final_model else None
        )

    def close(self) -> None:
        self.checkpoints.close()

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        """A span of a profile. A GPU works beside this thread: while one is recorded, the span waits for it."""
        with trace.span(name):
            yield
            if trace.recording() and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

    def _denominators(self, microbatches: list[TrainingBatch]) -> LossDenominators:
        wanted = self.config.loss.denominators
        return step_denominators(
            self._summed(count_denominators(batch, wanted) for batch in microbatches), wanted
        )

    def _summed(self, of_microbatches: Iterable[torch.Tensor]) -> torch.Tensor:
        """Sums over the whole step: all microbatches, all data-parallel ranks. Collective."""
        sums = torch.stack([*of_microbatches]).sum(0).to(self._device)
        if self._data_parallel_group is not None:
            dist.all_reduce(sums, group=self._data_parallel_group)
        return sums


def check_finite(what: str, value: float, loss: LossConfig) -> None:
    """
    Args:
        what: "loss" or "gradient norm".

    Raises:
        RunError: the value is not finite. What enters a batch is finite, so the error names the loss.
    """
    if not math.isfinite(value):
        raise RunError(
            f"{what} is {value}: the step was not taken; look at {loss_name(loss.rl)} and the learning rate"
        )


def parallelize(
    model: Any,
    parallelize_fn: Callable[..., Any],
    *,
    dims: ParallelDims,
    parallelism: ParallelismConfig,
    config: TrainerConfig,
    dtype: torch.dtype,
    device: torch.device,
    run_dir: str,
) -> None:
    """Divide the model over the ranks, by torchtitan's function for its family.

    A rank that is alone and computes in the dtype of its parameters gets no FSDP, which would copy all of them in each forward
    pass for nothing.

    Args:
        dtype: of the parameters.
    """
    policies: dict[str, ActivationCheckpointing.Config | None] = {
        "none": None,
        "selective": SelectiveAC.Config(),
        "full": FullAC.Config(),
    }
    activation_checkpoint = policies[config.activation_checkpoint]
    compiled = config.compile is not None
    compile_config = CompileConfig(enable=False)
    if config.compile is not None:
        compile_config = CompileConfig(
            enable=True, enable_async_tensor_parallel=config.compile.async_tensor_parallel
        )
    if compiled and config.activation_checkpoint == "full":
        # It compiles the blocks itself, before it wraps them.
        activation_checkpoint = CompiledFullAC.Config(
            compile_config=compile_config, parallel_dims=dims
        )
        compile_config = CompileConfig(enable=False)
    model.lm_head.compile_chunks = compiled
    if compiled or device.type == "cuda":
        compile_each_shape()
    computes_as_held = getattr(torch, config.mixed_precision_param) == dtype
    if dims.world_size == 1 and computes_as_held and not config.enable_cpu_offload:
        if activation_checkpoint is not None:
            activation_checkpoint.build(dump_folder=run_dir).apply(model)
        if compile_config.enable:
            apply_compile(model, compile_config=compile_config, parallel_dims=dims)
        return
    parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(
            mixed_precision_param=config.mixed_precision_param,
            enable_cpu_offload=config.enable_cpu_offload,
        ),
        parallelism=parallelism,
        compile_config=compile_config,
        ac_config=activation_checkpoint,
        dump_folder=run_dir,
    )
    if device.type == "cpu":
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                # gloo has no averaging reduce-scatter.
                module.set_force_sum_reduction_for_comms(True)


def materialize(model: Any, device: torch.device, *, parameters_on_cpu: bool) -> None:
    """Give a model that was built on the meta device its memory, and fill its buffers.

    Args:
        parameters_on_cpu: FSDP keeps them there and copies a layer at a time to ``device``. Buffers are used where they are.
    """
    model.to_empty(device=torch.device("cpu") if parameters_on_cpu else device)
    with torch.no_grad():
        model.init_states(buffer_device=device)


def synchronise_gradients(model: Any, *, shards: int, last: bool) -> None:
    """Say what the next backward pass does with gradients.

    Shards reduce them in each microbatch: a rank that kept them until the last would hold the whole model's gradient, in
    float32. Copies of the model add theirs up once a step.

    Args:
        shards: ranks that share a copy of the model.
        last: it is the step's last microbatch.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or shards > 1)
        model.set_requires_all_reduce(last)
