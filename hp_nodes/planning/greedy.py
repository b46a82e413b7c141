"""First planner: longest processing time, and exchanging whole reference bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance

__all__ = ["exchange_bins", "longest_first"]


def longest_first(instance: Instance, objective: str) -> NDArray[np.int32] | None:
    """Samples in descending cost, each to the least loaded micro-batch with room; None at a dead end."""
    count, num_bins = len(instance.tokens), instance.num_bins
    order = np.lexsort((-instance.tokens, -instance.costs))
    order = np.concatenate([order[instance.tokens[order] > instance.capacity], order[instance.tokens[order] <= instance.capacity]])
    room = np.full(num_bins, instance.capacity)
    left = np.tile(instance.limits, (num_bins, 1))
    load = np.zeros(num_bins, np.int64)
    filled = np.zeros(num_bins, np.int64)
    empty = num_bins
    bins = np.full(count, -1, np.int32)
    for place, sample in enumerate(order):
        tokens = int(instance.tokens[sample])
        fits = (room >= tokens) & (left >= instance.needs[sample]).all(axis=1)
        if tokens > instance.capacity:
            fits = filled == 0
        if count - place <= empty:
            fits &= filled == 0
        if not fits.any():
            return None
        slots = load.reshape(-1, instance.slots).sum(axis=1)
        weight = np.repeat(slots, instance.slots)
        candidates = np.flatnonzero(fits)
        best = candidates[np.lexsort((candidates, room[candidates], weight[candidates]))[0]]
        empty -= int(filled[best] == 0)
        bins[sample] = best
        room[best] = 0 if tokens > instance.capacity else room[best] - tokens
        left[best] -= instance.needs[sample]
        load[best] += instance.costs[sample]
        filled[best] += 1
    return arranged(instance, bins, objective)


def exchange_bins(instance: Instance, bins: NDArray[np.int32], objective: str) -> NDArray[np.int32]:
    """Whole bins change places: heaviest first, each to the least loaded micro-batch with a free slot."""
    costs = instance.bin_costs(bins)
    slots = np.zeros(instance.ranks * instance.rounds, np.int64)
    used = np.zeros(len(slots), np.int64)
    target = np.empty(instance.num_bins, np.int32)
    for number in np.argsort(-costs, kind="stable"):
        free = np.flatnonzero(used < instance.slots)
        best = free[np.argmin(slots[free])]
        target[number] = best * instance.slots + used[best]
        used[best] += 1
        slots[best] += costs[number]
    return arranged(instance, target[bins], objective)


def arranged(instance: Instance, bins: NDArray[np.int32], objective: str) -> NDArray[np.int32]:
    """Micro-batches change places so that equal ones share a round (lockstep) or ranks even out (otherwise)."""
    costs = instance.bin_costs(bins).reshape(-1, instance.slots).sum(axis=1)
    order = np.argsort(-costs, kind="stable")
    target = np.empty(len(costs), np.int64)
    totals = instance.initial.copy()
    for round_ in range(instance.rounds):
        group = order[round_ * instance.ranks : (round_ + 1) * instance.ranks]
        ranks = np.arange(instance.ranks) if objective == "lockstep" else np.argsort(totals, kind="stable")
        target[group] = ranks * instance.rounds + round_
        np.add.at(totals, ranks, costs[group])
    return (target[bins // instance.slots] * instance.slots + bins % instance.slots).astype(np.int32)
