"""A complete packing while it is being improved: what each bin holds, and what each unit carries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance, sums

__all__ = ["Packing"]


class Packing:
    """``bins`` is changed in place; everything else follows it.

    A sample in bin -1 is in none yet. ``used`` and ``count`` are of bins, ``taken`` int64[num_bins, K] are their
    budgets, ``load`` is of units, padding and initial loads included.
    """

    def __init__(self, instance: Instance, bins: NDArray[np.int32]) -> None:
        self.instance = instance
        self.bins = bins
        placed = np.flatnonzero(bins >= 0)
        num_bins, at = instance.num_bins, bins[placed]
        self.count = np.bincount(at, minlength=num_bins)
        self.used = sums(instance.tokens[placed], at, num_bins)
        self.taken = np.empty((num_bins, len(instance.limits)), np.int64)
        for column in range(len(instance.limits)):
            self.taken[:, column] = sums(instance.needs[placed, column], at, num_bins)
        self.load = sums(instance.costs[placed], at // instance.slots, instance.units)
        self._weigh(np.arange(num_bins), 1)
        if instance.rounds == 1:
            self.load += instance.initial
        self.tokens = np.append(instance.tokens, 0)
        self.costs = np.append(instance.costs, 0)
        self.needs = np.concatenate([instance.needs, np.zeros((1, len(instance.limits)), np.int64)])
        self._order: NDArray[np.intp] = instance.by_size
        self._start = np.zeros(0, np.intp)

    def index(self) -> None:
        """Call after changes, before :meth:`members`."""
        by_size = self.instance.by_size
        bins = self.bins[by_size]
        if bins.min() < 0:
            by_size, bins = by_size[bins >= 0], bins[bins >= 0]
        # Sorting 16-bit ints is a radix sort, many times faster than any other.
        small = bins.astype(np.uint16) if self.instance.num_bins <= 65536 else bins
        self._order = by_size[np.argsort(small, kind="stable")]
        self._start = np.concatenate([[0], np.cumsum(self.count)])

    def members(self, bins: NDArray[np.intp], at_most: int) -> NDArray[np.intp]:
        """Samples of each bin, largest first, thinned out to ``at_most``: [len(bins), at_most], padded with n."""
        count = self.count[bins][:, None]
        column = np.arange(at_most)[None, :]
        place = np.where(count > at_most, column * count // at_most, column) if (count > at_most).any() else column
        found = self._order[np.minimum(self._start[bins][:, None] + place, len(self._order) - 1)]
        return np.where(column < count, found, len(self.bins))

    def inside(self) -> tuple[NDArray[Any], ...]:
        """All of it: samples by bin, where each bin's start, how many; room of bins; tokens and costs of samples."""
        return self._order, self._start, self.count, self.instance.capacity - self.used, self.tokens, self.costs

    def room(self, bins: NDArray[np.intp]) -> NDArray[np.int64]:
        return self.instance.capacity - self.used[bins]

    def add(self, samples: NDArray[np.intp], bins: NDArray[np.intp]) -> None:
        """Samples that were in none, each into a bin; bins are different ones."""
        self._weigh(bins, -1)
        self.bins[samples] = bins
        self.count[bins] += 1
        self.used[bins] += self.tokens[samples]
        self.taken[bins] += self.needs[samples]
        np.add.at(self.load, bins // self.instance.slots, self.costs[samples])
        self._weigh(bins, 1)

    def swap(
        self,
        give: NDArray[np.intp],
        source: NDArray[np.intp],
        take: NDArray[np.intp],
        target: NDArray[np.intp],
    ) -> None:
        """Samples ``give`` [m, width] go from ``source`` [m] to ``target`` [m] and ``take`` the other way.

        n stands for no sample; no two rows have a bin in common.
        """
        count = (give < len(self.bins)).sum(axis=1) - (take < len(self.bins)).sum(axis=1)
        tokens = (self.tokens[give].sum(axis=1)) - (self.tokens[take].sum(axis=1))
        costs = (self.costs[give].sum(axis=1)) - (self.costs[take].sum(axis=1))
        both = np.concatenate([source, target])
        self._weigh(both, -1)
        for samples, goal in ((give, target), (take, source)):
            row, column = np.nonzero(samples < len(self.bins))
            self.bins[samples[row, column]] = goal[row]
        self.count[source] -= count
        self.count[target] += count
        self.used[source] -= tokens
        self.used[target] += tokens
        np.subtract.at(self.load, source // self.instance.slots, costs)
        np.add.at(self.load, target // self.instance.slots, costs)
        if self.taken.shape[1]:
            needs = self.needs[give].sum(axis=1) - self.needs[take].sum(axis=1)
            self.taken[source] -= needs
            self.taken[target] += needs
        self._weigh(both, 1)

    def _weigh(self, bins: NDArray[np.intp], sign: int) -> None:
        """Adds or takes away the padding cost of bins."""
        if self.instance.padding is not None:
            spare = np.maximum(self.instance.capacity - self.used[bins], 0)
            np.add.at(self.load, bins // self.instance.slots, sign * self.instance.padding[spare])
