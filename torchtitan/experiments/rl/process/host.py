"""Reads this host: its identity and address, and the cores, memory and GPUs that a process may use.

Everything is read from Linux (/proc, /sys), from psutil or from torch, and nothing is changed but
the limit of file descriptors (`raise_descriptor_limit`).

A machine's cores and memory are divided into NUMA nodes, and each GPU is attached to one. Linux
gives a process memory of the node that it runs on. So a process that stays on the cores of one node
has its memory there too, and nothing here binds memory.
"""

import contextlib
import ipaddress
import os
import pwd
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import psutil

Device = Literal["cpu", "cuda"]
HOST_VARIABLE = "TORCHTITAN_RL_HOST"
"""Environment variable that replaces the identity of the host. With it, processes of one machine
count as several hosts."""
LOOPBACK = "lo"
"""Linux's name of the network interface that no other host reaches."""
LOOPBACK_ADDRESS = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"
"""Address that stands for any other host. It is reserved for documentation, and nothing is sent."""
SYS = Path("/sys")
PROC = Path("/proc")
MASK = "CUDA_VISIBLE_DEVICES"
"""Environment variable that names the GPUs which CUDA shows to a process."""


# ---- identity and network


def host_identity() -> str:
    """Return a text that two processes share if, and only if, they are on one host.

    One host means: shared memory, process ids and network interfaces in common. Host names don't
    tell that, because containers and cluster nodes may have the same one, or change it. So the
    identity is made of the kernel's boot id, the process's pid and network namespaces, and the file
    system that holds its shared memory. Two containers of one machine that differ in any of these
    are two hosts.
    """
    parts = [_kernel(), _namespace("pid"), _namespace("net"), _shared_memory()]
    return os.environ.get(HOST_VARIABLE) or ":".join(parts)


def _kernel() -> str:
    """Return an id of the running kernel; the host's name in containers that hide both files."""
    for file in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        with contextlib.suppress(OSError):
            return Path(file).read_text().strip()
    return socket.gethostname()


def _namespace(kind: str) -> str:
    """Return the id of one of this process's namespaces, such as "pid" or "net"."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return kind


def _shared_memory() -> str:
    """Return the number that Linux gave to the file system at /dev/shm."""
    try:
        return f"shm:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return "shm"


def network_address() -> str:
    """Return the IPv4 address at which other hosts reach this one.

    It is the loopback address if the host has no network. The host's name would not do, because
    many systems resolve their own name to the loopback interface.
    """
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        entries = []
    for *_, socket_address in entries:
        address = str(socket_address[0])
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return source_address(_SOMEWHERE)


def source_address(target: str) -> str:
    """Return the address of the network interface from which this host reaches ``target``.

    It is the loopback address if there is no route, as on a machine without a network.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: it only has Linux choose the route
        except OSError:
            return LOOPBACK_ADDRESS
        return str(probe.getsockname()[0])


def interface_towards(target: str) -> str:
    """Return the name of the network interface from which this host reaches an address.

    It is empty if there is no such interface.
    """
    address = source_address(target)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return ""


# ---- cores


def cores_by_node() -> list[tuple[int, ...]]:
    """Return the cores that this process may use, a tuple for each NUMA node that has some.

    The last tuple has the cores that Linux assigns to no node, if there are any.
    """
    unassigned = set(os.sched_getaffinity(0))
    folders = (SYS / "devices/system/node").glob("node[0-9]*")
    by_node = []
    for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("node"))):
        cores = _cores_of(folder) & unassigned
        unassigned -= cores
        by_node.append(cores)
    by_node.append(unassigned)
    return [tuple(sorted(cores)) for cores in by_node if cores]


def own_cores() -> list[int]:
    """Return the cores that this process may use, node after node.

    So a run of consecutive entries is on as few NUMA nodes as possible.
    """
    return [core for cores in cores_by_node() for core in cores]


def cores_on_nodes_of(cores: Iterable[int]) -> tuple[int, ...]:
    """Return the cores that this process may use on the NUMA nodes of the given cores."""
    wanted = set(cores)
    nodes = [node for node in cores_by_node() if wanted.intersection(node)]
    return tuple(sorted(core for node in nodes for core in node))


def cores_near(addresses: Iterable[str]) -> tuple[int, ...]:
    """Return the cores that this process may use on the NUMA nodes of some PCI devices.

    The result is empty, and every core as good as another, if Linux does not know the node of one
    of the devices, or if this process may use no core of it.

    Args:
        addresses: PCI addresses as Linux writes them, such as "0000:3b:00.0".
    """
    near: set[int] = set()
    for address in addresses:
        try:
            node = int((SYS / f"bus/pci/devices/{address}/numa_node").read_text())
        except (OSError, ValueError):
            return ()
        cores = _cores_of(SYS / f"devices/system/node/node{node}") & os.sched_getaffinity(0)
        if not cores:
            return ()
        near |= cores
    return tuple(sorted(near))


def _cores_of(node: Path) -> set[int]:
    """Return the cores of a NUMA node, which Linux lists as "0-3,8-11"; none if it lists none."""
    cores: set[int] = set()
    try:
        ranges = (node / "cpulist").read_text().strip().split(",")
        for first, _, last in (cores_range.partition("-") for cores_range in ranges if cores_range):
            cores.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cores


# ---- memory and limits


def memory_gib() -> tuple[float, float]:
    """Return the GiB of memory that processes can still take here, and all that they may have.

    Containers and schedulers limit memory by control groups: the lowest limit that this process is
    under counts, where it is below the memory of the machine.
    """
    machine = psutil.virtual_memory()
    free = machine.available
    total = machine.total
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
    """Yield the limit and the usage of each control group that limits this process, in bytes.

    Pages of files that nobody uses are left out: Linux drops them before it refuses memory.
    """
    for group in _control_groups():
        for limit_file, usage_file in _GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limit = int((group / limit_file).read_text())
                yield limit, int((group / usage_file).read_text()) - _unused_pages(group)


def _control_groups() -> Iterator[Path]:
    """Yield the folder of each control group of memory that this process is in, and of its parents.

    A folder need not exist: a container may see its own group as the root, and not by the path that
    the group has outside.
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
        group = root / path.strip("/")
        yield group
        yield from (folder for folder in group.parents if folder.is_relative_to(root))


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


# ---- other people

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
    """Return the user ids of this host's processes, as far as this process may see them."""
    owners = (process.info["uids"] for process in psutil.process_iter(["uids"]))
    return {uids.real for uids in owners if uids is not None}


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


# ---- GPUs


def visible_gpus() -> list[int]:
    """Return the indices of the GPUs that this process sees, from 0 on.

    If these are slices of GPUs, they are counted by the mask: CUDA shows a process only the first
    slice, and each process of a run gets one of its own.
    """
    if sliced():
        return list(range(len(_mask_entries())))
    import torch  # here, because the command sets its process up before torch is imported

    return list(range(torch.cuda.device_count()))


def gpu_memory_gib() -> float | None:
    """Return the memory of the smallest GPU that this process sees.

    None if it sees no GPU, or if CUDA can't say.
    """
    return min((gpu.total_memory for gpu in _gpus()), default=0) / 2**30 or None


def pci_addresses() -> list[str]:
    """Return the PCI address of each GPU that this process sees, such as "0000:3b:00.0".

    The list is empty if CUDA can't say.
    """
    return [
        f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in _gpus()
    ]


def _gpus() -> list[Any]:
    """Return torch's properties of each GPU that this process sees; none if the driver is broken.

    The code that computes on the GPU reports a broken driver better.
    """
    import torch

    try:
        return [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
    except RuntimeError:
        return []


def gpu_host_lacks(*, several_hosts: bool) -> list[str]:
    """Return what this host lacks for a run on its GPUs, the end of a sentence for each lack."""
    lacks = [_compiler_lack(), _header_lack(), _lockable_memory_lack() if several_hosts else ""]
    return [lack for lack in lacks if lack]


def _compiler_lack() -> str:
    """Return the lack of a C compiler, with which Triton builds a launcher for each new kernel."""
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return ""
    return (
        "has no C compiler, with which Triton builds its kernels: "
        "install gcc, or name a compiler in CC"
    )


def _header_lack() -> str:
    """Return the lack of Python's header, which Triton's launchers include."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.is_file():
        return ""
    return (
        f"has no {header}, which Triton's kernels are built with: install Python's headers "
        f"(Debian and Ubuntu: python{sys.version_info.major}.{sys.version_info.minor}-dev)"
    )


def _lockable_memory_lack() -> str:
    """Return the lack of memory that this process may lock, on a host with InfiniBand or RoCE.

    Weights go from host to host through such devices, which lock the memory that they reach.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not any(Path("/sys/class/infiniband").glob("*")):
        return ""
    cure = "ulimit -l unlimited; docker: --ulimit memlock=-1; Kubernetes: the capability IPC_LOCK"
    return (
        f"may lock {soft // 2**10} KiB of memory, and its InfiniBand devices lock all weights: "
        f"raise the limit ({cure})"
    )


def sliced() -> bool:
    """Return True if this process sees slices of GPUs (MIG), of which a process can use one."""
    entries = _mask_entries()
    return bool(entries) and entries[0].startswith("MIG-")


def mask_of(gpus: Iterable[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that is to see only the given GPUs.

    If this process has a mask itself, the other process is given entries of that mask. They may be
    indices, UUIDs or MIG ids.

    Args:
        gpus: indices, as `visible_gpus` counts them.

    Raises:
        ValueError: This process's mask has no entry of an index.
    """
    if os.environ.get(MASK) is None:
        return ",".join(map(str, gpus))
    entries = _mask_entries()
    chosen = []
    for index in gpus:
        if not 0 <= index < len(entries):
            raise ValueError(
                f"{MASK}={os.environ[MASK]!r} shows {len(entries)} GPUs, and none of index {index}"
            )
        chosen.append(entries[index])
    return ",".join(chosen)


def _mask_entries() -> list[str]:
    """Return the entries of this process's mask up to the first that is no device, as CUDA does."""
    entries: list[str] = []
    for text in os.environ.get(MASK, "").split(","):
        entry = text.strip()
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return entries
