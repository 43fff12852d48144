"""Copies from a GPU, as far as a CPU can tell: what torch is asked to do, by stand-ins for it."""

from mmap import PAGESIZE as PAGE
from types import SimpleNamespace

import pytest
import torch

from torchtitan.experiments.rl.weights import publisher as publisher_module
from torchtitan.experiments.rl.weights.publisher import SnapshotPublisher
from torchtitan.experiments.rl.weights.snapshot import SharedBuffer


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
    publisher_module.copy_to_host(target, OnGpu(values))
    assert target.calls == [(torch.bfloat16, whole)]
    torch.testing.assert_close(target.memory, values.bfloat16())


@pytest.mark.parametrize("code, locked", [(0, True), (1, False)])
def test_pages_of_the_targets_are_locked_and_a_refusal_is_only_logged(monkeypatch, caplog, code, locked):
    calls = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *arguments: calls.append(arguments) or code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    kept = [code]  # the runtime's last error, which a kernel launch would raise
    monkeypatch.setattr(publisher_module, "take_cuda_error", kept.clear)
    buffer = SharedBuffer.create(8 * PAGE).bytes
    first = buffer.data_ptr()
    assert publisher_module.page_lock([buffer[:10], buffer[3 * PAGE : 4 * PAGE]]) is locked
    assert calls == [(first, PAGE, 0), (first + 3 * PAGE, PAGE, 0)][: 1 if code else 2]
    assert not any(kept), "the next kernel launch finds no error"
    assert ("can't be page-locked (CUDA error 1)" in caplog.text) is not locked


def test_no_page_is_locked_twice_and_none_that_holds_nothing_of_the_targets():
    buffer = SharedBuffer.create(16 * PAGE).bytes
    first = buffer.data_ptr()
    columns = buffer[8 * PAGE : 12 * PAGE].view(2, 2 * PAGE)[:, :100]  # on the first and the third of four pages
    targets = [
        buffer[5 * PAGE + 1 : 6 * PAGE + 1],  # from the sixth page to the first byte of the seventh
        buffer[10:20],
        buffer[PAGE - 1 : PAGE + 1],  # shares the first page with the one before
        buffer[6 * PAGE + 7 : 6 * PAGE + 8],  # on the seventh too
        columns,
        buffer[:0],
    ]
    expected = [(0, 2), (5, 2), (8, 3)]
    assert publisher_module.page_ranges(targets) == [(first + start * PAGE, pages * PAGE) for start, pages in expected]


def test_a_publisher_locks_what_it_writes_once_and_returns_when_the_gpu_has_written_them(monkeypatch):
    """The device of every tensor is said to be a GPU; the copies themselves are the CPU's."""
    events = []
    module = "torchtitan.experiments.rl.weights.publisher"
    monkeypatch.setattr(f"{module}.page_lock", lambda targets: events.append(f"lock {len([*targets])}"))
    monkeypatch.setattr(f"{module}.wait_for_copies", lambda device: events.append(f"wait for {device.type}"))
    real = publisher_module.copy_to_host
    monkeypatch.setattr(f"{module}.copy_to_host", lambda target, source: (events.append("copy"), real(target, source)))
    publisher = SnapshotPublisher(rank=0, host="here", dtype=torch.bfloat16)
    reach = publisher._reach
    monkeypatch.setattr(publisher, "_reach", lambda device: reach(torch.device("cuda")))
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    publisher.write(1, tensors)
    publisher.write(2, tensors)
    one_write = ["copy", "copy", "wait for cuda"]
    assert events == ["lock 4", *one_write, *one_write]  # two tensors in each of two buffers
