"""Best-fit decreasing (Johnson et al. 1974): packs by tokens alone, when nothing else found a packing."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing
from hp_nodes.planning.repair import repair

__all__ = ["best_fit_decreasing"]


def best_fit_decreasing(instance: Instance) -> NDArray[np.int32] | None:
    """The bin of each sample, no bin empty; None when some samples found none."""
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
    return _spread(instance, bins)


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
