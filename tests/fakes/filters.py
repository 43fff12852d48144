"""A filter for tests, and filters applied as the rollout loop applies them."""

from collections.abc import Sequence

from torchtitan.experiments.rl.rollouts.filters import Filter, FilterResult, combine, matches_of
from torchtitan.experiments.rl.rollouts.types import RolloutGroup


class Odd(Filter):
    """Filter that matches every second rollout of a group, beginning with the second."""

    def matches(self, group: RolloutGroup) -> list[bool]:
        return [rollout.index_in_group % 2 == 1 for rollout in group.scored]


def apply_filters(filters: Sequence[Filter], group: RolloutGroup) -> FilterResult:
    """Return what the filters keep and drop of a group."""
    return combine(
        [(entry, entry.name) for entry in filters],
        group,
        [matches_of(entry, group) for entry in filters],
    )
