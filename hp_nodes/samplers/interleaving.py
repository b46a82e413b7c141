"""An endless interleaving of several sources by weight, computed place by place.

For two sources the exact rule is the largest remainder: of the first p places the left one has round(p · share), and
the right one the rest. Rounding three or more shares like that may take a place away again as p grows (the Alabama
paradox: Balinski and Young, "Fair Representation", 1982), so more sources are halved again and again: a binary tree,
with the rule for two at each of its nodes. The tree is Huffman's, in which no inner node has more than two thirds of
its parent's weight: that keeps every source within 2 places of its share at every place, whatever the number of
sources.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interleaving", "integer_weights"]

# With it no intermediate of the largest-remainder rule leaves 63 bits.
_LARGEST_TOTAL = 2**30


class _Split(NamedTuple):
    """An inner node: where its places go."""

    left: _Split | int
    right: _Split | int
    left_weight: int
    weight: int


class Interleaving:
    """Which source each place belongs to.

    Args:
        weights: one finite number above 0 for each source. Their ratios are kept exactly as written (0.1 is a tenth)
            when they are those of ints with a sum up to 2**30, else to within one part in 2**30.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = integer_weights(weights)
        # Sources of equal weight are ordered by number, so that the tree is the same everywhere.
        heap: list[tuple[int, int, _Split | int]] = [(weight, i, i) for i, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            weight = light[0] + heavy[0]
            heapq.heappush(heap, (weight, min(light[1], heavy[1]), _Split(heavy[2], light[2], heavy[0], weight)))
        self._root = heap[0][2]

    def __call__(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each place, int64[n] >= 0, and how many earlier places that source has; int64[n] each."""
        sources, counts = np.empty_like(places), np.empty_like(places)
        waiting = [(self._root, places, np.arange(len(places)))]
        while waiting:
            node, within, rows = waiting.pop()
            if isinstance(node, int):
                sources[rows], counts[rows] = node, within
                continue
            before = _left_share(node, within)
            goes_left = _left_share(node, within + 1) > before
            if goes_left.any():
                waiting.append((node.left, before[goes_left], rows[goes_left]))
            if not goes_left.all():
                waiting.append((node.right, (within - before)[~goes_left], rows[~goes_left]))
        return sources, counts

    def counts(self, places: int) -> list[int]:
        """How many of the first ``places`` places each source has."""
        found = [0] * len(self.weights)
        waiting = [(self._root, np.array([places], np.int64))]
        while waiting:
            node, total = waiting.pop()
            if isinstance(node, int):
                found[node] = int(total[0])
            else:
                left = _left_share(node, total)
                waiting += [(node.left, left), (node.right, total - left)]
        return found


def _left_share(node: _Split, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """round(places * left_weight / weight), halves up."""
    whole, rest = np.divmod(places, node.weight)
    rounded = (2 * rest * node.left_weight + node.weight) // (2 * node.weight)
    share: NDArray[np.int64] = whole * node.left_weight + rounded
    return share


def integer_weights(weights: Sequence[float]) -> list[int]:
    """Ints in the ratio of ``weights``, with a sum up to 2**30; by largest remainder where no such ints are exact.

    Raises:
        ValueError: there is no weight, or one is not finite and above 0, or too small beside the others.
    """
    if not weights:
        raise ValueError("weights is empty; accepted: one number above 0 for each dataset")
    exact = [_fraction(weight, place) for place, weight in enumerate(weights)]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor <= _LARGEST_TOTAL:
        return [weight // divisor for weight in whole]
    total = sum(whole)
    given = [weight * _LARGEST_TOTAL // total for weight in whole]
    by_remainder = sorted(range(len(whole)), key=lambda i: -(whole[i] * _LARGEST_TOTAL % total))
    for place in by_remainder[: _LARGEST_TOTAL - sum(given)]:
        given[place] += 1
    if 0 in given:
        place = given.index(0)
        raise ValueError(f"weight {weights[place]!r} of dataset {place} is less than 2**-30 of the sum of all weights")
    return given


def _fraction(weight: float, place: int) -> Fraction:
    if isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool):
        value = float(weight)
        if math.isfinite(value) and value > 0:
            # A float is taken as it is written, not as the binary number nearest to it.
            return Fraction(int(weight)) if isinstance(weight, (int, np.integer)) else Fraction(repr(value))
    raise ValueError(f"weight of dataset {place} is {weight!r}; accepted: a finite number above 0")
