"""Chooses the replica that a request goes to."""

import heapq
from collections import Counter

AHEAD = 16
"""Number of requests of its own size by which a group's replica may be ahead of the least loaded
one before the group moves. The rollouts of a group begin with one prompt, which a replica computes
once.

``benchmarks/prefix_routing.py``, prompts of 512 tokens: 16 groups of 8 are 1.4 times as quick as
with rollouts that go to any replica. One group of 128 is as quick; without a bound it leaves a
replica idle, and takes 1.5 times as long."""


class Router:
    """Chooses a replica for each request, and counts the tokens in flight on each.

    A request goes to the replica that has its conversation cached; else to the one that has the
    prompt of its group, unless that is too far ahead; else to the least loaded, of these the one
    with the lowest index.
    """

    def __init__(self) -> None:
        self.load: Counter[int] = Counter()
        """Tokens in flight by replica: prompts, and the most that may be sampled."""
        self._open: set[int] = set()
        """Replicas that may be chosen."""
        self._by_load: list[tuple[int, int]] = []
        """Heap of (load, replica). It holds the current load of each open replica, and older
        entries, which are passed over. So a request does not cost more for each replica that there
        is (benchmarks/control_plane.py)."""
        self._replica_of: dict[str, int] = {}
        """Replica of each group."""

    def open(self, replica: int) -> None:
        """Start to route requests to this replica."""
        self._open.add(replica)
        self.add(replica, 0)

    def close(self, replica: int) -> None:
        """Stop routing requests to this replica."""
        self._open.discard(replica)

    def add(self, replica: int, tokens: int) -> None:
        """Count tokens that are in flight from now on; below 0, tokens that no longer are."""
        self.load[replica] += tokens
        if replica in self._open:
            heapq.heappush(self._by_load, (self.load[replica], replica))
        if len(self._by_load) > 8 * len(self._open) + 64:
            self._by_load = [(self.load[replica], replica) for replica in self._open]
            heapq.heapify(self._by_load)

    def choose(self, last_replica: int | None, *, group: str = "", tokens: int = 0) -> int:
        """Return the replica for a request. At least one is open.

        Args:
            last_replica: replica of the conversation's last turn; None at its first.
            group: group of the rollout; "" for a request that belongs to none.
            tokens: number of tokens that the request will add to the load.
        """
        if last_replica is not None and last_replica in self._open:
            return last_replica
        least = self._least_loaded()
        if not group:
            return least
        replica = self._replica_of.get(group)
        is_too_far_ahead = (
            replica is not None and self.load[replica] > self.load[least] + AHEAD * tokens
        )
        if replica is None or replica not in self._open or is_too_far_ahead:
            replica = least
            self._replica_of[group] = replica
        return replica

    def forget(self, group: str) -> None:
        """Forget a group that will make no more requests."""
        self._replica_of.pop(group, None)

    def _least_loaded(self) -> int:
        while True:
            load, replica = self._by_load[0]
            if replica in self._open and load == self.load[replica]:
                return replica
            heapq.heappop(self._by_load)
