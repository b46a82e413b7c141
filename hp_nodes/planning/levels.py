"""How much each micro-batch should carry, and of how many tokens, before anything is placed.

Rounds are as high as their largest samples force them to be; what those rounds cannot take, for want of tokens, is
spread evenly over the others (water filling, see :mod:`hp_nodes.planning.bounds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.bounds import Bound, interpolated, largest_first
from hp_nodes.planning.instance import Instance

__all__ = ["Levels", "first_floor", "goals", "highest_floor", "level_out", "next_floor"]

HALVINGS = 40
ALIKE = 1e-3


@dataclass(frozen=True, slots=True)
class Levels:
    """For each micro-batch, rounds in descending order: ``cost`` and ``tokens``, int64[micro-batches]."""

    cost: NDArray[np.int64]
    tokens: NDArray[np.int64]

    def alike(self, other: Levels) -> bool:
        """Whether a packing built to these would hardly differ."""
        return bool((np.abs(self.cost - other.cost) <= ALIKE * other.cost).all())


def first_floor(instance: Instance, bound: Bound, together: float = 1.0) -> NDArray[np.float64]:
    """A guess at each round's slowest micro-batch: ``together`` of the largest samples share one.

    At least the bound's.
    """
    ahead = (np.arange(instance.rounds) * instance.ranks * together).astype(np.int64)
    largest = largest_first(instance.costs, int(ahead[-1]) + 1)
    guess = np.where(ahead < len(largest), largest[np.minimum(ahead, len(largest) - 1)], 0)
    return np.maximum(bound.floor, guess)


def highest_floor(instance: Instance, bound: Bound, part: float) -> NDArray[np.float64]:
    """The other extreme: ``part`` of what the first rounds could carry, which leaves little to the last."""
    return np.maximum(bound.floor, part * np.diff(bound.reach, prepend=0.0) / instance.ranks)


def next_floor(instance: Instance, bound: Bound, bins: NDArray[np.int32]) -> NDArray[np.float64]:
    """The same, learnt from a plan: the largest sample that it left to this round and those below."""
    units = bins // instance.slots
    loads = np.bincount(units, weights=instance.costs, minlength=instance.units)
    largest = np.zeros(instance.units, np.int64)
    np.maximum.at(largest, units, instance.costs)
    by_round = largest[np.argsort(-loads, kind="stable")].reshape(instance.rounds, instance.ranks).max(axis=1)
    return np.maximum(bound.floor, np.maximum.accumulate(by_round[::-1])[::-1])


def goals(floor: NDArray[np.float64], total: float) -> NDArray[np.int64]:
    """int64[rounds], descending: levels that are even, but for rounds that must be higher, and sum up to ``total``."""
    floor = np.maximum.accumulate(floor[::-1])[::-1]
    rest = total - np.concatenate([[0], np.cumsum(floor)[:-1]])
    even = rest / np.arange(len(floor), 0, -1)
    return np.asarray(np.maximum(floor, even[np.argmax(even >= floor)]), np.int64)


def level_out(instance: Instance, bound: Bound, floor: NDArray[np.float64]) -> Levels:
    """The levels for rounds that are at least ``floor`` high."""
    if instance.rounds == 1:
        return _one_round(instance)
    ranks, work = instance.ranks, float(instance.costs.sum())
    low, high = 0.0, max(float(floor.max()), work / ranks)
    floors, reach = floor.tolist(), bound.reach.tolist()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _filled(floors, middle, reach, ranks) < work else (low, middle)
    cost = np.maximum(floor, high)
    tokens = _tokens(instance, cost, raised=int((floor > high).sum()))
    return Levels(np.repeat(cost, ranks).astype(np.int64), np.repeat(tokens, ranks).astype(np.int64))


def _one_round(instance: Instance) -> Levels:
    """Every rank the same, what it carries already included."""
    initial = np.sort(instance.initial)
    total, ranks = int(instance.costs.sum()), instance.ranks
    cost = np.maximum(_pour(initial, total) - instance.initial, 0)
    tokens = np.full(ranks, int(instance.tokens.sum()) // ranks)
    if initial.any():
        tokens = (int(instance.tokens.sum()) * (cost / max(int(cost.sum()), 1))).astype(np.int64)
    return Levels(cost, np.minimum(tokens, instance.slots * instance.capacity))


def _pour(initial: NDArray[np.int64], total: int) -> int:
    """The level that ``total`` reaches when poured over ``initial``, ascending."""
    before = np.cumsum(initial)
    for count in range(1, len(initial) + 1):
        level = (total + int(before[count - 1])) // count
        if count == len(initial) or level <= initial[count]:
            return level
    raise AssertionError("unreachable")


def _filled(floor: list[float], level: float, reach: list[float], ranks: int) -> float:
    """What rounds carry that are at least ``level`` high."""
    filled = 0.0
    for height, most in zip(floor, reach, strict=True):
        more = filled + ranks * (height if height > level else level)
        filled = max(filled, more if more < most else most)
    return filled


def _tokens(instance: Instance, cost: NDArray[np.float64], raised: int) -> NDArray[np.float64]:
    """Raised rounds take the densest samples; the others share the rest of the tokens evenly."""
    order = instance.by_size
    filled = np.concatenate([[0], np.cumsum(instance.tokens[order])])
    carried = np.concatenate([[0], np.cumsum(instance.costs[order])])
    tokens, taken, placed = np.zeros(len(cost)), 0.0, 0.0
    room = float(instance.ranks * instance.slots * instance.capacity)
    for round_ in range(raised):
        wanted = float(interpolated(placed + instance.ranks * cost[round_], carried, filled))
        wanted = min(wanted, taken + room)
        tokens[round_] = (wanted - taken) / instance.ranks
        taken, placed = wanted, float(interpolated(wanted, filled, carried))
    if raised < len(cost):
        tokens[raised:] = (filled[-1] - taken) / (instance.ranks * (len(cost) - raised))
    return tokens
