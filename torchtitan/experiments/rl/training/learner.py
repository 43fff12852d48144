"""One rank of the policy's training: model, optimizer, schedule, reference, checkpoint.

    forward_backward   microbatches ──▶ gradient, metrics
    optim_step         gradient     ──▶ weights, schedule, reference
    hub_tensors        weights      ──▶ the tensors of a published version (an attribute)

It knows token streams, losses and weights, and no task, env or algorithm. Methods are collective,
so that every rank of the trainer calls them together, but for `logprobs` and `close`.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.distributed.utils import clip_grad_norm_
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
from torchtitan.experiments.rl.models.decoder import (
    Policy,
    RowShapes,
    batch_logprobs,
    conditioned_logprobs,
    needed_indices,
)
from torchtitan.experiments.rl.models.experts import (
    check_routes,
    count_load,
    load_metrics,
    mixtures_of,
    recorded,
)
from torchtitan.experiments.rl.models.lora import Adapters, of_adapter
from torchtitan.experiments.rl.models.policy import ModelConfig
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.training.checkpoints import Trained, TrainerCheckpoints, TrainerStart
from torchtitan.experiments.rl.training.config import TrainerConfig
from torchtitan.experiments.rl.training.hub_tensors import HubTensors
from torchtitan.experiments.rl.training.model import Ranks, build_policy, synchronise_gradients
from torchtitan.experiments.rl.training.optimizers import build_optimizers
from torchtitan.experiments.rl.training.reference import Reference
from torchtitan.experiments.rl.types import LossDenominators, TrainingBatch
from torchtitan.experiments.rl.weights.publisher import Tensors


@dataclass(kw_only=True, slots=True)
class StepInputs:
    """Inputs of the forward passes of one adapter's step, on the rank's device.

    They are copied before the first pass that has a gradient. Between passes a copy to a GPU, or an
    ``item()``, would wait for the kernels that are queued. A token takes 62 bytes, without routes.
    """

    batches: list[TrainingBatch]
    indices: list[torch.Tensor]
    """Indices of each batch that a loss or a metric reads (`needed_indices`)."""
    denominators: LossDenominators
    advantages: torch.Tensor | None
    """Sums of all ranks' advantages, to normalize them by; None if they stay as they are."""
    reference_logprobs: list[torch.Tensor]
    """Log-probabilities of each batch under the trainer's reference, [B, L]. Empty if there is
    none."""


class Learner:
    """Computes gradients and optimizer steps on this rank's rows."""

    def __init__(  # noqa: PLR0913 - what the trainer's actor is told
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
        """Build the model and load its weights, in a process of a process group. Collective.

        `init_process_group` (training/trainer.py) has joined the group and chosen the device.

        Args:
            max_seq_len: length of the longest row, in tokens.
            rows: maximum number of rows of a microbatch. Compiled, and on CUDA,
                batches are padded to few shapes.
            total_steps: number of optimizer steps of the run, by which the schedule decays.
            start: checkpoint to continue from; None for the weights of the model's hub folder.
            dtype: dtype of the parameters in place of ``config.dtype``; tests use float64.
            serve_adapters: True if generators hold the base and are sent the adapters of
                ``config.lora``. False if they are sent the whole model, with the adapters added to
                the base in float32.
            adapters: names of the adapters that tasks train, each with an optimizer, a schedule and
                a reference of its own. "" stands for a run's only adapter, or for the whole model.
            on_microbatch: called when a microbatch begins.
        """
        self.config = config
        self._on_microbatch = on_microbatch
        self.rank = dist.get_rank()
        self._device = torch.device("cpu")
        if device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())

        ranks = Ranks.of(config, self._device)
        self.data_parallel = ranks.data_parallel
        self._data_parallel_group = ranks.data_parallel_group
        self._same_rows_group = ranks.same_rows_group
        self._shards = ranks.dims.dp_shard
        self._shares_experts = ranks.dims.ep_enabled

        built = build_policy(
            config,
            model,
            ranks,
            self._device,
            max_seq_len=max_seq_len,
            dtype=dtype or getattr(torch, config.dtype),
            run_dir=run_dir,
        )
        self.model = built.model
        self.flops = built.flops
        self._row_shapes = RowShapes.of(rows, max_seq_len)
        computes_few_shapes = device == "cuda" or config.compile is not None
        self._policy: Policy = self.model
        if computes_few_shapes:
            self._policy = functools.partial(self._row_shapes.compute, self.model)

        self.adapters: Adapters | None = None
        if config.lora is not None:
            self.adapters = Adapters(self.model, built.spec, config.lora, adapters)
        assert built.spec.state_dict_adapter is not None, "every family has one"
        names = built.spec.state_dict_adapter(built.spec.model, model.hf_assets_path)
        self.hub_tensors: Tensors
        """Tensors that a version of the weights consists of."""
        if self.adapters is not None and serve_adapters:
            self.hub_tensors = self.adapters
        else:
            self.hub_tensors = HubTensors(self.model, names.to_hf, self.adapters)

        self.trained = {name: self._build_trained(total_steps) for name in adapters}
        """Optimizer, schedule and reference of each adapter; of a model without named adapters, at
        ""."""
        self.checkpoints = TrainerCheckpoints(
            model=self.model,
            trained=self.trained,
            adapter=names,
            hub_folder=Path(model.hf_assets_path),
            run_dir=Path(run_dir),
            start=start,
            adapters=self.adapters,
            page_locked=device == "cuda",
        )
        if start is None or start.weights_only:
            self._restart_references()
        self.steps_taken: int | None = start.step if start is not None else 0
        """Number of optimizer steps behind the weights. None while one is taken, and from then on
        if it failed in its middle."""
        self._with_gradient: list[str] = []
        """Adapters that the last `forward_backward` gave a gradient."""
        self._logprobs: list[torch.Tensor] = []
        """Log-probabilities of the last step's microbatches."""
        if computes_few_shapes:
            self._compile_shapes()

    def _build_trained(self, total_steps: int) -> Trained:
        """Build optimizer, schedule and reference of the trained parameters."""
        optimizers = build_optimizers(self.config.optimizer, self.model)
        reference = None
        if self.config.reference is not None:
            reference = Reference(self.config.reference, self.model)
        return Trained(
            optimizers=optimizers,
            lr_schedulers=self.config.lr_scheduler.build(
                optimizers=optimizers, training_steps=total_steps
            ),
            reference=reference,
        )

    def _restart_references(self) -> None:
        for name, trained in self.trained.items():
            if trained.reference is not None:
                self._activate(name)
                trained.reference.restart()

    def close(self) -> None:
        self.checkpoints.close()

    # ---- the gradient of one step

    def broadcast_rows(self, content: bytes) -> bytes:
        """Return the rows of the first of the ranks that compute the same. Collective.

        Args:
            content: pickled rows on that rank; ignored on the others.
        """
        contents = [content]
        if self._same_rows_group is not None:
            dist.broadcast_object_list(contents, group=self._same_rows_group, group_src=0)
        return contents[0]

    def forward_backward(
        self, microbatches: list[TrainingBatch], policy_version: int
    ) -> MetricSums:
        """Accumulate the gradient of one optimizer step. Collective.

        Args:
            microbatches: the step's rows of this data-parallel rank. Every rank has the same number
                of them. Those of an adapter lie side by side: they are a step of its own, whose
                denominators count them alone.
            policy_version: version of the weights that are trained, for metrics by policy age.

        Returns:
            Metrics of the whole step, the same on every rank.

        Raises:
            RunError: samples lack the routes or the reference that the loss needs. The run ends
                with it: a gradient that was begun is not cleared.
        """
        sums = MetricSums()
        self._with_gradient = []
        self._logprobs = []
        for name, group in groupby(microbatches, key=lambda microbatch: microbatch.adapter):
            assert name not in self._with_gradient, "an adapter's microbatches lie side by side"
            own = list(group)
            self._activate(name)
            self._with_gradient.append(name)
            metrics, logprobs = self._accumulate(own, self.trained[name].reference, policy_version)
            sums.merge(metrics)
            self._logprobs += [
                values.float().masked_fill(~microbatch.loss_mask, 0)
                for values, microbatch in zip(logprobs, own, strict=True)
            ]
        return sums

    def logprobs(self) -> list[np.ndarray]:
        """Return the log-probabilities of the last step's microbatches, each float32 [B, L].

        They are 0 on tokens that were not sampled.
        """
        return [values.numpy() for values in self._logprobs]

    def _accumulate(
        self, microbatches: list[TrainingBatch], reference: Reference | None, policy_version: int
    ) -> tuple[MetricSums, list[torch.Tensor]]:
        """Accumulate the gradient of the adapter that is active.

        Returns:
            Metrics of all ranks, and log-probabilities [B, L] of each microbatch, on the CPU.
        """
        if self._replays_routes:
            for microbatch in microbatches:
                check_routes(microbatch, self.model)
        inputs = self._prepare(microbatches, reference)
        count_load(self.model, self._device)
        unreplayed = self._logprobs_without_replay(inputs) if self._replays_routes else None

        sums = MetricSums()
        computed = []
        for index in range(len(microbatches)):
            self._on_microbatch()
            last = index == len(microbatches) - 1
            synchronise_gradients(self.model, shards=self._shards, last=last)
            values, metrics = self._compute(inputs, index)
            computed.append(values)
            sums.merge(metrics)

        # From here on the GPU is waited for.
        logprobs = [values.cpu() for values in computed]
        for values, microbatch, batch in zip(logprobs, microbatches, inputs.batches, strict=True):
            if microbatch.conditioned is not None:
                # `_ask_reference` has set these in the copy on the device alone.
                microbatch = replace(microbatch, ref_logprobs=batch.ref_logprobs.cpu())
            sums.merge(mismatch_metrics(values, microbatch, policy_version))
            self.flops.add(microbatch)
        if unreplayed is not None:
            sums.merge(_replay_metrics(microbatches, unreplayed.cpu(), logprobs[0]))
        if self._data_parallel_group is not None:
            sums.all_reduce(self._data_parallel_group)
        for name, value in load_metrics(self.model).items():  # they are of all ranks already
            sums.add_mean(name, torch.tensor([value]), torch.tensor([True]))
        return sums, logprobs

    def _prepare(
        self, microbatches: list[TrainingBatch], reference: Reference | None
    ) -> StepInputs:
        """Count over the whole step, copy to the device, and ask the reference. Collective."""
        advantages = None
        if self.config.loss.normalize_advantages:
            advantages = self._summed(map(advantage_sums, microbatches))
        inputs = StepInputs(
            batches=[microbatch.to(self._device) for microbatch in microbatches],
            indices=[needed_indices(microbatch).to(self._device) for microbatch in microbatches],
            denominators=self._denominators(microbatches),
            advantages=advantages,
            reference_logprobs=[],
        )
        if reference is not None:
            self._ask_reference(inputs, reference)
        elif any(batch.conditioned is not None for batch in microbatches):
            raise RunError(
                "an algorithm leaves its reference to the trainer, which has none: set "
                "trainer.reference"
            )
        return inputs

    def _ask_reference(self, inputs: StepInputs, reference: Reference) -> None:
        """Set the batches' log-probabilities under the trainer's reference.

        They are those of the batches' own tokens, and ``ref_logprobs`` of samples with
        ``reference_ids``.
        """
        with self._traced("reference"), reference.in_place():
            for index, batch in enumerate(inputs.batches):
                self._on_microbatch()
                logprobs, _ = batch_logprobs(
                    self._policy, batch, inputs.indices[index], replay=self._replays_routes
                )
                inputs.reference_logprobs.append(logprobs)
                if batch.conditioned is not None:
                    inputs.batches[index] = replace(
                        batch, ref_logprobs=conditioned_logprobs(self._policy, batch)
                    )

    def _logprobs_without_replay(self, inputs: StepInputs) -> torch.Tensor:
        """Return the first batch's log-probabilities where the routers choose the experts."""
        with self._traced("forward without replay"), torch.no_grad():
            logprobs, _ = batch_logprobs(self._policy, inputs.batches[0], inputs.indices[0])
        return logprobs

    def _compute(self, inputs: StepInputs, index: int) -> tuple[torch.Tensor, MetricSums]:
        """Add the gradient of one batch. Return its log-probabilities [B, L] and its metrics."""
        batch = inputs.batches[index]
        if inputs.advantages is not None:
            batch = with_normalized_advantages(batch, inputs.advantages)
        with self._traced("forward"):
            logprobs, entropy = batch_logprobs(
                self._policy, batch, inputs.indices[index], replay=self._replays_routes
            )
            loss, metrics = compute_loss(logprobs, batch, inputs.denominators, self.config.loss)
            if self.config.reference is not None:
                distance, distance_metrics = reference_kl(
                    logprobs,
                    inputs.reference_logprobs[index],
                    batch,
                    inputs.denominators,
                    self.config.reference.kl_coef,
                )
                loss = loss + distance
                metrics.merge(distance_metrics)
        with self._traced("backward"):
            loss.backward()
        metrics.add_mean("policy/entropy", entropy, batch.loss_mask)
        return logprobs.detach(), metrics

    def _denominators(self, microbatches: list[TrainingBatch]) -> LossDenominators:
        wanted = self.config.loss.denominators
        counts = self._summed(count_denominators(batch, wanted) for batch in microbatches)
        return step_denominators(counts, wanted)

    def _summed(self, counts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Sum the counts of this rank's microbatches, then those of all data-parallel ranks."""
        sums = torch.stack([*counts]).sum(0).to(self._device)
        if self._data_parallel_group is not None:
            dist.all_reduce(sums, group=self._data_parallel_group)
        return sums

    # ---- the optimizer's step

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient, take the step, advance the schedule. Collective.

        Raises:
            RunError: the gradient is not finite; the step is not taken.
        """
        with self._traced("optimizer"):
            metrics = self._clip()
            steps_taken = self.steps_taken
            self.steps_taken = None  # until the step is whole
            for name in self._with_gradient:
                metrics |= self._take_step(name)
            self.steps_taken = None if steps_taken is None else steps_taken + 1
        return metrics

    def _clip(self) -> dict[str, float]:
        metrics = {}
        for name in self._with_gradient:
            self._activate(name)
            norm = clip_grad_norm_(
                self.model.parameters(),
                self.config.optimizer.max_norm,
                foreach=True,
                ep_enabled=self._shares_experts,
            ).item()
            check_finite("gradient norm", norm, self.config.loss)
            metrics[of_adapter(name, "train/grad_norm")] = norm
        return metrics

    def _take_step(self, name: str) -> dict[str, float]:
        self._activate(name)
        trained = self.trained[name]
        schedule = trained.lr_schedulers.schedulers[0]
        metrics = {of_adapter(name, "train/lr"): float(schedule.get_last_lr()[0])}
        trained.optimizers.step()
        trained.lr_schedulers.step()
        trained.optimizers.zero_grad()
        if self.adapters is not None:
            self.adapters.save_active()
        if trained.reference is not None:
            # The version that this step was compared with.
            metrics[of_adapter(name, "reference/version")] = trained.reference.version
            trained.reference.follow(schedule.last_epoch)  # number of steps of this adapter
        return metrics

    # ---- scoring and saving

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return `score` with each adapter in turn, float32 [adapters * L]. Collective."""
        return np.concatenate([self.score(token_ids, name) for name in self.trained])

    @torch.no_grad()
    def score(self, token_ids: np.ndarray, adapter: str = "") -> np.ndarray:
        """Return the tokens' log-probabilities at temperature 1, float32 [L]. Collective.

        Every rank scores the same tokens. Entry 0 is 0: nothing predicts the first token.
        """
        self._activate(adapter)
        tokens = torch.from_numpy(token_ids.astype(np.int32))[None].to(self._device)
        positions = torch.arange(tokens.shape[1], dtype=torch.int32, device=self._device)[None]
        temperatures = torch.ones(tokens.shape, device=self._device)
        # Needed are all tokens but the first.
        logprobs, _ = self._policy(tokens, positions, temperatures, positions != 0)
        return logprobs[0].float().cpu().numpy()

    def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder. Collective.

        Returns:
            The folder; None if ``save_final_model`` is False.
        """
        if not self.config.save_final_model:
            return None
        return self.checkpoints.export(step, rank=self.rank)

    # ---- compilation, before the first step

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
        """Compute rows of one shape in each way that a step does, for a gradient of 0."""
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
        if self._replays_routes:
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

    # ---- small things

    @property
    def _replays_routes(self) -> bool:
        """True if a mixture's tokens are computed by the experts that the generator took."""
        return self.config.router_replay != "off"

    def _activate(self, name: str) -> None:
        if self.adapters is not None:
            self.adapters.activate(name)

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        """Record a span of a profile.

        A GPU works beside this thread. While a profile is recorded, the span waits for the GPU.
        """
        with trace.span(name):
            yield
            if trace.recording() and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


def _replay_metrics(
    microbatches: Sequence[TrainingBatch], unreplayed: torch.Tensor, replayed: torch.Tensor
) -> MetricSums:
    """Return what the replay of routes changes, and how many routes are not known.

    Args:
        unreplayed: the first microbatch's log-probabilities [B, L] by the experts that the
            trainer's own routers choose.
        replayed: the same by the generator's.
    """
    sums = MetricSums()
    for microbatch in microbatches:
        sums.add_mean("experts/unrecorded", ~recorded(microbatch), is_followed(microbatch))
    for name, values in {"own": unreplayed, "replayed": replayed}.items():
        _, kl, sampled = mismatch_of(values, microbatches[0])
        sums.add_mean(f"experts/mismatch_kl_{name}", kl, sampled)
    return sums


def is_followed(batch: TrainingBatch) -> torch.Tensor:
    """Return which tokens another token of their sample follows, bool [B, L].

    Only these were an input of the generator, whose router chose their experts.
    """
    next_positions = F.pad(batch.positions[:, 1:], (0, 1))
    return (batch.task_ids >= 0) & (next_positions > 0)


def check_finite(name: str, value: float, loss: LossConfig) -> None:
    """Refuse a step whose loss or gradient norm is not finite.

    What enters a batch is finite, so the error names the loss and the learning rate as its causes.

    Args:
        name: "loss" or "gradient norm".

    Raises:
        RunError: the value is not finite.
    """
    if not math.isfinite(value):
        raise RunError(
            f"{name} is {value}: the step was not taken; look at {loss_name(loss.rl)} and the "
            "learning rate"
        )
