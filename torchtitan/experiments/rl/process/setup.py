"""Sets up the processes of a run: variables, device, threads, cores and signals.

No import sets anything up. A process is set up by a call, by its kind:

* The **command**, and a script that uses the library by itself, calls `set_up_process` before it
  imports a config.
* A **spawned process**, which holds actors, is launched with `launch_environment`, because torch,
  Monarch and torchtitan read their variables when they are imported. Its first call is
  `set_up_spawned_process`.
* The server of **isolated calls** inherits its variables and calls `set_up_isolated_process`.

Logs are set up apart, by each actor when it is made (`process/logs.py`).
"""

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.experiments.rl.compat import monarch
from torchtitan.experiments.rl.process.finalization import may_end_without_finalizing
from torchtitan.experiments.rl.process.host import (
    MASK,
    Device,
    cores_near,
    cores_on_nodes_of,
    mask_of,
    pci_addresses,
)
from torchtitan.experiments.rl.process.output import print_to

ENVIRONMENT = {
    **monarch.ENVIRONMENT,
    # torchtitan takes the device of this index. A process of a run sees only its own devices, and
    # takes the first.
    "LOCAL_RANK": "0",
}
"""Variables of every process."""
SPAWNED_ENVIRONMENT = {
    # At each start torch's C++ code warns about memory that it can't bind to a NUMA node.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # vLLM would print some hundred lines to stdout. Its log goes where all logs go instead.
    "VLLM_CONFIGURE_LOGGING": "0",
    # Number of compiled kernels that oneDNN keeps, each of up to 1 MB. Its default of 1,024 fills a
    # generator on CPU, which meets new batch sizes at most steps: one kernel for each.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # OpenMP's threads sleep while they wait for each other. By default they spin, and hold the core
    # that another process needs: an engine of 135M parameters took 70 s for replies of 5 s.
    "OMP_WAIT_POLICY": "passive",
}
"""Variables of the processes that the command launches, besides ENVIRONMENT. A variable that the
command has itself stays as it is."""
TRAINER_ENVIRONMENT = {
    # The allocator's segments grow in place, so it keeps less memory that fits no tensor: an H100's
    # kept 4 GiB at a step's peak without this.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables of trainer ranks, besides the others, on GPUs whose weights go through the host's
memory. Memory in such segments can't be shared with engines by CUDA IPC in every container."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator, which reads the second where the first is not set."""
GC_THRESHOLDS = (50_000, 20, 20)
"""Objects made between two garbage collections. By Python's own 700, 10 and 10, collections take a
seventh of the processor time of importing torch, torchtitan and vLLM, which each process does."""
COMMANDS_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that the command handles, and the other processes of a run ignore."""


def set_up_process() -> None:
    """Set up the command's process, or that of a script. It may be called again.

    Variables that are set already stay as they are.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torchtitan.experiments.rl.compat.torchtitan import use_cpu_without_accelerator

    use_cpu_without_accelerator()


def launch_environment(
    share: tuple[int, ...], device: Device, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the variables to launch a process with, which show it its own cores or GPUs only.

    Args:
        share: the cores that the process computes on if the device is "cpu"; the indices of its
            GPUs among `visible_gpus` if it is "cuda".
        device: where the process computes.
        gpus: entries of CUDA_VISIBLE_DEVICES for the GPUs of the process's host; None if that is
            this host.
    """
    environment = dict(ENVIRONMENT)
    for name, value in (monarch.ENVIRONMENT | SPAWNED_ENVIRONMENT).items():
        environment[name] = os.environ.get(name, value)
    if device == "cpu":
        environment[MASK] = ""
        environment["OMP_NUM_THREADS"] = str(len(share))
    elif gpus is None:
        environment[MASK] = mask_of(share)
    else:
        environment[MASK] = ",".join(gpus[index] for index in share)
    return environment


def trainer_environment(device: Device, *, weights_on_devices: bool) -> dict[str, str]:
    """Return the variables to launch a trainer rank with, besides those of `launch_environment`.

    Settings of the allocator that the command has itself stay as they are.

    Args:
        device: where the rank computes.
        weights_on_devices: True if engines read versions from the trainer's devices.
    """
    set_by_user = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if device == "cpu" or weights_on_devices or set_by_user:
        return {}
    return dict(TRAINER_ENVIRONMENT)


def set_up_spawned_process(
    shares: tuple[tuple[int, ...], ...], device: Device, output: str | None = None
) -> None:
    """Set up a process that was launched with `launch_environment`, before it has actors.

    The process of rank r is set up for ``shares[r]``. On "cpu" it computes with a thread for each
    core of its share, and may use all cores of their NUMA nodes: so a core that another process
    leaves idle is used. With GPUs it stays on the NUMA nodes of these GPUs.

    Args:
        shares: what each rank of the mesh computes on, as in `launch_environment`.
        device: where the process computes.
        output: path, without ".txt", of the file for what the process prints. The rank is added
            unless the path ends with a number. None if the process prints where its parent does.
    """
    may_end_without_finalizing()
    gc.set_threshold(*GC_THRESHOLDS)
    from monarch.actor import current_rank

    rank = current_rank().rank
    if output is not None:
        print_to(Path(f"{output}.txt" if output[-1].isdigit() else f"{output}-{rank}.txt"))
    import torch

    from torchtitan.experiments.rl.compat.torchstore import use_async_controller
    from torchtitan.experiments.rl.compat.torchtitan import use_cpu_without_accelerator

    ignore_signals_of_the_command()
    if device == "cpu":
        torch.set_num_threads(len(shares[rank]))
        cores = cores_on_nodes_of(shares[rank])
    else:
        cores = cores_near(pci_addresses())
    if cores:
        _stay_on(cores)
    use_cpu_without_accelerator()
    # Now, before actors are made in several threads: torchstore's modules import each other in a
    # circle, and of two threads that import them at once, one sees half of them.
    use_async_controller()


def set_up_isolated_process() -> None:
    """Set up a process that runs isolated calls.

    It has no log file, so only the errors of libraries reach the terminal.
    """
    logging.getLogger().setLevel(logging.ERROR)


def add_import_folder(folder: Path) -> None:
    """Import modules from a folder too, in this process and in those that it launches."""
    if str(folder) in sys.path:
        return
    sys.path.append(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{inherited}{os.pathsep}{folder}" if inherited else str(folder)


def ignore_signals_of_the_command() -> None:
    """Ignore SIGTERM and SIGHUP from now on.

    A terminal that closes, and many a scheduler, signal every process of a job. The command handles
    the signal: it writes a checkpoint, for which it needs the other processes, and ends them.
    """
    _set_signal_handlers(signal.SIG_IGN)


def heed_signals_again() -> None:
    """Let SIGTERM and SIGHUP end this process again.

    Monarch stops a process by SIGTERM, and by SIGKILL only 20 s later.
    """
    _set_signal_handlers(signal.SIG_DFL)


def _set_signal_handlers(handler: signal.Handlers) -> None:
    # By the C library, because Python's `signal.signal` works in the main thread alone, and Monarch
    # sets processes up and calls actors in others.
    libc = ctypes.CDLL(None)
    for number in COMMANDS_SIGNALS:
        libc.signal(int(number), ctypes.c_void_p(handler))


def _stay_on(cores: tuple[int, ...]) -> None:
    """Keep every thread of this process on some cores, and the threads that they start.

    Linux keeps the cores of each thread apart. Monarch has started some threads by now, and calls
    actors in other threads than this one.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:  # the thread has ended meanwhile
            pass
