"""The PolicyTrainer actor: one rank of the trainer.

Consumes:  microbatches of its data-parallel rank, one optimizer step at a time.
Produces:  metrics of the whole step; versions of the weights, and what proves them; checkpoints.
Knows no task, env or algorithm.

Endpoints hand their work to one compute thread, one after the other, so the actor's event loop
stays free to answer. Most endpoints are collective: the other ranks must be called too.
"""

import asyncio
import logging
import math
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import portpicker
import torch
import torch.distributed as dist
from monarch.actor import current_rank, current_size
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.actor import (
    WatchedActor,
    for_a_future,
    reported_endpoint,
)
from torchtitan.experiments.rl.process.host import (
    LOOPBACK,
    host_identity,
    interface_towards,
    network_address,
)
from torchtitan.experiments.rl.process.logs import set_up_logging
from torchtitan.experiments.rl.training.checkpoints import write_error
from torchtitan.experiments.rl.training.config import TrainerConfig
from torchtitan.experiments.rl.training.learner import Learner, check_finite
from torchtitan.experiments.rl.training.staging import StagingError
from torchtitan.experiments.rl.types import DataParallel
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import fingerprint

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""Number of steps that may compile, and so take long."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Maximum time that ranks wait for each other: they may compile, and write checkpoints, at
different speeds. A rank that hangs is noticed and killed long before."""

Result = TypeVar("Result")


class PolicyTrainer(WatchedActor):
    """Trains the policy, as one rank of the trainer."""

    _learner: Learner
    """Set by ``setup``."""
    _publisher: SnapshotPublisher
    """Set by ``setup``."""
    _canary: asyncio.Future[np.ndarray]
    """Canary's log-probabilities under the version that ``copy_weights`` copied last."""
    _saving: Future[Any]
    """Checkpoint that ``begin_checkpoint`` began last."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        device: Literal["cpu", "cuda"],
        run_dir: str,
        generator_dtype: torch.dtype,
        yields_memory: bool = False,
        leaves_bytes: float = 0,
        weights_on_device: bool = False,
        **learner_options: Any,  # noqa: ANN401 - Learner checks them
    ):
        """Prepare the process. ``setup`` builds the model.

        Args:
            generator_dtype: dtype of the published weights.
            yields_memory: True if an engine on this rank's GPU takes the memory that a step has
                used, as soon as the weights are copied out.
            leaves_bytes: memory of this rank's GPU that is left to an engine, and to CUDA; 0 if the
                rank has the GPU for itself.
            weights_on_device: True if published versions stay on this rank's device.
            learner_options: further arguments of the Learner.
        """
        super().__init__()
        self._rank = current_rank().rank
        self._world_size = math.prod(current_size().values())
        self.process_name = f"trainer {self._rank}"
        self._device = device
        self._run_dir = Path(run_dir)
        self._steps_taken = 0
        self._has_gradient = False
        """True between a `forward_backward` that succeeded and its `optim_step`. Only the compute
        thread uses it."""
        set_up_logging(run_dir, f"trainer-{self._rank}")
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._generator_dtype = generator_dtype
        self._published_on = torch.device(device) if weights_on_device else None
        self._yields_memory = yields_memory and device == "cuda"
        self._leaves_bytes = leaves_bytes if device == "cuda" else 0
        self._build_learner = partial(
            Learner,
            config,
            device=device,
            run_dir=run_dir,
            on_microbatch=self._beat,
            **learner_options,
        )

    # ---- set-up

    @reported_endpoint
    async def meeting_points(self) -> tuple[str, str, str]:
        """Return this rank's host, and two URLs at which ranks may meet it.

        The first URL is of a free port, the second of a file, for ranks on the same host.
        """
        folder = tempfile.mkdtemp(prefix="rendezvous-")
        return (
            host_identity(),
            f"tcp://{network_address()}:{portpicker.pick_unused_port()}",
            f"file://{folder}/store",
        )

    @reported_endpoint
    async def setup(self, rendezvous: str) -> None:
        """Join the process group and load the model. Collective.

        Args:
            rendezvous: URL at which the ranks meet rank 0.
        """

        def build() -> None:
            init_process_group(
                device=self._device, rank=self._rank, world_size=self._world_size, url=rendezvous
            )
            if self._leaves_bytes:
                leave_memory(self._leaves_bytes)
            self._learner = self._build_learner()
            if self._yields_memory:
                torch.cuda.empty_cache()
            self._publisher = SnapshotPublisher(
                rank=self._rank,
                host=host_identity(),
                dtype=self._generator_dtype,
                device=self._published_on,
            )

        logger.info("building the model")
        await self._submit(build)
        logger.info("the model is built")

    @reported_endpoint
    async def data_parallel(self) -> DataParallel:
        """Return this rank's share of a step's rows. It is known after ``setup``."""
        return self._learner.data_parallel

    # ---- steps

    @reported_endpoint
    async def forward_backward(self, microbatches: bytes, policy_version: int) -> dict[str, float]:
        """Accumulate the gradient of a step, and return metrics of the whole step. Collective.

        Args:
            microbatches: rows of this data-parallel rank, pickled (`client.pickled`). Of several
                processes with the same rows, the first is given them and hands them on; the others
                are given b"".
            policy_version: version of the weights that are trained.

        Raises:
            RunError: the loss is not finite.
        """

        def accumulate() -> dict[str, float]:
            self._has_gradient = False
            rows = pickle.loads(self._learner.broadcast_rows(microbatches))
            metrics = self._learner.forward_backward(rows, policy_version).compute()
            # Checked apart from the gradient, which `optim_step` checks: a loss that is infinite by
            # a constant term has a finite gradient.
            check_finite("loss", metrics["loss/total"], self._learner.config.loss)
            self._has_gradient = True
            return metrics

        return await self._submit(accumulate, slow=False)

    @reported_endpoint
    async def optim_step(self) -> dict[str, float]:
        """Take the step of the last `forward_backward`, and return the optimizer's metrics.

        Collective. It may be called while that gradient is still being computed.

        Raises:
            RunError: there is no gradient, or it is not finite; the step is not taken.
        """

        def take_step() -> dict[str, float]:
            if not self._has_gradient:
                raise RunError(
                    "there is no gradient for the optimizer: forward_backward has failed, or was "
                    "not called since the last step"
                )
            self._has_gradient = False
            return self._learner.optim_step()

        metrics = await self._submit(take_step)
        self._steps_taken += 1
        return metrics

    @reported_endpoint
    async def logprobs(self) -> list[np.ndarray]:
        """Return the log-probabilities of the last step's microbatches, each float32 [B, L].

        They are 0 on tokens that were not sampled.
        """
        return self._learner.logprobs()

    # ---- versions of the weights

    @reported_endpoint
    async def copy_weights(
        self, version: int, canary_token_ids: np.ndarray, remote_readers: bool
    ) -> None:
        """Publish the weights as a version, and start to score the canary with them. Collective.

        When it returns, the next step may be submitted: the copy is where generators find it, and
        the compute thread scores the canary before that step changes the weights.

        Args:
            canary_token_ids: fixed text whose log-probabilities prove a delivery.
            remote_readers: True if some generator is on a host without trainer ranks.
        """

        def copy_out() -> None:
            with trace.span("copy weights out", version=version):
                self._publisher.write(version, self._learner.hub_tensors)
                if self._yields_memory:
                    torch.cuda.empty_cache()

        def score() -> np.ndarray:
            with trace.span("canary", version=version), one_thread():
                return self._learner.canary(canary_token_ids)

        await self._submit(copy_out, slow=False)
        self._canary = self._submit(score)
        await self._publisher.announce(remote_readers)

    @reported_endpoint
    async def proof(self) -> tuple[str, np.ndarray]:
        """Return what a generator's receipt of the last version has to agree with. Collective.

        Returns:
            The fingerprint of the version's digests, and the canary's log-probabilities, float32
            [adapters * L], with each adapter in turn.
        """
        with trace.lane("digests"):
            manifest = await self._publisher.prove()
        return fingerprint(manifest.digests), await self._canary

    @reported_endpoint
    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return log-probabilities at temperature 1, float32 [adapters * L]. Collective."""
        return await self._submit(lambda: self._learner.canary(token_ids))

    # ---- checkpoints

    @reported_endpoint
    async def begin_checkpoint(self, folder: Path, step: int) -> None:
        """Copy the state after ``step``, and start to write the copy. Collective.

        Steps may follow at once. A state that can't be copied is an error of ``finish_checkpoint``,
        like one that can't be written.

        Raises:
            RunError: the trainer's state is not the one after ``step``.
        """

        def begin() -> Future[Any]:
            taken = self._learner.steps_taken
            if taken != step:
                count = "an unknown number of" if taken is None else taken
                raise RunError(
                    f"trainer rank {self._rank} has taken {count} steps, and can't save the state "
                    f"after {step}"
                )
            with trace.span("copy the state", step=step):
                return self._learner.checkpoints.begin(folder, step)

        self._saving = await self._submit(begin)

    @reported_endpoint
    async def finish_checkpoint(self) -> None:
        """Wait until this rank has written its files of the checkpoint that was begun last.

        Raises:
            RunError: it can't write them: a rank could not copy its state, or the disk is full, or
                failed.
        """
        error = await asyncio.to_thread(self._saving.exception)
        if error is None:
            return
        if isinstance(error, StagingError):
            raise error
        # torch's error is no Exception, and can't always be sent to another process.
        logger.info("trainer rank %d: a checkpoint can't be written", self._rank, exc_info=error)
        raise RunError(
            f"trainer rank {self._rank} can't write its part of the checkpoint: "
            f"{write_error(error, self._run_dir)}"
        )

    @reported_endpoint
    async def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder, and return the folder. Collective.

        Raises:
            RunError: it can't be written, because the disk is full, or failed.
        """

        def save() -> Path | RunError | None:
            try:
                return self._learner.save_final(step)
            # torch's own error is no Exception.
            except (CheckpointException, Exception) as error:  # noqa: BLE001
                logger.info("the policy can't be written", exc_info=error)
                cause = write_error(error, self._run_dir)
                return RunError(f"trainer rank {self._rank} can't write the policy: {cause}")

        saved = await self._submit(save)
        if isinstance(saved, RunError):
            raise saved
        return saved

    @reported_endpoint
    async def shutdown(self) -> None:
        """Finish what is being saved, and leave the process group."""

        def close() -> None:
            if hasattr(self, "_learner"):
                self._learner.close()
            if dist.is_initialized():
                dist.destroy_process_group()

        await self._submit(close)

    # ---- the compute thread

    def _more_usage(self) -> dict[str, float]:
        utilisation = self._learner.flops.lap_utilisation() if hasattr(self, "_learner") else None
        return {} if utilisation is None else {"mfu": utilisation}

    def _beat(self) -> None:
        """Note that a microbatch begins: the rank is at work, and does not hang."""
        self.heartbeat.beat(slow=self._steps_taken < FIRST_STEPS)

    def _submit(self, work: Callable[[], Result], *, slow: bool = True) -> asyncio.Future[Result]:
        """Have the compute thread do some work after all that was submitted before.

        Args:
            slow: False if the rank hangs when the work takes longer than ``supervision.stall_s``
                without a beat. During the first steps, which may compile, all work is slow.
        """
        may_take_long = slow or self._steps_taken < FIRST_STEPS

        def run() -> Result:
            try:
                with self.heartbeat.work("a computation of the trainer", slow=may_take_long):
                    return work()
            except StopIteration as error:
                raise for_a_future(error) from error

        return asyncio.get_running_loop().run_in_executor(self._compute, run)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of torch inside, for work beside a load on the same cores.

    With two threads on two cores the canary made the load of a 500 MB model last 350 to 470 ms, and
    with one thread 290 to 320 ms: each waits for the slowest of its threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def leave_memory(nbytes: float) -> None:
    """Bound what this process's allocator takes of its GPU, so that ``nbytes`` are left to others.

    The allocator keeps what tensors give back, and a process beside it can't use that: an engine
    would run out of memory when it loads its first version. At the bound the allocator first gives
    back what it keeps, and fails only if the tensors themselves are too large.
    """
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, 1 - nbytes / total), device)


def init_process_group(
    *, device: Literal["cpu", "cuda"], rank: int, world_size: int, url: str
) -> None:
    """Join the trainer's process group.

    The store behind a port listens on all interfaces and asks nobody who they are. Ranks that meet
    in a file use the loopback interface alone; others use the interface that leads to rank 0,
    unless GLOO_SOCKET_IFNAME names another.

    Args:
        url: ``tcp://host:port`` of rank 0, or on one host ``file:///path`` of a new file.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # the only one this process sees: fleet/spawn.py
    if url.startswith("file:"):
        interface = LOOPBACK
    else:
        interface = interface_towards(url.removeprefix("tcp://").rpartition(":")[0])
    if interface in (name for _, name in socket.if_nameindex()):
        # gloo would take the interface of the host's own name, which may be the loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface == LOOPBACK:  # NCCL finds out itself which interfaces lead to other hosts
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    # gloo beside NCCL, for parameters that are kept in the host's memory, and for objects that
    # ranks compare.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
