"""torch 2.13.0."""

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_shard(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's shard in the whole tensor.

    ``torch.distributed.tensor._utils`` is private. DTensor has no public way to the offset; torch's own checkpoints use this
    one.
    """
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(shape)
