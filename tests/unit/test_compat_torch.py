"""The private API of torch that the library uses is there and does what the library needs. An upgrade that breaks it
fails here, by its name."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.experiments.rl.compat.torch import local_shard


@pytest.fixture
def third_of_four():
    """This process is rank 2 of 4; the others are not there, and nothing is sent."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(local: torch.Tensor, mesh, *placements, shape: tuple[int, int]) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def test_compute_local_shape_and_global_offset_gives_the_shard_of_this_rank(third_of_four):
    line = init_device_mesh("cpu", (4,))
    # 10 rows over 4 ranks: 3, 3, 3, 1.
    assert local_shard(sharded(torch.zeros(3, 5), line, Shard(0), shape=(10, 5))) == ((6, 0), (3, 5))
    # 2 rows over 4 ranks: nothing for this one.
    assert local_shard(sharded(torch.zeros(0, 5), line, Shard(0), shape=(2, 5)))[1] == (0, 5)
    assert local_shard(sharded(torch.zeros(10, 5), line, Replicate(), shape=(10, 5))) == ((0, 0), (10, 5))
    # Ranks 0, 1 above 2, 3: this is the second row's first.
    square = init_device_mesh("cpu", (2, 2))
    assert local_shard(sharded(torch.zeros(5, 2), square, Shard(0), Shard(1), shape=(10, 4))) == ((5, 0), (5, 2))
    assert local_shard(sharded(torch.zeros(10, 2), square, Replicate(), Shard(1), shape=(10, 4))) == ((0, 0), (10, 2))
