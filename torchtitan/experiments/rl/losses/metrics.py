"""Metrics that are right over a whole optimizer step: sums and weights travel, and are divided once, at the end."""

import math
from typing import Literal

import torch
import torch.distributed as dist

Kind = Literal["sum", "mean", "max"]


class MetricSums:
    """Named metrics of some tokens, to be merged over microbatches, reduced over ranks and turned into floats.

    A mean is kept as (sum, weight), so a merged mean is over tokens, never an average of averages. Values are float64 and stay
    on the device they came from until ``all_reduce`` or ``compute``.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Kind, torch.Tensor]] = {}

    def add_sum(self, name: str, value: torch.Tensor | float) -> None:
        """A part of a sum, such as a microbatch's loss already divided by the step's denominator."""
        self._add(name, "sum", torch.as_tensor(value).detach().double().reshape(1))

    @torch.no_grad()
    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Values of the tokens where ``mask`` is True, each with weight 1. What lies elsewhere may be anything.

        Args:
            values: any shape and dtype.
            mask: bool, of the same shape.
        """
        self._add(name, "mean", torch.stack([torch.where(mask, values.double(), 0).sum(), mask.sum().double()]))

    @torch.no_grad()
    def add_max(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """As add_mean, but the largest is kept. A nan is kept too: it is what one looks for."""
        nothing = values.new_full((1,), -math.inf, dtype=torch.float64)
        self._add(name, "max", torch.cat([torch.where(mask, values.double(), -math.inf).flatten(), nothing]).max().reshape(1))

    def merge(self, other: "MetricSums") -> None:
        """Take in the metrics of another microbatch or rank. Names may differ.

        Raises:
            ValueError: a name is a metric of another kind there.
        """
        for name, (kind, value) in other._entries.items():
            self._add(name, kind, value)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Merge over the ranks of ``group``: afterwards each holds the same, on the CPU. Nothing to do in a single process.

        A rank that saw no token of a task lacks its name, so names travel with the values: one gather of a few kilobytes a
        rank, merged in rank order, which gives every rank the same bits.
        """
        if not dist.is_initialized():
            return
        ranks: list[dict[str, tuple[Kind, list[float]]]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(ranks, self._numbers(), group=group)
        self._entries = {}
        for entries in ranks:
            for name, (kind, value) in entries.items():
                self._add(name, kind, torch.tensor(value, dtype=torch.float64))

    def compute(self) -> dict[str, float]:
        """Floats by name, sorted. A mean or maximum of no token is left out: there is no number to report."""
        floats = {}
        for name, (kind, (value, *weight)) in sorted(self._numbers().items()):
            if any(weight) or kind == "sum" or (kind == "max" and value != -math.inf):
                floats[name] = value / weight[0] if weight else value
        return floats

    def _numbers(self) -> dict[str, tuple[Kind, list[float]]]:
        """By name. One transfer from a device for all of them: each would wait for it."""
        found: dict[str, tuple[Kind, list[float]]] = {}
        for device in {value.device for _, value in self._entries.values()}:
            own = [(name, kind, value) for name, (kind, value) in self._entries.items() if value.device == device]
            numbers = iter(torch.cat([value for *_, value in own]).tolist())
            found |= {name: (kind, [next(numbers) for _ in value]) for name, kind, value in own}
        return found

    def _add(self, name: str, kind: Kind, value: torch.Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = (kind, value)
            return
        held_kind, held = self._entries[name]
        if held_kind != kind:
            raise ValueError(f"metric {name!r} is a {held_kind} and can't also be a {kind}: give one of them another name")
        value = value.to(held.device)
        self._entries[name] = (kind, torch.maximum(held, value) if kind == "max" else held + value)


OwnMetrics = dict[str, torch.Tensor]
"""A value [B, L] for each token, by the metric's name. What it is on tokens that are no member does not matter."""


def add_own_metrics(sums: MetricSums, component: str, own: OwnMetrics, member: torch.Tensor) -> None:
    """
    Raises:
        ValueError: a metric that is no value for each token; names it.
    """
    for name, values in own.items():
        if not isinstance(values, torch.Tensor) or values.shape != member.shape:
            kind = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            raise ValueError(f"metric {component}/own/{name} has {kind}: want a tensor of shape {tuple(member.shape)}")
        sums.add_mean(f"{component}/own/{name}", values.detach(), member)
