"""What this host is: its identity, its address, and the cores, GPUs and memory of this process.

Host names do not tell hosts apart: containers and cluster nodes may share one, or change theirs. A process on the cores of a
NUMA node, as Linux describes them in /sys, has its memory there too: Linux gives it pages of the node that it runs on.
"""

import contextlib
import ipaddress
import os
import pwd
import resource
import shutil
import socket
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil

Device = Literal["cpu", "cuda"]
HOST_VARIABLE = "TORCHTITAN_RL_HOST"
"""Environment variable that replaces the identity: processes of one machine then count as several hosts."""
LOOPBACK = "lo"
"""Linux's name of the interface that no other host reaches."""
LOOPBACK_ADDRESS = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"
"""Reserved for documentation: nothing answers there, and nothing is sent."""
SYS = Path("/sys")
PROC = Path("/proc")
MASK = "CUDA_VISIBLE_DEVICES"


def host_identity() -> str:
    """The same in two processes exactly where they share memory, process ids and network interfaces.

    It names the boot of the kernel, and what this process sees of it: its process ids and network (their namespaces) and the
    file system that shared memory is in. Two containers of one machine differ where they do not share one of these.
    """
    return os.environ.get(HOST_VARIABLE) or ":".join(
        [_kernel(), _namespace("pid"), _namespace("net"), _shared_memory()]
    )


def network_address() -> str:
    """IPv4 address of this host. Its loopback address where it has no network.

    A host name is no address for others: many systems map their own name to the loopback interface.
    """
    try:
        found = [
            str(entry[4][0])
            for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        ]
    except OSError:
        found = []
    outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return outside[0] if outside else source_address(_SOMEWHERE)


def visible_gpus() -> list[int]:
    """Indices of the GPUs that this process sees, from 0 on."""
    if sliced():
        # CUDA shows a process one of its slices and no more. Each process of a run gets a slice of its own.
        return list(range(len(_entries())))
    import torch  # here: the command sets its process up before torch is imported

    return list(range(torch.cuda.device_count()))


def _kernel() -> str:
    for file in (
        "/proc/sys/kernel/random/boot_id",
        "/etc/machine-id",
    ):  # some container runtimes have no such files
        with contextlib.suppress(OSError):
            return Path(file).read_text().strip()
    return socket.gethostname()


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return kind


def _shared_memory() -> str:
    """Linux numbers each mounted memory file system."""
    try:
        return f"shm:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return "shm"


def source_address(target: str) -> str:
    """Address of this host's interface that leads to ``target``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:  # no route: a machine without a network
            return LOOPBACK_ADDRESS
        return str(probe.getsockname()[0])


def interface_towards(target: str) -> str:
    """Name of this host's interface that leads to the address ``target``; "" where there is none."""
    own = source_address(target)
    named = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in named if any(own == entry.address for entry in addresses)), ""
    )


def cores_by_node() -> list[tuple[int, ...]]:
    """The cores that this process may use: of each node that has some, and last those of which Linux names no node."""
    left = set(os.sched_getaffinity(0))
    found = []
    for node in sorted(
        (SYS / "devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:])
    ):
        own = _cores_of(node) & left
        left -= own
        found.append(tuple(sorted(own)))
    return [cores for cores in (*found, tuple(sorted(left))) if cores]


def own_cores() -> list[int]:
    """The cores that this process may use, node by node: who gets a run of them is on as few nodes as it can be."""
    return [core for cores in cores_by_node() for core in cores]


def cores_on_nodes_of(cores: Iterable[int]) -> tuple[int, ...]:
    """The cores that this process may use of the nodes that ``cores`` are on."""
    wanted = set(cores)
    return tuple(sorted(core for node in cores_by_node() if wanted & set(node) for core in node))


def cores_near(addresses: Iterable[str]) -> tuple[int, ...]:
    """The cores that this process may use of the nodes that PCI devices ("0000:3b:00.0") are attached to.

    Empty where Linux does not say a device's node, or where this process may use none of its cores: then all are as near.
    """
    near: set[int] = set()
    for address in addresses:
        try:
            node = int((SYS / f"bus/pci/devices/{address}/numa_node").read_text())
        except (OSError, ValueError):
            return ()
        own = _cores_of(SYS / f"devices/system/node/node{node}") & os.sched_getaffinity(0)
        if not own:
            return ()
        near |= own
    return tuple(sorted(near))


def memory_gib() -> tuple[float, float]:
    """Return the GiB of memory that processes can still take here, and all that they may have.

    Containers and schedulers limit memory by control groups: the lowest limit that this process is
    under counts, where it is below the memory of the machine.
    """
    lines = dict(line.split(":", 1) for line in (PROC / "meminfo").read_text().splitlines())
    free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    for limit, used in _memory_groups():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free / 2**30, total / 2**30


_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Names of a control group's limit and usage, in version 2 and in version 1 of the interface."""


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Yield the limit and the usage, in bytes, of each control group with a limit that this process is in.

    Pages of files that nobody uses are left out: Linux drops them before it refuses memory.
    """
    try:
        entries = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = SYS / "fs/cgroup" / ("memory" if controllers else "")
        # A container may see its own group as the root, and not by the path that it has outside.
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            for limit_file, usage_file in _GROUP_FILES:
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limit = int((folder / limit_file).read_text())
                    yield limit, int((folder / usage_file).read_text()) - _unused_pages(folder)


def _unused_pages(group: Path) -> int:
    """Return the bytes of file pages in a control group that were not used lately."""
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def raise_descriptor_limit() -> None:
    """Raise this process's limit of file descriptors as far as it may. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # some systems refuse "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


FIRST_PERSON = 1000
"""Smallest user id that Linux distributions give to a person; those below are of services."""
NOBODY = 65534
"""User id of services without a user of their own."""
MOST_USERS = 3
"""Maximum number of users that ``other_users_line`` names."""


def other_users() -> list[str]:
    """Return the names of the other people who have processes on this host, sorted.

    Root is left out, because it may do everything anyway, and so are services. A user without a
    name is given by number.
    """
    people = {user for user in process_owners() if user >= FIRST_PERSON and user != NOBODY}
    return sorted(_user_name(user) for user in people - {os.getuid()})


def process_owners() -> set[int]:
    """Return the user ids of this host's processes, as far as /proc shows them."""
    owners = set()
    for entry in os.listdir(PROC):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError):
                owners.add((PROC / entry).stat().st_uid)
    return owners


def other_users_line() -> str:
    """Return a warning that other people of this host can enter a run; "" if there are none."""
    users = other_users()
    if not users:
        return ""
    more = f" and {len(users) - MOST_USERS} more" if len(users) > MOST_USERS else ""
    names = ", ".join(users[:MOST_USERS]) + more
    return f"warning: other users of this host can control this run: {names} (docs/security.md)"


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _cores_of(node: Path) -> set[int]:
    """Linux writes them as "0-3,8-11"."""
    cores: set[int] = set()
    try:
        for part in filter(None, (node / "cpulist").read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cores


def gpu_memory_gib() -> float | None:
    """Of the smallest GPU that this process sees. None: it sees none, or CUDA does not say."""
    return min((gpu.total_memory for gpu in _gpus()), default=0) / 2**30 or None


def pci_addresses() -> list[str]:
    """Of the GPUs that this process sees, by index, as Linux names them ("0000:3b:00.0"). Empty where CUDA does not say."""
    return [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in _gpus()
    ]


def _gpus() -> list[Any]:
    import torch

    try:
        return [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
    except RuntimeError:  # a broken driver: who computes on the GPU says it better
        return []


def gpu_host_lacks(*, several_hosts: bool) -> list[str]:
    """What this host lacks for a run on its GPUs, the end of a sentence each.

    Triton compiles a launcher when a kernel first runs, in trainer and engine, so it needs a C compiler and Python's headers
    there. Between hosts weights go through InfiniBand or RoCE where a host has it; these devices lock the memory they reach.
    """
    found = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        found.append(
            "has no C compiler, with which Triton builds its kernels: install gcc, or name a compiler in CC"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        found.append(
            f"has no {header}, which Triton's kernels are built with: install Python's headers (python3.11-dev)"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if (
        several_hosts
        and soft != resource.RLIM_INFINITY
        and any(Path("/sys/class/infiniband").glob("*"))
    ):
        cure = (
            "ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: the capability IPC_LOCK"
        )
        found.append(
            f"may lock {soft // 2**10} KiB of memory, and its InfiniBand devices lock all weights: raise the limit ({cure})"
        )
    return found


def sliced() -> bool:
    """Whether what this process sees are slices of GPUs (MIG), of which a process can use one."""
    return "".join(_entries()[:1]).startswith("MIG-")


def mask_of(gpus: Iterable[int]) -> str:
    """CUDA_VISIBLE_DEVICES of a process that is to see ``gpus`` only.

    Args:
        gpus: indices, of ``visible_gpus``. Where this process has a mask itself, of indices, UUIDs or MIG ids, an index is a
            place in that mask, and the other process is given what stands there.

    Raises:
        ValueError: the mask has no such place.
    """
    entries = _entries()
    if os.environ.get(MASK) is None:
        return ",".join(map(str, gpus))
    hidden = [gpu for gpu in gpus if not 0 <= gpu < len(entries)]
    if hidden:
        raise ValueError(
            f"{MASK}={os.environ[MASK]!r} shows {len(entries)} GPUs, and none of index {hidden[0]}"
        )
    return ",".join(entries[gpu] for gpu in gpus)


def _entries() -> list[str]:
    """Of the mask, as CUDA reads it: it ends at the first entry that is no device."""
    entries: list[str] = []
    for entry in os.environ.get(MASK, "").split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        entries.append(entry.strip())
    return entries
