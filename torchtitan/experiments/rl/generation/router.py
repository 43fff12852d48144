"""Which replica gets a request."""


class Router:
    """Chooses a replica: the one that has the conversation's prefix cached, else the least loaded (lowest index on a tie)."""

    def __init__(self, replicas: int):
        """``replicas`` are open from the start."""
        self.load = [0] * replicas
        """Tokens in flight by replica: the prompts, and the most that may be sampled."""
        self._open = set(range(replicas))

    def choose(self, last_replica: int | None) -> int:
        """At least one replica is open."""
        if last_replica in self._open:
            return last_replica
        return min(sorted(self._open), key=self.load.__getitem__)

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
