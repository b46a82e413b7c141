"""The search for a plan: build, repair, improve, arrange.

1. Candidates: a packing built from nothing (its levels learnt anew from each attempt), and whole reference bins in
   other places. The second always exists, so no search ends without a plan because one sample found no bin.
2. The best of them is improved by exchanges.
3. Ranks and rounds are numbered so that fewest bytes move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.arrange import arrange_ranks, arrange_rounds, keep_identical, sort_rounds_of_ranks
from hp_nodes.planning.bounds import Bound
from hp_nodes.planning.construct import construct
from hp_nodes.planning.exchange import Effort, disturb, improve, level_off
from hp_nodes.planning.fit import fit
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.levels import Levels, first_floor, goals, highest_floor, level_out, next_floor
from hp_nodes.planning.objectives import evaluate
from hp_nodes.planning.packing import Packing
from hp_nodes.planning.repair import repair

__all__ = ["CLOSE", "arranged", "levelled", "search"]

CLOSE = 1e-4
"""A plan this close to the bound, relatively, is not improved further."""
SMALL = 128
"""Windows of up to this many bins are searched in all ways."""
TOGETHER = (1.2, 1.5)
"""How many of the largest samples share a micro-batch, in the guesses that come after the first."""
NEAR = 0.002
"""A small window's plan this close to the bound is not disturbed."""
KICKS = 12
KICKED = Effort(sweeps=3, exchanges=3_000, thorough=2)
"""How often a small window's plan is disturbed, and how hard it is improved after each time."""
IN_VAIN = 5
"""Disturbances in a row that brought nothing before no more are tried."""
LONG = Effort(sweeps=100, exchanges=40_000, thorough=90, worthwhile=0.05, patience=20)
"""How hard to search when all levels are known."""
BRISK = Effort(sweeps=30, exchanges=6_000, thorough=25, worthwhile=0.05, patience=3)
"""The same in small windows: a sweep takes as long as its array operations, however few exchanges it weighs."""
LEARNT = 3
"""Times that levels are learnt anew from a packing."""
MOST_TRIED = 6
RENUMBERED = 4
"""Ranks are numbered again after identical samples changed places, in windows of up to 1024 samples."""
FAR = 0.004
"""In large windows, a packing this close to the bound is not built again to other levels."""
HEIGHTS = (1.0, 0.9)
"""Parts of what a round could carry at most, in further guesses."""
_WIDTH = {True: 2, False: 1}
"""Candidates that are improved."""
MANY = 0.15
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
        fitted = fit(instance)
        if fitted is None:
            return None
        candidates.append(_Candidate(_value(instance, fitted, objective), fitted))
    effort, target = _effort(instance), _enough(instance, bound, objective)
    improved = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.value)[: _WIDTH[_small(instance)]]:
        packing = Packing(instance, candidate.bins)
        improve(packing, target, effort)
        improved.append(_Candidate(_value(instance, packing.bins, objective), packing.bins))
        if improved[-1].value <= target:
            break
    best = min(improved, key=lambda candidate: candidate.value)
    if _small(instance):
        if objective == "lockstep" and instance.rounds > 1 and best.value > target:
            bins = levelled(instance, bound, best.bins)
            best = _Candidate(_value(instance, bins, objective), bins)
        best = _kicked(instance, best, max(target, bound.value * (1 + NEAR)), objective)
    return best.bins


def levelled(instance: Instance, bound: Bound, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """``bins`` brought closer to the bound of ``lockstep``: a longer search, for where the bound can be reached."""
    target = _enough(instance, bound, "lockstep")
    effort = BRISK if _small(instance) else LONG
    return level_off(Packing(instance, bins.copy()), goals(bound.floor, target), target, effort)


def _kicked(instance: Instance, best: _Candidate, target: float, objective: str) -> _Candidate:
    """Iterated local search (Lourenço, Martin and Stützle 2003): disturb the plan, improve it, keep it if no worse."""
    # The legacy generator: its stream is the same in every version of numpy.
    random = np.random.RandomState(0)
    in_vain = 0
    for _ in range(KICKS):
        if best.value <= target or in_vain == IN_VAIN:
            break
        packing = Packing(instance, best.bins.copy())
        if not disturb(packing, random):
            break
        improve(packing, target, KICKED)
        value = _value(instance, packing.bins, objective)
        in_vain = 0 if value < best.value else in_vain + 1
        if value <= best.value:
            best = _Candidate(value, packing.bins)
    return best


def arranged(instance: Instance, bins: NDArray[np.int32], objective: str) -> NDArray[np.int32]:
    """``bins`` with ranks and rounds numbered so that fewest bytes move; ``instance`` has its rounds."""
    for _ in range(RENUMBERED if len(bins) <= 1024 else 1):
        before = bins
        bins = (
            arrange_rounds(instance, bins) if objective == "lockstep" else arrange_ranks(instance.in_one_round(), bins)
        )
        bins = keep_identical(instance, bins)
        if np.array_equal(bins, before):
            break
    return bins if objective == "lockstep" else sort_rounds_of_ranks(instance, bins)


def _built(instance: Instance, bound: Bound, objective: str) -> list[_Candidate]:
    """Packings built to different levels: guessed ones, and those learnt from the packing before."""
    enough = bound.value * (1 + (CLOSE if _small(instance) else FAR))
    found: list[_Candidate] = []
    tried: list[Levels] = []
    for guess in _guesses(instance, bound):
        floor = guess
        for _ in range(LEARNT):
            levels = level_out(instance, bound, floor)
            if len(tried) == MOST_TRIED or any(levels.alike(other) for other in tried):
                break
            tried.append(levels)
            bins, nowhere = construct(instance, levels)
            if len(nowhere) > MANY * len(bins) + 8 or (len(nowhere) and not repair(instance, bins, nowhere)):
                break
            found.append(_Candidate(_value(instance, bins, objective), bins))
            if found[-1].value <= enough:
                return found
            floor = next_floor(instance, bound, bins)
    return found


def _guesses(instance: Instance, bound: Bound) -> Iterator[NDArray[np.float64]]:
    """Floors of the rounds to start from."""
    yield first_floor(instance, bound)
    if instance.rounds > 1:
        for together in TOGETHER:
            yield first_floor(instance, bound, together)
        for part in HEIGHTS:
            yield highest_floor(instance, bound, part)


def _exchanged(instance: Instance, bound: Bound, objective: str) -> list[_Candidate]:
    """Whole reference bins, heaviest first, each to the lightest micro-batch with a free slot; then exchanged."""
    reference = instance.reference
    if reference is None or not instance.fills_all_bins:
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
        improve(packing, _enough(instance, bound, objective), _effort(whole))
        options = (packing.bins[reference], reference)
        bins = min(options, key=lambda option: _value(instance, option, objective))
    return [_Candidate(_value(instance, bins, objective), bins.copy())]


def _value(instance: Instance, bins: NDArray[np.int32], objective: str) -> float:
    """The objective once rounds are sorted."""
    loads = np.sort(instance.loads(bins).ravel())[::-1].reshape(instance.rounds, instance.ranks).T
    if objective == "lockstep":
        return evaluate(objective, loads)
    return evaluate(objective, instance.loads(bins), instance.initial)


def _enough(instance: Instance, bound: Bound, objective: str) -> float:
    """Levels whose sum is this need no improvement."""
    if objective == "lockstep":
        return bound.value * (1 + CLOSE)
    mean = (bound.work + float(instance.initial.sum())) / instance.ranks
    return (mean if objective == "balance" else bound.value) * (1 + CLOSE / 2)


def _small(instance: Instance) -> bool:
    return instance.num_bins <= SMALL


def _effort(instance: Instance) -> Effort:
    """Small windows are searched harder: there the bound is far, and the time is short anyway."""
    # With a price for padding each exchange takes longer to weigh.
    exchanges = 40_000 if instance.padding is None else 15_000
    if instance.rounds == 1:
        return replace(LONG, exchanges=exchanges)
    if _small(instance):
        return Effort(sweeps=20, exchanges=exchanges * 3 // 4, thorough=16, worthwhile=0.02)
    return Effort(sweeps=10, exchanges=exchanges, worthwhile=0.04)
