"""Improves a packing: micro-batches at their round's level pass work to micro-batches with slack.

Rounds are the micro-batches sorted by load, R at a time, and a round's level is its slowest. A sweep pairs every
micro-batch near its level with several that have slack, and looks at all ways to move one sample over, or to swap one
for one (in thorough sweeps also sets of two), between a bin of each. Of those that keep every constraint it takes the
one that evens out the two slacks best. Neither side ever rises above the higher of the two before, so no level rises:
the objective falls from sweep to sweep, or the search ends. This is local search by swaps as in Alvim et al., A hybrid
improvement heuristic for the one-dimensional bin packing problem (2004), section 3, with slack in the place of waste,
many pairs at a time.

With one round, levels are all the same: then it evens out the totals of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.packing import Packing
from hp_nodes.planning.weigh import NEVER, ExchangeSets, best_exchanges

__all__ = ["Effort", "disturb", "improve", "level_off"]

IDLE = 3
"""Sweeps without an exchange before the search ends; partners differ from sweep to sweep."""
MOST_PARTNERS = 128
FEW_UNITS = 16
CHUNK = 1 << 16
"""Exchanges weighed at once; bounds the memory, and fits the cache."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search: about ``exchanges`` are weighed in each of ``sweeps``; the last ``thorough`` look at more
    sets.

    It ends early when ``patience`` sweeps together close less than ``worthwhile`` of the gap to the target.
    """

    sweeps: int
    exchanges: int
    thorough: int = 0
    worthwhile: float = 0.0
    patience: int = 2


def improve(packing: Packing, target: float, effort: Effort) -> None:
    """Changes ``packing`` until its levels sum up to ``target``, nothing gets better, or the effort is spent."""
    for _ in _sweeps(packing, target, effort, None):
        pass


def level_off(packing: Packing, goals: NDArray[np.int64], target: float, effort: Effort) -> NDArray[np.int32]:
    """The best bins met on the way to levels of ``goals``, int64[rounds], descending.

    Some levels may rise while others fall, and the sum of all for a while: it passes by plans in which
    :func:`improve` ends.
    """
    least, best = NEVER, packing.bins
    for level_sum in _sweeps(packing, target, effort, goals):
        if level_sum < least:
            least, best = level_sum, packing.bins.copy()
    return best


def _sweeps(packing: Packing, target: float, effort: Effort, goals: NDArray[np.int64] | None) -> Iterator[int]:
    """Sweeps, and gives the sum of the levels before each and after the last."""
    instance = packing.instance
    if instance.units < 2:
        return
    idle, exhausted = 0, False
    far: list[float] = []
    for sweep in range(effort.sweeps):
        slack = _slack(packing, goals)
        yield slack.level_sum
        if slack.level_sum <= target:
            return
        far.append(slack.level_sum - target if goals is None else float(np.maximum(slack.excess, 0).sum()))
        earlier = far[-1 - effort.patience] if sweep >= effort.patience else None
        if earlier is not None and earlier - far[-1] < effort.worthwhile * earlier:
            return
        packing.index()
        thorough = exhausted or sweep >= effort.sweeps - effort.thorough
        sets = ExchangeSets(packing, thorough=thorough)
        # With goals, only what is above them needs to give: few, soon, so each can look at more partners.
        above = len(slack.order)
        if goals is not None:
            above = int((slack.excess > 0).sum())
        elif instance.rounds == 1:
            above = int((packing.load > target).sum())
        giving, taking = _pairs(slack.order, above, effort.exchanges // (sets.num * sets.num), sweep)
        if _sweep(packing, sets, slack.excess, giving, taking, sweep):
            idle = 0
            continue
        idle += 1
        if idle >= (IDLE if instance.rounds > 1 and goals is None else 4 * IDLE):
            return
        if _all_weighed(instance.slots, len(slack.order), taking):
            if thorough:
                return
            exhausted = True
    yield _slack(packing, goals).level_sum


def disturb(packing: Packing, random: np.random.RandomState) -> bool:
    """Swaps two or three random pairs of samples between units, whatever it costs; False when none may be swapped."""
    one, other = random.randint(0, len(packing.bins), (2, 48))
    source, target = packing.bins[one], packing.bins[other]
    shift = packing.tokens[one] - packing.tokens[other]
    fits = (source // packing.instance.slots != target // packing.instance.slots) & (shift <= packing.room(target))
    fits &= -shift <= packing.room(source)
    if packing.taken.shape[1]:
        need = packing.needs[one] - packing.needs[other]
        fits &= (packing.taken[target] + need <= packing.instance.limits).all(axis=1)
        fits &= (packing.taken[source] - need <= packing.instance.limits).all(axis=1)
    touched: set[int] = set()
    for pair in np.flatnonzero(fits):
        bins = {int(source[pair]), int(target[pair])}
        if touched.isdisjoint(bins) and len(touched) < 6:
            touched |= bins
            at = slice(pair, pair + 1)
            packing.swap(one[at, None], source[at], other[at, None], target[at])
    return bool(touched)


@dataclass(frozen=True, slots=True)
class _Slack:
    """``excess`` int64[units]: load minus the round's level, at most 0; ``order``: units by it, highest first."""

    excess: NDArray[np.int64]
    order: NDArray[np.intp]
    level_sum: int


def _slack(packing: Packing, goals: NDArray[np.int64] | None) -> _Slack:
    ranks = packing.instance.ranks
    order = np.argsort(-packing.load, kind="stable")
    levels = packing.load[order][::ranks]
    excess = packing.load.copy()
    excess[order] -= np.repeat(levels if goals is None else goals, ranks)
    return _Slack(excess, np.argsort(-excess, kind="stable"), int(levels.sum()))


def _pairs(order: NDArray[np.intp], above: int, most: int, sweep: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The upper half gives, [m]; the lower half takes, [m, partners]: the most slack to the highest, and others.

    Few units are paired all with all. Only ``above`` units need to give; there are about ``most`` pairs.
    """
    half = len(order) // 2
    if len(order) <= FEW_UNITS:
        giving, pool = order[: min(len(order) - 1, max(above, 1))], order[::-1]
    else:
        giving, pool = order[: min(half, max(above, 1))], order[half:][::-1]
    partners = min(max(most // len(giving), 1), MOST_PARTNERS)
    stride = max(len(pool) // partners, 1)
    turn = sweep * max(len(pool) // 7, 1)
    place = np.arange(len(giving))[:, None] + np.arange(partners)[None, :] * stride + turn
    return giving, pool[place % len(pool)]


def _all_weighed(slots: int, units: int, taking: NDArray[np.intp]) -> bool:
    """Whether the next sweep would weigh the same pairs of bins again."""
    return slots == 1 and units <= FEW_UNITS and taking.shape[1] >= units


def _sweep(
    packing: Packing,
    sets: ExchangeSets,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
    sweep: int,
) -> int:
    """Weighs and carries out one sweep; returns how many exchanges were made."""
    slots, partners = packing.instance.slots, taking.shape[1]
    worth = (excess[giving][:, None] > excess[taking]).any(axis=1)
    giving, taking = giving[worth], taking[worth]
    if not len(giving):
        return 0
    # With several bins, partners differ in the bins on both sides as well.
    turn = sweep * partners + np.arange(partners if slots > 1 else 1)
    giving_bins = giving[:, None] * slots + turn % slots
    taking_bins = taking * slots + (turn // slots + turn + giving[:, None]) % slots
    step = max(CHUNK // (partners * sets.num * sets.num), 1)
    found = [
        best_exchanges(packing, sets, excess, giving_bins[start : start + step], taking_bins[start : start + step])
        for start in range(0, len(giving), step)
    ]
    value, partner, give, take = (np.concatenate(parts) for parts in zip(*found, strict=True))
    good = np.flatnonzero(value < 0)
    if not len(good):
        return 0
    chosen = _disjoint(good[np.lexsort((good, value[good]))], giving, taking, partner)
    source, target = giving_bins[chosen, partner[chosen] % giving_bins.shape[1]], taking_bins[chosen, partner[chosen]]
    packing.swap(give[chosen], source, take[chosen], target)
    return len(chosen)


def _disjoint(
    rows: NDArray[np.intp], giving: NDArray[np.intp], taking: NDArray[np.intp], partner: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Rows, best first, without those that share a unit with a better one."""
    taker = taking[rows, partner[rows]]
    _, first = np.unique(taker, return_index=True)
    rows = rows[np.sort(first)]
    if len(rows) > FEW_UNITS:
        return rows  # halves are disjoint, so only takers repeat
    busy: set[int] = set()
    chosen = []
    for row in rows.tolist():
        pair = {int(giving[row]), int(taking[row, partner[row]])}
        if busy.isdisjoint(pair):
            busy |= pair
            chosen.append(row)
    return np.array(chosen, np.intp)
