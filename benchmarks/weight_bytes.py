"""Bytes and seconds of one weight update by its parts: as it was, through the host, and from the ranks' devices.

    python benchmarks/weight_bytes.py [--megabytes 500 3000] [--workers 1 2] [--ranks 4] [--repeats 3]

1. CPU tensors play the GPUs' memory, so that each byte is really moved; what a GPU's bus and memory would take follows from the
   bytes. Tensors are bfloat16, as of a decoder: half of them are divided by columns between tensor-parallel workers.
2. "As it was" is what stood until the digests were taken where tensors lie: the trainer's host hashed the snapshot (XXH3); each
   worker packed its slices on the CPU, copied every parameter back into fresh memory and hashed it there; one of several
   workers also hashed the same region of the snapshot, and then all of the snapshot.
3. "Through the host" calls the library's own ``copy_out`` and ``digest``, as a trainer on a CPU does: it digests beside its
   next step. On a GPU it digests each tensor before the copy, and waits for that.
4. "From the devices": each rank has rows of every tensor, and keeps them in a buffer of its own device. A worker puts each
   tensor together from these (``PartedTensors``), and the engine takes its share of it. Where that is all of it, its parts are
   copied there at once. So are those of several ranks in the host's memory.
5. A copy reads each byte once and writes it once; both count. Half a megabyte at a time, a digest works in a core's cache.

The sides take turns; each figure is a median. One worker after the other: with several they would share the cores.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch  # noqa: E402
import xxhash  # noqa: E402

from torchtitan.experiments.rl.weights.publisher import copy_out  # noqa: E402
from torchtitan.experiments.rl.weights.snapshot import (  # noqa: E402
    Manifest,
    PartedTensors,
    RankParts,
    Shard,
    SharedBuffer,
    buffer_bytes,
    digest,
    index_of,
    named,
    views,
    whole,
)

DIM = 2048
Tensors = dict[str, torch.Tensor]


class Update:
    """A model on the trainer, its snapshot, and the workers' shares of it."""

    def __init__(self, megabytes: int, workers: int, ranks: int):
        layer = {"up": (4 * DIM, DIM), "down": (DIM, 4 * DIM), "norm": (DIM,)}
        layers = max(1, round(megabytes * 1e6 / (2 * 8 * DIM * DIM)))
        shapes = {f"{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
        self.trainer = {
            name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
        }
        shards = {name: whole(shape) for name, shape in shapes.items()}
        self.buffer = SharedBuffer.create(buffer_bytes(shards, torch.bfloat16))
        self.snapshot = views(self.buffer.bytes, shards, torch.bfloat16)
        self.places = [
            {name: place(name, shape, rank, workers) for name, shape in shapes.items()}
            for rank in range(workers)
        ]
        self.held = [
            {name: self.snapshot[name][index_of(p)].clone() for name, p in own.items()}
            for own in self.places
        ]
        self.parts = []
        """Of each rank: its buffer, its shards, and where it writes them."""
        for rank in range(ranks):
            own = {name: place("rows.up", shape, rank, ranks) for name, shape in shapes.items()}
            buffer = SharedBuffer.create(buffer_bytes(own, torch.bfloat16))
            self.parts.append((buffer, own, views(buffer.bytes, own, torch.bfloat16)))
        self.manifest = Manifest(
            version=1,
            shapes=shapes,
            dtype=torch.bfloat16,
            parts=tuple(RankParts("here", buffer.path, own) for buffer, own, _ in self.parts),
            publication="",
            digests={},
        )
        self.nbytes = sum(tensor.nbytes for tensor in self.trainer.values())
        self.moved: Counter[str] = Counter()

    def copy(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        self.moved[name] += 2 * source.nbytes

    def hashed(self, tensor: torch.Tensor) -> str:
        if not tensor.is_contiguous():
            packed = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copy("packed on the CPU", packed, tensor)
            tensor = packed
        self.moved["hashed on the CPU"] += tensor.nbytes
        return xxhash.xxh3_128_hexdigest(tensor.view(torch.uint8).numpy().data)

    def as_it_was(self) -> Iterator[str]:
        for name, tensor in self.trainer.items():
            self.copy("out of the trainer", self.snapshot[name], tensor)
        yield "trainer waits"
        published = {name: self.hashed(view) for name, view in self.snapshot.items()}
        yield "beside"
        for places, held in zip(self.places, self.held, strict=True):
            for name, own in held.items():
                part = self.snapshot[name][index_of(places[name])]
                if not part.is_contiguous():
                    packed = torch.empty(part.shape, dtype=part.dtype)
                    self.copy("packed on the CPU", packed, part)
                    part = packed
                self.copy("into the engine", own, part)
            for name, own in held.items():
                back = torch.empty(own.shape, dtype=own.dtype)
                self.copy("back to the host", back, own)
                found, whole = self.hashed(back), self.snapshot[name]
                if own.shape != whole.shape:
                    assert found == self.hashed(whole[index_of(places[name])])
                    found = self.hashed(whole)
                assert found == published[name]
        yield "engine stands"

    def through_the_host(self) -> Iterator[str]:
        for name, tensor in self.trainer.items():
            copy_out(self.snapshot[name], tensor)
            self.moved["out of the trainer"] += 2 * tensor.nbytes
        yield "trainer waits"
        published = {name: int(digest(view)) for name, view in self.snapshot.items()}
        self.moved["digested where it lies"] += self.nbytes
        yield "beside"
        for places, held in zip(self.places, self.held, strict=True):
            for name, own in held.items():
                whole = self.snapshot[name]
                if own.shape != whole.shape:
                    arrived = torch.empty(whole.shape, dtype=whole.dtype)
                    self.copy("into the engine", arrived, whole)
                    self.copy("sliced in the engine", own, arrived[index_of(places[name])])
                else:
                    self.copy("into the engine", own, whole)
        self.verify(published)
        yield "engine stands"

    def from_the_devices(self) -> Iterator[str]:
        for _, shards, targets in self.parts:
            for name, target in targets.items():
                self.copy("out of the trainer", target, self.trainer[name][index_of(shards[name])])
        yield "trainer waits"
        published: Counter[str] = Counter()
        for _, shards, targets in self.parts:
            for name, part in targets.items():
                published[name] += int(digest(part, shards[name], tuple(self.trainer[name].shape)))
                self.moved["digested where it lies"] += part.nbytes
        yield "beside"
        tensors = PartedTensors(self.manifest, [buffer.bytes for buffer, _, _ in self.parts])
        for places, held in zip(self.places, self.held, strict=True):
            for name, own in held.items():
                self.moved["into the engine"] += 2 * self.snapshot[name].nbytes
                if own.shape == self.snapshot[name].shape:
                    tensors.copy_to(name, own)
                else:
                    self.copy("within the engine", own, tensors[name][index_of(places[name])])
        self.verify(published)
        yield "engine stands"

    def verify(self, published: Mapping[str, int]) -> None:
        """The shares that the workers hold are those of what was published."""
        sums: Counter[str] = Counter()
        for rank, (places, held) in enumerate(zip(self.places, self.held, strict=True)):
            for name, own in held.items():
                if rank == 0 or own.shape != self.snapshot[name].shape:
                    sums[name] += int(digest(own, places[name], tuple(self.snapshot[name].shape)))
                    self.moved["digested where it lies"] += own.nbytes
        assert named(sums.items()) == named(published.items())

    def measure(self, way: Callable[[], Iterator[str]]) -> tuple[dict[str, float], Counter[str]]:
        self.moved.clear()
        seconds, began = {}, time.perf_counter()
        for part in way():
            seconds[part], began = time.perf_counter() - began, time.perf_counter()
        return seconds, self.moved.copy()


def place(name: str, shape: tuple[int, ...], rank: int, workers: int) -> Shard:
    """A worker's share: rows of "up", columns of "down", all of a norm."""
    divided = {"up": 0, "down": 1}.get(name.partition(".")[2])
    size = {d: (rank * n // workers, (rank + 1) * n // workers) for d, n in enumerate(shape)}
    return tuple(size[d] if d == divided else (0, n) for d, n in enumerate(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[500, 3000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    for megabytes in arguments.megabytes:
        for workers in arguments.workers:
            update = Update(megabytes, workers, arguments.ranks)
            ways: dict[str, Callable[[], Iterator[str]]] = {"as it was": update.as_it_was}
            ways |= {
                "through the host": update.through_the_host,
                "from the devices": update.from_the_devices,
            }
            found: dict[str, list[tuple[dict[str, float], Counter[str]]]] = {
                name: [] for name in ways
            }
            for repeat in range(arguments.repeats + 1):  # the first touches fresh memory
                for name, way in ways.items():
                    run = update.measure(way)
                    found[name] += [run] if repeat else []
            print(
                f"{update.nbytes / 1e6:.0f} MB, {workers} worker(s); bytes as multiples of the model's",
                flush=True,
            )
            for name, runs in found.items():
                seconds = {
                    part: statistics.median(run[part] for run, _ in runs) for part in runs[0][0]
                }
                moved = ", ".join(
                    f"{part} {nbytes / update.nbytes:.2f}" for part, nbytes in runs[0][1].items()
                )
                spent = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
                print(f"  {name}: {spent}\n      {moved}", flush=True)
            del update, ways, found


if __name__ == "__main__":
    main()
