"""The PolicyTrainer actor: one rank of the trainer mesh. Endpoints hand work to one compute thread, so messages flow."""

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
from typing import Any, Literal

import numpy as np
import portpicker
import torch
import torch.distributed as dist
from monarch.actor import current_rank, current_size

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.host import (
    LOOPBACK,
    host_identity,
    interface_towards,
    network_address,
)
from torchtitan.experiments.rl.process.setup import set_up_logging
from torchtitan.experiments.rl.training.checkpoints import write_error
from torchtitan.experiments.rl.training.config import TrainerConfig
from torchtitan.experiments.rl.training.learner import Learner, check_finite
from torchtitan.experiments.rl.training.staging import StagingError
from torchtitan.experiments.rl.types import DataParallel
from torchtitan.experiments.rl.user_code.endpoint import (
    WatchedActor,
    for_a_future,
    reported_endpoint,
)
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import fingerprint

logger = logging.getLogger(__name__)

FIRST_STEPS = 3
"""They may compile, and so take long."""

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Ranks may compile, and write checkpoints, at different speeds. A rank that hangs is noticed and killed long before."""


class PolicyTrainer(WatchedActor):
    """Consumes the microbatches of its data-parallel coordinate, produces metrics and published weights.

    Knows no task, env or algorithm.
    """

    # Made by setup, copy_weights and begin_checkpoint.
    _learner: Learner
    _publisher: SnapshotPublisher
    _canary: asyncio.Future[np.ndarray]
    _saving: Future[Any]

    def __init__(
        self,
        config: TrainerConfig,
        *,
        device: Literal["cpu", "cuda"],
        run_dir: str,
        generator_dtype: torch.dtype,
        yields_memory: bool = False,
        weights_on_device: bool = False,
        **learner: Any,
    ):
        """
        Args:
            yields_memory: an engine on its GPU takes what a step has used, as soon as the weights are copied out.
            weights_on_device: published versions stay where the rank computes.
            learner: more of a Learner's arguments.
        """
        super().__init__()
        self._rank, self._world_size = current_rank().rank, math.prod(current_size().values())
        self.part = f"trainer {self._rank}"
        self._device = device
        self._steps_taken = 0
        set_up_logging(run_dir, f"trainer-{self._rank}")
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._generator_dtype = generator_dtype
        self._published_on = torch.device(device) if weights_on_device else None
        self._yields_memory = yields_memory and device == "cuda"
        self._build = partial(
            Learner,
            config,
            device=device,
            run_dir=run_dir,
            on_microbatch=lambda: self.heartbeat.beat(slow=self._steps_taken < FIRST_STEPS),
            **learner,
        )

    @reported_endpoint
    async def meeting_points(self) -> tuple[str, str, str]:
        """Its host's identity, and URLs where ranks may meet it: of a free port, and of a file on this host."""
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
            rendezvous: URL of rank 0.
        """

        def build() -> None:
            init_process_group(
                device=self._device, rank=self._rank, world_size=self._world_size, url=rendezvous
            )
            self._learner = self._build()
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
        """This rank's data-parallel coordinate. Known after ``setup``."""
        return self._learner.data_parallel

    @reported_endpoint
    async def train_step(self, microbatches: bytes, policy_version: int) -> dict[str, float]:
        """Take an optimizer step on this coordinate's microbatches. Collective. Returns metrics of the whole step.

        Args:
            microbatches: ``client.pickled``, for the first rank of the coordinate. It gives them to the others.

        Raises:
            RunError: the loss or the gradient is not finite; the step is not taken. A loss with an infinite constant has a
                finite gradient.
        """

        def accumulate() -> dict[str, float]:
            own = pickle.loads(self._learner.of_first_rank(microbatches))
            metrics = self._learner.forward_backward(own, policy_version).compute()
            check_finite("loss", metrics["loss/total"], self._learner.config.loss)
            return metrics

        metrics = await self._submit(accumulate, quick=True)
        metrics |= await self._submit(self._learner.optim_step)
        self._steps_taken += 1
        return metrics

    @reported_endpoint
    async def logprobs(self) -> list[np.ndarray]:
        """float32 [B, L] of each microbatch of the last step: log-probabilities of sampled tokens, 0 elsewhere."""
        return self._learner.logprobs()

    @reported_endpoint
    async def begin_checkpoint(self, folder: Path, step: int) -> None:
        """Copy model, optimizer and schedule as they are after ``step``; write the copy beside what follows. Collective.

        A state that can't be copied is an error of ``finish_checkpoint``, like one that can't be
        written.

        Raises:
            RunError: the trainer's state is not that after ``step``.
        """

        def begin() -> Future[Any]:
            if self._learner.steps_taken != step:
                taken = (
                    "an unknown number of"
                    if self._learner.steps_taken is None
                    else self._learner.steps_taken
                )
                raise RunError(
                    f"trainer rank {self._rank} has taken {taken} steps, and can't save the state after {step}"
                )
            with trace.span("copy the state", step=step):
                return self._learner.checkpoints.begin(folder, step)

        self._saving = await self._submit(begin)

    @reported_endpoint
    async def finish_checkpoint(self) -> None:
        """Wait until this rank's files of the checkpoint that was begun last are written.

        Raises:
            RunError: they can't be: a rank could not copy its state, or the disk is full, or failed.
        """
        error = await asyncio.to_thread(self._saving.exception)
        if isinstance(error, StagingError):
            raise error
        if (
            error is not None
        ):  # torch's is no Exception, and can't always be sent to another process
            logger.info(
                "trainer rank %d: a checkpoint can't be written", self._rank, exc_info=error
            )
            raise RunError(
                f"trainer rank {self._rank} can't write its part of the checkpoint: {write_error(error)}"
            )

    @reported_endpoint
    async def copy_weights(
        self, version: int, canary_token_ids: np.ndarray, remote_readers: bool
    ) -> None:
        """Copy the weights into the snapshot of ``version``, put it where the generators find it, and start to score the canary
        with them. Collective.

        Args:
            remote_readers: some generator is on a host without trainer ranks.
        """

        def copy_out() -> None:
            with trace.span("copy weights out", version=version):
                self._publisher.write(version, self._learner.hub_tensors)
                if self._yields_memory:
                    torch.cuda.empty_cache()

        def score() -> np.ndarray:
            with trace.span("canary", version=version), one_thread():
                return self._learner.canary(canary_token_ids)

        await self._submit(copy_out, quick=True)
        self._canary = self._submit(score)
        await self._publisher.announce(remote_readers)

    @reported_endpoint
    async def proof(self) -> tuple[str, np.ndarray]:
        """What a receipt of the version that was copied last has to agree with: the fingerprint of its digests, and float32
        [adapters * L] log-probabilities of the canary, with each adapter in turn. Collective."""
        with trace.lane("digests"):
            manifest = await self._publisher.prove()
        return fingerprint(manifest.digests), await self._canary

    @reported_endpoint
    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [adapters * L]: log-probabilities at temperature 1, with each adapter in turn. Collective."""
        return await self._submit(lambda: self._learner.canary(token_ids))

    @reported_endpoint
    async def save_final(self, step: int) -> Path | None:
        """Write the policy as a hub folder, and return it. Collective."""
        return await self._submit(lambda: self._learner.save_final(step))

    @reported_endpoint
    async def shutdown(self) -> None:
        """Finish what is being saved, and leave the process group."""

        def close() -> None:
            if hasattr(self, "_learner"):
                self._learner.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

        await self._submit(close)

    def _more_usage(self) -> dict[str, float]:
        utilisation = self._learner.flops.lap_utilisation() if hasattr(self, "_learner") else None
        return {} if utilisation is None else {"mfu": utilisation}

    def _submit(self, work: Callable[[], Any], *, quick: bool = False) -> asyncio.Future[Any]:
        """
        Args:
            quick: no part of it takes longer than a microbatch, once the first steps have compiled what they need.
        """
        slow = not quick or self._steps_taken < FIRST_STEPS

        def run() -> Any:
            try:
                with self.heartbeat.work("a computation of the trainer", slow=slow):
                    return work()
            except StopIteration as error:
                raise for_a_future(error) from error

        return asyncio.get_running_loop().run_in_executor(self._compute, run)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes with one thread: for what runs beside a load on the same cores. With two threads on two cores it
    made the load of a 500 MB model last 350 to 470 ms, and with one 290 to 320: each waits for the slowest of its threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def init_process_group(
    *, device: Literal["cpu", "cuda"], rank: int, world_size: int, url: str
) -> None:
    """Join the trainer's process group.

    Args:
        url: where the ranks meet: ``tcp://host:port`` of rank 0, or on one host ``file:///path`` of a new file.
            The store behind a port listens on all interfaces and asks nobody who they are; ranks that meet in a file use the
            loopback interface alone. Others use the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names another.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # the only one this process sees: fleet/spawn.py
    # gloo beside NCCL: parameters that are kept in the host's memory, and objects that ranks compare.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    interface = (
        LOOPBACK
        if url.startswith("file:")
        else interface_towards(url.removeprefix("tcp://").rpartition(":")[0])
    )
    if interface in (name for _, name in socket.if_nameindex()):
        # gloo takes the interface that the host's own name leads to, which may be the loopback one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface == LOOPBACK:  # NCCL knows itself which interfaces lead to other hosts
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        backend, init_method=url, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
