"""A shuffle of ``range(size)`` that is computed place by place: nothing is stored, any place costs the same.

A Feistel network over pairs (L, R) of Z_a × Z_b, with a·b just above ``size``, permutes a·b places for any round
function; places that land outside ``range(size)`` are sent through it again until they are inside (cycle walking),
which leaves a permutation of ``range(size)``. Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
sections 3 and 4. The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014). It gives a good order, not a secret one.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeyedPermutation"]

# With 12 rounds every order of 2 to 5 records is as frequent as any other; with 8, those of 5 are not.
_ROUNDS = 12


class KeyedPermutation:
    """One permutation of ``range(size)`` for each key; equal on every machine.

    Args:
        size: 1 to 2**62.
        key: ints, in an order that matters.
    """

    def __init__(self, size: int, *key: int) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size is {size!r}; accepted: an int from 1 to 2**62")
        self.size = size
        left = math.isqrt(size - 1) + 1
        # Both factors stay at or below 2**31, so that a product with 32 random bits fits 64.
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        stream = hashlib.shake_128(repr(tuple(map(int, key))).encode()).digest(8 * _ROUNDS)
        self._round_keys = np.frombuffer(stream, dtype="<u8").astype(np.uint64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[n] places in ``range(size)`` → int64[n], where the permutation sends each."""
        sent = self._network(places.astype(np.uint64))
        limit = np.uint64(self.size)
        outside = np.flatnonzero(sent >= limit)
        while outside.size:
            again = self._network(sent[outside])
            sent[outside] = again
            outside = outside[again >= limit]
        return sent.astype(np.int64)

    def _network(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(places, self._right)
        for first, second in self._round_keys.reshape(-1, 2):
            left = _add(left, _random_below(self._left, right + first), self._left)
            right = _add(right, _random_below(self._right, left + second), self._right)
        sent: NDArray[np.uint64] = left * self._right + right
        return sent


def _random_below(bound: np.uint64, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number below ``bound`` <= 2**32 for each word, which is overwritten."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    words >>= np.uint64(32)
    words *= bound
    words >>= np.uint64(32)
    return words


def _add(value: NDArray[np.uint64], summand: NDArray[np.uint64], modulus: np.uint64) -> NDArray[np.uint64]:
    summand += value
    summand[summand >= modulus] -= modulus
    return summand
