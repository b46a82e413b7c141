"""Packs by tokens alone, when nothing else found a packing: best-fit decreasing, then least slack, bin by bin.

Best-fit decreasing: Johnson et al., Worst-case performance bounds for simple one-dimensional packing algorithms (1974).
Least slack: Gupta and Ho, A new heuristic algorithm for the one-dimensional bin-packing problem (1999), with the
subset of each bin found by dynamic programming; it finds bins that are filled to their last token.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing
from hp_nodes.planning.repair import repair

__all__ = ["fit"]

MOST_BITS = 1 << 34
"""Least slack is tried up to this many bits of sums over all bins: about half a second each time."""
ATTEMPTS = 16
BUDGET_TRIES = 8


def fit(instance: Instance) -> NDArray[np.int32] | None:
    """The bin of each sample, no bin empty; None when some samples found none."""
    bins = _best_fit_decreasing(instance)
    if bins is None:
        bins = _least_slack(instance)
    return None if bins is None else _spread(instance, bins)


def _best_fit_decreasing(instance: Instance) -> NDArray[np.int32] | None:
    bins = np.full(len(instance.tokens), -1, np.int32)
    rooms = [(instance.capacity, number) for number in range(instance.num_bins)]
    left = np.tile(instance.limits, (instance.num_bins, 1))
    nowhere = []
    for sample in instance.by_tokens[::-1]:
        tokens = int(instance.tokens[sample])
        alone = tokens > instance.capacity
        place = bisect_left(rooms, (min(tokens, instance.capacity), -1))
        while place < len(rooms) and (left[rooms[place][1]] < instance.needs[sample]).any():
            place += 1
        if place == len(rooms):
            nowhere.append(sample)
            continue
        room, number = rooms.pop(place)
        bins[sample] = number
        left[number] -= instance.needs[sample]
        if not alone:
            insort(rooms, (room - tokens, number))
    if nowhere and not repair(instance, bins, np.array(nowhere)):
        return None
    return bins


def _least_slack(instance: Instance) -> NDArray[np.int32] | None:
    """What an attempt left over comes first in the next (squeaky wheel optimisation: Joslin and Clements 1999)."""
    if instance.num_bins * len(instance.tokens) * instance.capacity > MOST_BITS:
        return None
    first: list[int] = []
    for _ in range(ATTEMPTS):
        bins, left = _filled_in_turn(instance, first)
        if not left:
            return bins
        first = left + [sample for sample in first if sample not in left]
    return None


def _filled_in_turn(instance: Instance, first: list[int]) -> tuple[NDArray[np.int32], list[int]]:
    """Each bin takes one of ``first`` or the longest sample that is left, and those, long ones first, that fill it
    best; returns bins and the samples that are left."""
    bins = np.full(len(instance.tokens), -1, np.int32)
    tokens = instance.tokens
    left = instance.by_tokens
    for number in range(instance.num_bins):
        if not len(left):
            break
        urgent = next((sample for sample in first if bins[sample] < 0), int(left[-1]))
        chosen = np.array([urgent])
        left = left[left != urgent]
        room = instance.capacity - int(tokens[urgent])
        others = left[
            (tokens[left] <= room) & (instance.needs[left] + instance.needs[urgent] <= instance.limits).all(axis=1)
        ]
        for _ in range(BUDGET_TRIES):
            chosen = np.append(urgent, others[_fullest(tokens[others].tolist(), room)])
            above = instance.needs[chosen].sum(axis=0) - instance.limits
            if (above <= 0).all():
                break
            # Without the one that takes most of the budget that is exceeded most.
            column = int(above.argmax())
            others = others[others != chosen[1:][instance.needs[chosen[1:], column].argmax()]]
        else:
            chosen = chosen[:1]
        bins[chosen] = number
        left = left[bins[left] < 0]
    return bins, left.tolist()


def _fullest(ascending: list[int], room: int) -> list[int]:
    """Places, last first, of the values whose sum is the highest up to ``room``; the highest values of these."""
    if room <= 0:
        return []
    mask = (1 << (room + 1)) - 1
    reached = [1]  # bit s of reached[i]: some of the first i values sum up to s
    for value in ascending:
        reached.append(reached[-1] | (reached[-1] << value & mask))
    places = []
    rest = reached[-1].bit_length() - 1
    for place in range(len(reached) - 2, -1, -1):
        value = ascending[place]
        if value <= rest and reached[place] >> (rest - value) & 1:
            places.append(place)
            rest -= value
    return places


def _spread(instance: Instance, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Empty bins take a sample each from the bins that hold most; there are enough samples."""
    packing = Packing(instance, bins)
    empty = np.flatnonzero(packing.count == 0)
    if len(empty):
        by_bin = np.lexsort((instance.costs, bins))
        place = np.arange(len(bins)) - np.searchsorted(bins[by_bin], bins[by_bin], side="left")
        spare = by_bin[place >= 1]
        spare = spare[np.argsort(-packing.count[bins[spare]], kind="stable")][: len(empty)]
        bins[spare] = empty
    return bins
