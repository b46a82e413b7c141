"""Lower bounds: no plan can be better. Tests compare each with exhaustive search.

With ``C`` the cost of all samples, ``P`` the least padding cost a bin must have, ``B`` bins, ``R`` ranks and ``c`` the
costs in descending order:

* work: ``lockstep, makespan >= (C + B * P + initial loads) / R``, the mean over ranks of what must be carried.
* largest: the largest sample lies in one micro-batch, so ``lockstep, makespan >= c[0] + P * slots``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.objectives import squared_variation

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """``value`` is in units of the objective over the instance's ints; ``limited_by_sample`` tells which bound it is."""

    value: float
    work: float
    largest_sample: float
    limited_by_sample: bool


def lower_bound(instance: Instance, objective: str) -> Bound:
    """The best of the bounds above for ``objective``."""
    slots = instance.rounds * instance.slots
    padding = 0 if instance.padding is None else int(instance.padding.min())
    work = int(instance.costs.sum()) + padding * instance.num_bins
    largest = int(instance.costs.max(initial=0))
    mean = (work + int(instance.initial.sum())) / instance.ranks
    if objective == "balance":
        value = 0.0 if instance.padding is not None else balance_bound(largest, work, instance.ranks)
        return Bound(value, float(work), float(largest), value > 0)
    alone = largest + padding * (slots if objective == "makespan" else instance.slots) + int(instance.initial.min())
    alone = max(alone, int(instance.initial.max()))
    return Bound(max(mean, float(alone)), float(work), float(largest), alone > mean)


def balance_bound(largest: float, work: float, ranks: int) -> float:
    """One rank carries at least the largest sample; the others at best share the rest evenly."""
    if ranks == 1 or largest * ranks <= work:
        return 0.0
    rest = (work - largest) / (ranks - 1)
    return max(0.0, squared_variation([largest] + [rest] * (ranks - 1)))
