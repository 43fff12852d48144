"""Random orders of the examples of a dataset, however many it has."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

LARGEST_TABLE = 2**24
"""Examples up to which an order is held in memory, at 8 bytes each."""

_ROUNDS = 6
_WORD = 2**64 - 1


class Order(Protocol):
    """Each number from 0 to len - 1, once."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> int: ...


def random_order(size: int, seed: int | Sequence[int]) -> Order:
    """An order of ``size`` examples that follows from the seed alone. Above ``LARGEST_TABLE`` it takes no memory."""
    random = np.random.default_rng(seed)
    if size > LARGEST_TABLE:
        return ComputedOrder(size, [int(key) for key in random.integers(0, 2**63, _ROUNDS)])
    return random.permutation(size)


class ComputedOrder:
    """An order that computes each of its places, by a Feistel network.

    The network permutes the numbers of an even number of bits, of which there are at most four times ``size``. A result that is
    no example goes through it again, until it is one (cycle walking: Black and Rogaway, 2002). So every example has one place.
    """

    def __init__(self, size: int, keys: Sequence[int]):
        """
        Args:
            keys: of the rounds; they choose the order.
        """
        self._size, self._keys = size, keys
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int, /) -> int:
        if not 0 <= place < self._size:
            raise IndexError(place)
        number = self._permuted(place)
        while number >= self._size:
            number = self._permuted(number)
        return number

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half_bits) - 1
        left, right = number >> self._half_bits, number & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return left << self._half_bits | right


def _mixed(word: int) -> int:
    """The finalizer of SplitMix64 (Steele et al., 2014): each bit of the input changes about half of the output's."""
    word &= _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
