"""Which samples share a prefix, and what they cost as a tree. Pure functions of token ids and lengths, deterministic."""

from collections.abc import Sequence

import numpy as np

LEAST_SHARE = 1 / 32
"""A prefix is shared where it is at least this part of a sample. Attention to a branch has a cost of its own, on CPU."""

_FIRST_TOKENS = 32


def prefix_order(samples: Sequence[tuple[float, np.ndarray]]) -> tuple[list[int], np.ndarray]:
    """Order samples so that those that begin alike are side by side.

    A walk through the samples in this order visits their prefix tree depth first: each sample leaves the path to the one
    before it where their tokens part.

    Args:
        samples: temperature and int32 token ids of each. Samples of unequal temperature share nothing.

    Returns:
        Indices of the samples in order, and int64 [samples]: how many tokens of each are also the first of the one before it.
    """
    begins: dict[tuple[float, int], list[int]] = {}
    for index, (temperature, token_ids) in enumerate(samples):
        begins.setdefault((temperature, int(token_ids[0])), []).append(index)
    order: list[int] = []
    shared = np.zeros(len(samples), np.int64)
    for alike in begins.values():
        if len(alike) > 1:
            alike = _sorted(alike, [samples[index][1].astype(np.int32, copy=False) for index in alike])
            pairs = zip(alike, alike[1:], strict=False)
            shared[len(order) + 1 : len(order) + len(alike)] = [_common(samples[i][1], samples[j][1]) for i, j in pairs]
        order += alike
    return order, shared


def shared_in_row(ranks: Sequence[int], lengths: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """What each sample of a row shares with the one before it in the row, where that is worth it.

    Args:
        ranks: the row's samples by their place in the order, ascending.
        lengths, shared: of all samples in the order.

    Returns:
        int64 [ranks]. 0 begins a tree.
    """
    own = np.zeros(len(ranks), np.int64)
    if len(ranks) > 1:
        # Two samples share what all neighbours between them share.
        own[1:] = np.minimum.reduceat(shared[1 : ranks[-1] + 1], ranks[:-1])
    own[own < LEAST_SHARE * lengths[ranks]] = 0
    return own


def tree_units(lengths: np.ndarray, shared: np.ndarray, most: int) -> list[range]:
    """Cut the order into trees of at most ``most`` tokens, where the least is shared.

    The strongest links are made first. A sample that is longer by itself is a tree of its own.
    """
    count = len(lengths)
    tokens, end, start = lengths.tolist(), list(range(1, count + 1)), list(range(-1, count))
    links = np.flatnonzero((shared > 0) & (shared >= LEAST_SHARE * lengths))
    for link in sorted(links.tolist(), key=lambda at: (-shared[at], at)):
        left = start[link]  # of the unit that ends here; another one starts here
        joined = tokens[left] + tokens[link] - int(shared[link])
        if joined <= most:
            tokens[left], end[left] = joined, end[link]
            start[end[link]] = left
    units, at = [], 0
    while at < count:
        units.append(range(at, end[at]))
        at = end[at]
    return units


def _sorted(indices: list[int], token_ids: list[np.ndarray]) -> list[int]:
    """The indices by their token ids. Any order of the ids will do, so their bytes are compared as they are.

    Most samples part within their first tokens: only the others' are compared as a whole.
    """
    begins: dict[bytes, list[int]] = {}
    for place, ids in enumerate(token_ids):
        begins.setdefault(ids[:_FIRST_TOKENS].tobytes(), []).append(place)
    places: list[int] = []
    for begin in sorted(begins):
        alike = begins[begin]
        places += sorted(alike, key=lambda place: token_ids[place].tobytes()) if len(alike) > 1 else alike
    return [indices[place] for place in places]


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Tokens that two samples begin with alike."""
    length = min(len(left), len(right))
    if length > _FIRST_TOKENS and left[:_FIRST_TOKENS].tobytes() != right[:_FIRST_TOKENS].tobytes():
        length = _FIRST_TOKENS
    parted = left[:length] != right[:length]
    first = int(parted.argmax())
    return first if parted[first] else length
