"""Which cores of this host are near each other, and near a GPU: its NUMA nodes, as Linux describes them in /sys.

A process on the cores of a node has its memory there too: Linux gives a process pages of the node that it runs on.
"""

import os
from collections.abc import Iterable
from pathlib import Path

SYS = Path("/sys")


def cores_by_node() -> list[tuple[int, ...]]:
    """The cores that this process may use: of each node that has some, and last those of which Linux names no node."""
    left = set(os.sched_getaffinity(0))
    found = []
    for node in sorted((SYS / "devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:])):
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
        own = _cores_of(SYS / f"devices/system/node/node{_node_of(address)}") & os.sched_getaffinity(0)
        if not own:
            return ()
        near |= own
    return tuple(sorted(near))


def _node_of(address: str) -> int:
    """-1 where it is not known."""
    try:
        return int((SYS / f"bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


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
