"""Copies from a GPU, as far as a CPU can tell: what torch is asked to do, by stand-ins for it."""

from types import SimpleNamespace

import pytest
import torch

from torchtitan.experiments.rl.weights import device_copy
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher


class OnGpu:
    """A tensor that says it lies on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, values: torch.Tensor):
        self.values = values

    def to(self, dtype: torch.dtype) -> "OnGpu":
        return OnGpu(self.values.to(dtype))


class Target:
    """CPU memory that records how it is written."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.dtype, self.calls = memory, memory.dtype, []

    def is_contiguous(self) -> bool:
        return self.memory.is_contiguous()

    def copy_(self, source: OnGpu, non_blocking: bool = False) -> None:
        self.calls.append((source.values.dtype, non_blocking))
        self.memory.copy_(source.values)


@pytest.mark.parametrize("whole", [True, False])
def test_a_gpu_converts_before_it_copies_and_waits_only_for_targets_with_gaps(whole):
    memory = torch.zeros(4, 6, dtype=torch.bfloat16)
    target = Target(memory if whole else memory[:, :3])
    values = torch.randn(target.memory.shape)
    device_copy.copy_to_host(target, OnGpu(values))
    assert target.calls == [(torch.bfloat16, whole)]
    torch.testing.assert_close(target.memory, values.bfloat16())


@pytest.mark.parametrize("code, locked", [(0, True), (1, False)])
def test_pages_of_the_whole_buffer_are_locked_and_a_refusal_is_only_logged(monkeypatch, caplog, code, locked):
    calls = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *arguments: calls.append(arguments) or code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    buffer = torch.zeros(4096, dtype=torch.uint8)
    assert device_copy.page_lock(buffer) is locked
    assert calls == [(buffer.data_ptr(), 4096, 0)]
    assert ("can't be page-locked (CUDA error 1)" in caplog.text) is not locked


def test_a_publisher_locks_its_buffers_once_and_returns_when_the_gpu_has_written_them(monkeypatch):
    """The device of every tensor is said to be a GPU; the copies themselves are the CPU's."""
    events = []
    module = "torchtitan.experiments.rl.weights.publisher"
    monkeypatch.setattr(f"{module}.page_lock", lambda buffer: events.append("lock"))
    monkeypatch.setattr(f"{module}.wait_for_copies", lambda device: events.append(f"wait for {device.type}"))
    real = device_copy.copy_to_host
    monkeypatch.setattr(f"{module}.copy_to_host", lambda target, source: (events.append("copy"), real(target, source)))
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.bfloat16)
    reach = publisher._reach
    monkeypatch.setattr(publisher, "_reach", lambda device: reach(torch.device("cuda")))
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    publisher.write(1, tensors)
    publisher.write(2, tensors)
    one_write = ["copy", "copy", "wait for cuda"]
    assert events == ["lock", "lock", *one_write, *one_write]
