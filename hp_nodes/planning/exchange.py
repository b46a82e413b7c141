"""Improves a packing: micro-batches at their round's level pass work to micro-batches with slack.

Rounds are the micro-batches sorted by load, R at a time, and a round's level is its slowest. A sweep pairs every
micro-batch near its level with several that have slack, and looks at all ways to move one sample over, or to swap one
for one (in thorough sweeps also sets of two), between a bin of each. Of those that keep every constraint it takes the one
that evens out the two slacks best. Neither side ever rises above the higher of the two before, so no level rises: the
objective falls from sweep to sweep, or the search ends. This is local search by swaps as in Alvim et al., A hybrid
improvement heuristic for the one-dimensional bin packing problem (2004), section 3, with slack in the place of waste,
many pairs at a time.

With one round, levels are all the same: then it evens out the totals of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing

__all__ = ["NEVER", "Effort", "ExchangeSets", "forbid_emptying", "improve"]

NEVER = np.iinfo(np.int64).max // 4
CHUNK = 1 << 20
"""Exchanges weighed at once; bounds the memory."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search. ``partners``: for each micro-batch; ``thorough``: the last so many sweeps look at pairs too."""

    sweeps: int
    partners: int
    thorough: int = 0


def improve(packing: Packing, target: float, effort: Effort) -> None:
    """Changes ``packing`` until its levels sum up to ``target``, nothing gets better, or the effort is spent."""
    instance = packing.instance
    if instance.units < 2:
        return
    idle = 0
    for sweep in range(effort.sweeps):
        slack = _slack(packing)
        if slack.level_sum <= target:
            return
        packing.index()
        thorough = sweep >= effort.sweeps - effort.thorough
        giving, taking = _pairs(slack.order, effort.partners, sweep)
        idle = 0 if _sweep(packing, slack.excess, giving, taking, sweep, thorough=thorough) else idle + 1
        if idle >= min(instance.slots, 3):
            return


@dataclass(frozen=True, slots=True)
class _Slack:
    """``excess`` int64[units]: load minus the round's level, at most 0; ``order``: units by it, highest first."""

    excess: NDArray[np.int64]
    order: NDArray[np.intp]
    level_sum: int


def _slack(packing: Packing) -> _Slack:
    ranks = packing.instance.ranks
    order = np.argsort(-packing.load, kind="stable")
    levels = packing.load[order][::ranks]
    excess = packing.load.copy()
    excess[order] -= np.repeat(levels, ranks)
    return _Slack(excess, np.argsort(-excess, kind="stable"), int(levels.sum()))


def _pairs(order: NDArray[np.intp], partners: int, sweep: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The upper half gives, [m]; the lower half takes, [m, partners]: the most slack to the highest, and others."""
    giving, pool = order[: len(order) // 2], order[len(order) // 2 :][::-1]
    partners = min(partners, len(pool))
    stride = len(pool) // partners + 1
    turn = sweep * max(len(pool) // 7, 1)
    place = np.arange(len(giving))[:, None] + np.arange(partners)[None, :] * stride + turn
    return giving, pool[place % len(pool)]


def _sweep(
    packing: Packing,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
    sweep: int,
    *,
    thorough: bool,
) -> int:
    """Weighs and carries out one sweep; returns how many exchanges were made."""
    slots = packing.instance.slots
    lower = excess[giving][:, None] > excess[taking]
    worth = lower.any(axis=1)
    giving, taking = giving[worth], taking[worth]
    if not len(giving):
        return 0
    column = np.arange(taking.shape[1])
    giving_bins = giving * slots + sweep % slots
    taking_bins = taking * slots + (sweep // slots + giving[:, None] + column) % slots
    sets = ExchangeSets(packing, thorough=thorough)
    step = max(CHUNK // (taking.shape[1] * sets.num * sets.num), 1)
    found = [
        _best(packing, sets, excess, giving_bins[start : start + step], taking_bins[start : start + step])
        for start in range(0, len(giving), step)
    ]
    value, partner, give, take = (np.concatenate(parts) for parts in zip(*found, strict=True))
    good = np.flatnonzero(value < 0)
    if not len(good):
        return 0
    # One exchange for each taker: the best one.
    taker = taking[good, partner[good]]
    ranked = good[np.lexsort((good, value[good], taker))]
    taker = taking[ranked, partner[ranked]]
    first = np.concatenate([[True], taker[1:] != taker[:-1]])
    chosen = ranked[first]
    source, target = giving_bins[chosen], taking_bins[chosen, partner[chosen]]
    for column_ in range(give.shape[1]):
        packing.move(give[chosen, column_], source, target)
        packing.move(take[chosen, column_], target, source)
    return len(chosen)


class ExchangeSets:
    """The sets of samples of a bin that may leave it: none, each one, and with ``thorough`` each two."""

    def __init__(self, packing: Packing, *, thorough: bool) -> None:
        self.packing = packing
        self.at_most = 6 if thorough else 8
        single = np.arange(self.at_most + 1)
        first, second = np.triu_indices(self.at_most, 1) if thorough else (single[:0], single[:0])
        # Column at_most is padding, "no sample".
        self.first = np.concatenate([single, first])
        self.second = np.concatenate([np.full(len(single), self.at_most), second])
        self.num = len(self.first)
        self.thorough = thorough

    def of(self, bins: NDArray[np.intp]) -> NDArray[np.intp]:
        """[len(bins), at_most + 1] samples, the last column n, "no sample"."""
        members = self.packing.members(bins, self.at_most)
        return np.concatenate([members, np.full((len(bins), 1), len(self.packing.bins))], axis=1)

    def total(self, values: NDArray[np.int64], members: NDArray[np.intp]) -> NDArray[np.int64]:
        """[len(bins), num]: the sum of ``values`` over each set."""
        of_members = values[members]
        if not self.thorough:
            return of_members
        return of_members[:, self.first] + of_members[:, self.second]


def _best(
    packing: Packing,
    sets: ExchangeSets,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """The best exchange for each giving bin [m] with its taking bins [m, K]: value, partner, samples given and taken.

    ``value`` is how much the higher excess of the two falls, doubled and negative; 0 or more is no improvement.
    """
    instance = packing.instance
    pairs, partners = taking.shape
    gives, takes = sets.of(giving), sets.of(taking.ravel())
    shape = (pairs, partners, sets.num)

    def difference(values: NDArray[np.int64]) -> NDArray[np.int64]:
        """[m, K, sets, sets]: what the taking bin gains."""
        given = sets.total(values, gives)[:, None, :, None]
        return np.asarray(given - sets.total(values, takes).reshape(shape)[:, :, None, :])

    tokens = difference(packing.tokens)
    room_taking, room_giving = packing.room(taking)[:, :, None, None], packing.room(giving)[:, None, None, None]
    forbidden = (tokens > room_taking) | (tokens < -room_giving)
    for column, limit in enumerate(instance.limits):
        need = difference(packing.needs[:, column])
        forbidden |= need > (limit - packing.taken[taking, column])[:, :, None, None]
        forbidden |= -need > (limit - packing.taken[giving, column])[:, None, None, None]
    high, low = excess[giving // instance.slots], excess[taking // instance.slots]
    gap = (high[:, None] - low)[:, :, None, None]
    costs = difference(packing.costs)
    if instance.padding is None:
        value = np.abs(2 * costs - gap) - gap
    else:
        spare_giving, spare_taking = room_giving + tokens, room_taking - tokens
        paid_giving = _padding_change(instance, room_giving, spare_giving)
        paid_taking = _padding_change(instance, room_taking, spare_taking)
        value = 2 * np.maximum(paid_giving - costs, paid_taking + costs - gap)
    value[forbidden] = NEVER
    forbid_emptying(packing, sets, value, gives, takes.reshape(pairs, partners, -1), giving, taking)
    flat = value.reshape(pairs, -1)
    best = flat.argmin(axis=1)
    partner, rest = np.divmod(best, sets.num * sets.num)
    give, take = np.divmod(rest, sets.num)
    row = np.arange(pairs)
    taken_from = takes.reshape(pairs, partners, -1)[row, partner]
    return (
        flat[row, best],
        partner,
        np.stack([gives[row, sets.first[give]], gives[row, sets.second[give]]], axis=1),
        np.stack([taken_from[row, sets.first[take]], taken_from[row, sets.second[take]]], axis=1),
    )


def _padding_change(instance: Instance, before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.int64]:
    assert instance.padding is not None
    table = instance.padding
    return np.asarray(table[np.clip(after, 0, len(table) - 1)] - table[np.clip(before, 0, len(table) - 1)])


def forbid_emptying(
    packing: Packing,
    sets: ExchangeSets,
    value: NDArray[np.int64],
    gives: NDArray[np.intp],
    takes: NDArray[np.intp],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> None:
    """Taking all samples out of a bin and giving none back is no exchange."""
    none = len(packing.bins)
    most = 2 if sets.thorough else 1

    def size(members: NDArray[np.intp]) -> NDArray[np.int64]:
        real = (members < none).astype(np.int64)
        return np.asarray(real[..., sets.first] + real[..., sets.second])

    few = np.flatnonzero(packing.count[giving] <= most)
    if len(few):
        left = packing.count[giving[few]][:, None] - size(gives[few])
        block = value[few]
        block[(left[:, None, :, None] + size(takes[few])[:, :, None, :]) < 1] = NEVER
        value[few] = block
    row, partner = np.nonzero(packing.count[taking] <= most)
    if len(row):
        left = packing.count[taking[row, partner]][:, None] - size(takes[row, partner])
        block = value[row, partner]
        block[(left[:, None, :] + size(gives[row])[:, :, None]) < 1] = NEVER
        value[row, partner] = block
