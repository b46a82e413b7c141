"""Lower bounds: no plan can be better. Tests compare each with exhaustive search.

Notation: ``R`` ranks, ``W`` rounds, ``q`` bins a micro-batch, ``C`` tokens a bin; samples of ``t`` tokens and cost
``c``; ``T`` the cost of all samples and, with a price for padding, the least padding that any plan pays.

* **Work.** ``lockstep >= T / R`` and ``makespan >= (T + initial loads) / R``: the mean over ranks of what is carried.
  Loads are multiples of the costs' greatest common divisor, so the bound is rounded up to one.
* **Largest sample.** One micro-batch holds it, and no other bin there is empty: ``lockstep >= c_max`` + the ``q - 1``
  cheapest samples; ``makespan`` the same with the rank's ``W * q`` bins.
* **Crowding.** Of the ``k * R + 1`` largest samples some rank carries ``k + 1``: ``makespan >=`` the sum of the ``k +
  1`` smallest among them (Graham 1969). Only where totals count, so of ``lockstep`` only with one round.
* **Earlier loads.** No bin is empty, so ``makespan >= the largest initial load + the W * q cheapest samples``.
* **Levels.** ``floor[w]`` bounds the slowest micro-batch of round ``w`` (rounds in descending order of it). A bin holds
  at most ``k`` samples of more than ``C / (k + 1)`` tokens, so ``w * R`` micro-batches at most ``w * R * q * k`` of
  them: the next in descending cost lies in a further micro-batch. Pigeonhole; for k = 1 it is the argument behind the
  bound L2 of Martello and Toth (1990). Without counting bins it would be no bound: costs 10, 5, 5, 1 on 2 ranks * 2
  rounds take 11.
* **Reach.** ``reach[w]``: no ``(w + 1) * R`` micro-batches can carry more, because of their tokens alone. It is the
  smaller of (a) the fractional knapsack of Dantzig (1957), the densest ``(w + 1) * R * q * C`` tokens, and (b) the ``(w
  + 1) * R * q`` largest values of ``c + (C - t) * density(min(t, C - t))``, where ``density(s)`` is the highest cost
  per token of samples with at most ``s`` tokens: what a bin can hold whose longest sample is this one.
* **Water filling.** Rounds that must be as high as ``floor`` carry at most ``reach`` together; what is left, spread
  evenly, is
  added on top: ``lockstep >= sum(floor) + (T - filled) / R`` with ``filled[w] = min(filled[w - 1] + R * floor[w],
  reach[w])``.
* **Balance.** One rank carries at least ``c_max``, the others at best share the rest evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.objectives import squared_variation

__all__ = ["Bound", "balance_bound", "lower_bound"]

PER_BIN = 8
"""Levels look at samples of which up to this many fit a bin."""
NOTED = 1.01
"""Large samples are said to limit a plan when they raise its bound above an even share by more than this."""
GCD_SAMPLES = 65536
"""Rounding up to a multiple of the costs is tried up to this many samples; beyond, it changes nothing one could see."""


@dataclass(frozen=True, slots=True)
class Bound:
    """In units of the instance's ints, but for ``balance``. ``floor`` and ``reach`` are float64[rounds]."""

    value: float
    work: float
    largest_sample: float
    limited_by_sample: bool
    floor: NDArray[np.float64]
    reach: NDArray[np.float64]


def lower_bound(instance: Instance, objective: str) -> Bound:
    """The best of the bounds above for ``objective``."""
    work = int(instance.costs.sum()) + _least_padding(instance)
    largest = int(instance.costs.max(initial=0))
    floor, reach = _floor(instance), _reach(instance, work)
    if objective == "balance":
        value = 0.0 if instance.padding is not None else balance_bound(largest, work, instance.ranks)
        return Bound(value, float(work), float(largest), value > 0, floor, reach)
    carried = work + int(instance.initial.sum())
    even = _rounded_up(instance, carried)
    levels = 0.0
    if instance.padding is None and not instance.initial.any():
        levels = _water_filling(instance, work, floor, reach)
    company = _cheapest(instance, instance.slots - 1)
    alone = largest + company + int(instance.initial.min())
    if instance.initial.any():
        alone = max(alone, int(instance.initial.max()) + _cheapest(instance, instance.rounds * instance.slots))
    crowded = _crowded(instance) + int(instance.initial.min()) if instance.rounds == 1 else 0
    value = max(float(even), float(alone), float(crowded), levels)
    limited = max(largest + company, crowded, levels) > even * NOTED
    return Bound(value, float(work), float(largest), limited, floor, reach)


def balance_bound(largest: float, work: float, ranks: int) -> float:
    """The squared coefficient of variation when one rank carries ``largest`` and the others share the rest evenly."""
    if ranks == 1 or largest * ranks <= work:
        return 0.0
    rest = (work - largest) / (ranks - 1)
    return max(0.0, squared_variation([largest] + [rest] * (ranks - 1)) * (1 - 1e-12))


def _crowded(instance: Instance) -> int:
    """Of the ``k * R + 1`` largest samples some rank carries ``k + 1``; the best over all k."""
    descending = -np.sort(-instance.costs)
    before = np.concatenate([[0], np.cumsum(descending)])
    times = np.arange(1, (len(descending) - 1) // instance.ranks + 1)
    if not len(times):
        return 0
    last = times * instance.ranks
    return int((before[last + 1] - before[last - times]).max())


def _cheapest(instance: Instance, count: int) -> int:
    """No bin is empty, so so many bins cost at least this."""
    return int(np.partition(instance.costs, count - 1)[:count].sum()) if 0 < count <= len(instance.costs) else 0


def _rounded_up(instance: Instance, carried: int) -> int:
    step = 1
    if len(instance.costs) <= GCD_SAMPLES and instance.padding is None and not instance.initial.any():
        step = max(int(np.gcd.reduce(instance.costs)), 1)
    return -(-carried // (instance.ranks * step)) * step


def _least_padding(instance: Instance) -> int:
    """A convex price is least when all bins pad alike; of any other only the cheapest entry is certain."""
    if instance.padding is None:
        return 0
    fitting = instance.tokens <= instance.capacity
    bins = instance.num_bins - int((~fitting).sum())
    spare = bins * instance.capacity - int(instance.tokens[fitting].sum())
    if bins <= 0 or spare < 0:
        return 0
    table = instance.padding
    if len(table) > 2 and (np.diff(table, n=2) < 0).any():
        return bins * int(table.min())
    whole, part = divmod(spare, bins)
    return (bins - part) * int(table[whole]) + part * int(table[min(whole + 1, len(table) - 1)])


def _floor(instance: Instance) -> NDArray[np.float64]:
    micro_batches = np.arange(instance.rounds, dtype=np.int64) * instance.ranks
    floor = np.zeros(instance.rounds)
    floor[0] = instance.costs.max(initial=0) + _cheapest(instance, instance.slots - 1)
    for per_bin in range(1, PER_BIN + 1):
        large = instance.costs[instance.tokens * (per_bin + 1) > instance.capacity]
        ahead = micro_batches * instance.slots * per_bin
        ahead = ahead[ahead < len(large)]
        if len(ahead) > 1:
            floor[: len(ahead)] = np.maximum(floor[: len(ahead)], -np.partition(-large, ahead)[ahead])
    return floor


def _reach(instance: Instance, work: int) -> NDArray[np.float64]:
    capacity, order = instance.capacity, instance.by_tokens
    tokens, costs = instance.tokens[order], instance.costs[order]
    bins = np.arange(1, instance.rounds + 1) * (instance.ranks * instance.slots)
    if not len(tokens) or tokens[-1] > capacity:
        return np.full(instance.rounds, float(work))
    density = costs / tokens
    best_density = np.maximum.accumulate(density)
    dense_first = slice(None, None, -1) if (density == best_density).all() else np.argsort(-density, kind="stable")
    filled = np.concatenate([[0], np.cumsum(tokens[dense_first])])
    carried = np.concatenate([[0], np.cumsum(costs[dense_first])])
    knapsack = interpolated(bins * capacity, filled, carried)
    company = np.searchsorted(tokens, np.minimum(tokens, capacity - tokens), side="right") - 1
    value = costs + np.where(company >= 0, (capacity - tokens) * best_density[np.maximum(company, 0)], 0.0)
    longest = np.cumsum(largest_first(value, int(bins[-1])))
    return np.asarray(np.minimum(knapsack, longest[np.minimum(bins, len(longest)) - 1]))


def largest_first(values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """The ``count`` largest values in descending order, or all there are."""
    if count < len(values):
        values = -np.partition(-values, count - 1)[:count]
    return np.asarray(-np.sort(-values), np.float64)


def interpolated(at: NDArray[Any] | float, known: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.float64]:
    """Linear between ascending ``known`` points, constant outside.

    numpy's own may fuse a multiplication and an addition, on some machines only; plans must not depend on that.
    """
    right = np.clip(np.searchsorted(known, at, side="right"), 1, len(known) - 1)
    part = (np.clip(at, known[0], known[-1]) - known[right - 1]) / np.maximum(known[right] - known[right - 1], 1)
    return np.asarray(values[right - 1] + part * (values[right] - values[right - 1]))


def _water_filling(instance: Instance, work: int, floor: NDArray[np.float64], reach: NDArray[np.float64]) -> float:
    filled = 0.0
    for level, most in zip(floor, reach, strict=True):
        filled = max(filled, min(filled + instance.ranks * level, most))
    # The knapsack is computed in float64; the margin keeps its rounding on the safe side.
    return float(sum(floor.tolist()) + max(work - filled, 0.0) / instance.ranks) * (1 - 1e-12)
