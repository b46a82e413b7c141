"""The search for a plan: build, repair, improve, arrange.

1. Candidates: a packing built from nothing (its levels learnt anew from each attempt), and whole reference bins in other
   places. The second always exists, so no search ends without a plan because one sample found no bin.
2. The best of them is improved by exchanges.
3. Ranks and rounds are numbered so that fewest bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.arrange import arrange_ranks, arrange_rounds, keep_identical, sort_rounds_of_ranks
from hp_nodes.planning.bounds import Bound
from hp_nodes.planning.construct import construct
from hp_nodes.planning.exchange import Effort, improve
from hp_nodes.planning.fit import best_fit_decreasing
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.levels import first_floor, level_out, next_floor
from hp_nodes.planning.objectives import evaluate
from hp_nodes.planning.packing import Packing
from hp_nodes.planning.repair import repair

__all__ = ["arranged", "search"]

CLOSE = 1e-4
"""A plan this close to the bound, relatively, is not improved further."""
MANY = 0.03
"""With more than this part of the samples left over, repair is not tried."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    value: float
    bins: NDArray[np.int32]


def search(instance: Instance, bound: Bound, objective: str) -> NDArray[np.int32] | None:
    """The bin of each sample, or None when there is no reference and nothing was found.

    ``instance`` and ``bound`` are in one round unless the objective is ``lockstep``.
    """
    candidates = [*_built(instance, bound, objective), *_exchanged(instance, bound, objective)]
    if not candidates:
        fitted = best_fit_decreasing(instance)
        if fitted is None:
            return None
        candidates.append(_Candidate(_value(instance, fitted, objective), fitted))
    best = min(candidates, key=lambda candidate: candidate.value)
    packing = Packing(instance, best.bins)
    improve(packing, _enough(bound, objective), _effort(instance))
    return packing.bins


def arranged(instance: Instance, bins: NDArray[np.int32], objective: str) -> NDArray[np.int32]:
    """``bins`` with ranks and rounds numbered so that fewest bytes move; ``instance`` has its rounds."""
    if objective == "lockstep":
        return keep_identical(instance, arrange_rounds(instance, bins))
    bins = arrange_ranks(instance.in_one_round(), bins)
    return keep_identical(instance, sort_rounds_of_ranks(instance, bins))


def _built(instance: Instance, bound: Bound, objective: str) -> list[_Candidate]:
    floor = first_floor(instance, bound)
    found: list[_Candidate] = []
    for _ in range(_attempts(instance)):
        bins, nowhere = construct(instance, level_out(instance, bound, floor))
        if len(nowhere) > MANY * len(bins) + 8 or (len(nowhere) and not repair(instance, bins, nowhere)):
            break
        found.append(_Candidate(_value(instance, bins, objective), bins))
        learnt = next_floor(instance, bound, bins)
        if instance.rounds == 1 or found[-1].value <= bound.value * (1 + CLOSE) or np.array_equal(learnt, floor):
            break
        floor = learnt
    return found


def _exchanged(instance: Instance, bound: Bound, objective: str) -> list[_Candidate]:
    """Whole bins of the reference, heaviest first, each to the lightest micro-batch with a free slot; then exchanged."""
    reference = instance.reference
    if reference is None or (np.bincount(reference, minlength=instance.num_bins) == 0).any():
        return []
    bins = reference
    if instance.slots > 1 and instance.units > 1:
        whole = instance.of_bins(reference)
        heaviest = np.argsort(-whole.costs, kind="stable").reshape(instance.slots, instance.units)
        load = instance.initial.copy() if instance.rounds == 1 else np.zeros(instance.units, np.int64)
        place = np.empty(instance.num_bins, np.int32)
        for slot, turn in enumerate(heaviest):
            units = np.argsort(load, kind="stable")
            place[turn] = units * instance.slots + slot
            load[units] += whole.costs[turn]
        packing = Packing(whole, place)
        improve(packing, _enough(bound, objective), _effort(whole))
        options = (packing.bins[reference], reference)
        bins = min(options, key=lambda option: _value(instance, option, objective))
    return [_Candidate(_value(instance, bins, objective), bins.copy())]


def _value(instance: Instance, bins: NDArray[np.int32], objective: str) -> float:
    """The objective once rounds are sorted."""
    loads = np.sort(instance.loads(bins).ravel())[::-1].reshape(instance.rounds, instance.ranks).T
    if objective == "lockstep":
        return evaluate(objective, loads)
    return evaluate(objective, instance.loads(bins), instance.initial)


def _enough(bound: Bound, objective: str) -> float:
    return 0.0 if objective == "balance" else bound.value * (1 + (CLOSE if objective == "lockstep" else CLOSE / 100))


def _attempts(instance: Instance) -> int:
    return 3 if instance.units <= 8192 else 2


def _effort(instance: Instance) -> Effort:
    """Small windows are searched harder: there the bound is far, and the time is short anyway."""
    units = instance.units
    if units <= 64:
        return Effort(sweeps=40, partners=8, thorough=16)
    if units <= 1024:
        return Effort(sweeps=8, partners=2, thorough=0)
    return Effort(sweeps=5, partners=1, thorough=0)
