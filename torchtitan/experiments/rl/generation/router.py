"""Which replica gets a request."""

AHEAD = 16
"""Requests of its own size by which a group's replica may be ahead of the least loaded one before the group moves. The rollouts
of a group begin with one prompt, which a replica computes once.

``benchmarks/prefix_routing.py``, prompts of 512 tokens: 16 groups of 8 are 1.4 times as quick as with rollouts that go to any
replica. One group of 128 is as quick; without a bound it leaves a replica idle, and takes 1.5 times as long."""


class Router:
    """Chooses a replica: the one that has the conversation cached; else the one that has the prompt of the group, unless it is
    too far ahead; else the least loaded (lowest index on a tie)."""

    def __init__(self, replicas: int):
        """``replicas`` are open from the start."""
        self.load = [0] * replicas
        """Tokens in flight by replica: the prompts, and the most that may be sampled."""
        self._open = set(range(replicas))
        self._replica_of: dict[str, int] = {}
        """By group."""

    def choose(self, last_replica: int | None, *, group: str = "", tokens: int = 0) -> int:
        """At least one replica is open.

        Args:
            last_replica: of the conversation's last turn; None at its first.
            group: of the rollout; "" for a request that belongs to none.
            tokens: what the request will add to the load.
        """
        if last_replica in self._open:
            return last_replica
        least = min(sorted(self._open), key=self.load.__getitem__)
        if not group:
            return least
        replica = self._replica_of.get(group)
        if replica not in self._open or self.load[replica] > self.load[least] + AHEAD * tokens:
            replica = self._replica_of[group] = least
        return replica

    def forget(self, group: str) -> None:
        """No more requests of this group will come."""
        self._replica_of.pop(group, None)

    def add(self, replica: int, tokens: int) -> None:
        self.load[replica] += tokens

    def remove(self, replica: int, tokens: int) -> None:
        self.load[replica] -= tokens

    def close(self, replica: int) -> None:
        """Choose it no more."""
        self._open.discard(replica)

    def open(self, replica: int) -> None:
        """Choose it from now on."""
        self._open.add(replica)
        self.load += [0] * (replica + 1 - len(self.load))
