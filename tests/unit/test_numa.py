"""Processes get cores of their NUMA node, by a made /sys. No GPU: torch's answers are stand-ins."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchtitan.experiments.rl import config_registry
from torchtitan.experiments.rl.command.checks import plan_run
from torchtitan.experiments.rl.process import host, setup
from torchtitan.experiments.rl.process.host import (
    cores_by_node,
    cores_near,
    cores_on_nodes_of,
    own_cores,
    pci_addresses,
)

GPUS = {"0000:1b:00.0": 0, "0000:43:00.0": 0, "0001:9a:00.0": 1, "0000:c3:00.0": -1}
"""The node of each, as /sys has it; -1: Linux does not know."""


@pytest.fixture
def system(tmp_path, monkeypatch) -> Path:
    """Two nodes whose cores take turns by fours, and four GPUs. This process may use all cores but 1 and 12."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    (tmp_path / "devices/system/node/online").write_text("0-1\n")
    for address, node in GPUS.items():
        folder = tmp_path / f"bus/pci/devices/{address}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)) - {1, 12})
    monkeypatch.setattr(host, "SYS", tmp_path)
    return tmp_path


@pytest.fixture
def gpus(monkeypatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        domain, bus, device = list(GPUS)[index].removesuffix(".0").split(":")
        return SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus, 16), pci_device_id=int(device, 16)
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


NODE_0, NODE_1 = (0, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 13, 14, 15)


def test_cores_are_counted_node_by_node(system):
    assert cores_by_node() == [NODE_0, NODE_1]
    assert own_cores() == [*NODE_0, *NODE_1]


def test_cores_of_which_linux_names_no_node_come_last(system):
    (system / "devices/system/node/node1/cpulist").unlink()
    assert cores_by_node() == [NODE_0, NODE_1]
    (system / "devices/system/node/node0/cpulist").write_text("4-5\n")
    assert own_cores() == [4, 5, 0, 2, 3, 6, 7, 8, 9, 10, 11, 13, 14, 15]


def test_trainer_and_generator_of_one_machine_have_a_node_each(system):
    placement = plan_run(config_registry.rl_grpo_qwen3_debug()).placement
    assert placement.generators[0].devices == NODE_0 and placement.trainer[0].devices == NODE_1


def test_a_process_on_cpu_is_set_up_on_the_nodes_of_its_share(system):
    assert cores_on_nodes_of([9, 10]) == NODE_0 and cores_on_nodes_of([4]) == NODE_1
    assert cores_on_nodes_of([0, 15]) == tuple(sorted(NODE_0 + NODE_1))
    assert cores_on_nodes_of([1]) == (), "a core that this process may not use"


def test_a_gpu_is_found_by_its_address_and_has_the_cores_of_its_node(system, gpus):
    assert pci_addresses() == list(GPUS)
    first, second, third, unknown = GPUS
    assert cores_near([first]) == cores_near([first, second]) == NODE_0
    assert cores_near([third]) == NODE_1
    assert set(cores_near([second, third])) == {*NODE_0, *NODE_1}
    # Where Linux does not say, the process stays where it is.
    assert (
        cores_near([unknown])
        == cores_near([first, unknown])
        == cores_near(["0000:ff:00.0"])
        == cores_near([])
        == ()
    )


def test_a_gpu_whose_cores_this_process_may_not_use_is_near_no_core(system, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5})
    assert cores_near(["0000:1b:00.0"]) == () and cores_near(["0001:9a:00.0"]) == (4, 5)


def test_a_driver_that_fails_places_nothing(monkeypatch):
    def broken(index: int) -> None:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert pci_addresses() == []


@pytest.mark.parametrize(("seen", "cores"), [([2], NODE_1), ([0, 1], NODE_0), ([3], None)])
def test_a_process_with_gpus_is_set_up_on_the_cores_near_them(system, monkeypatch, seen, cores):
    stayed = []
    monkeypatch.setattr(setup, "pci_addresses", lambda: [list(GPUS)[index] for index in seen])
    monkeypatch.setattr(setup.os, "sched_setaffinity", lambda thread, own: stayed.append(own))
    monkeypatch.setattr(setup, "ignore_signals_of_the_command", lambda: None)
    setup.set_up_spawned_process((tuple(seen),), "cuda")
    assert set(stayed) == ({cores} if cores else set())
