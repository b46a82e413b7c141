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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.compiled import best_exchanges, kernel
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing

__all__ = ["NEVER", "Effort", "ExchangeSets", "disturb", "forbid", "improve", "level_off", "moved"]

NEVER = np.iinfo(np.int64).max // 4
IDLE = 3
"""Sweeps without an exchange before the search ends; partners differ from sweep to sweep."""
MOST_PARTNERS = 128
FEW_UNITS = 16
CHUNK = 1 << 16
"""Exchanges weighed at once; bounds the memory, and fits the cache."""
PLAIN = 1 << 21
"""Sums of tokens in bins up to this long are exact in float32, oversized samples apart."""


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
    idle = 0
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
        sets = ExchangeSets(packing, thorough=sweep >= effort.sweeps - effort.thorough)
        # With goals, only what is above them needs to give: few, soon, so each can look at more partners.
        above = len(slack.order)
        if goals is not None:
            above = int((slack.excess > 0).sum())
        elif instance.rounds == 1:
            above = int((packing.load > target).sum())
        giving, taking = _pairs(slack.order, above, effort.exchanges // (sets.num * sets.num), sweep)
        idle = 0 if _sweep(packing, sets, slack.excess, giving, taking, sweep) else idle + 1
        if idle >= (IDLE if instance.rounds > 1 and goals is None else 4 * IDLE):
            return
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
        _best(packing, sets, excess, giving_bins[start : start + step], taking_bins[start : start + step])
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


class ExchangeSets:
    """The sets of samples of a bin that may leave it together: none, each one, and with ``thorough`` more.

    Those are all sets when bins hold four samples at most, else all pairs of six samples. ``member`` [num, width] names
    columns of :meth:`of`; the last column there is "no sample".
    """

    def __init__(self, packing: Packing, *, thorough: bool) -> None:
        self.packing = packing
        fullest = int(packing.count.max())
        all_sets = fullest <= 4
        self.at_most = min(fullest, (4 if all_sets else 6) if thorough else 8)
        self.member = _sets(self.at_most, (self.at_most if all_sets else 2) if thorough else 1)
        self.num, self.width = self.member.shape
        self.sizes = (self.member < self.at_most).sum(axis=1)

    def of(self, bins: NDArray[np.intp]) -> NDArray[np.intp]:
        """[*bins.shape, at_most + 1] samples; n is "no sample"."""
        members = self.packing.members(bins.ravel(), self.at_most)
        none = np.full((bins.size, 1), len(self.packing.bins))
        return np.concatenate([members, none], axis=1).reshape(*bins.shape, -1)

    def total(self, values: NDArray[np.int64], members: NDArray[np.intp]) -> NDArray[np.int64]:
        """[*bins.shape, num]: the sum of ``values`` over each set."""
        of_members = values[members]
        whole = of_members[..., self.member[:, 0]]
        for column in range(1, self.width):
            whole = whole + of_members[..., self.member[:, column]]
        return whole

    def size(self, members: NDArray[np.intp]) -> NDArray[np.int64]:
        """[*bins.shape, num]: how many samples each set has."""
        return np.asarray((members[..., self.member] < len(self.packing.bins)).sum(axis=-1))


@lru_cache(maxsize=64)
def _sets(columns: int, largest: int) -> NDArray[np.intp]:
    """[num, width]: all sets of up to ``largest`` of ``columns`` columns, filled up with ``columns``, "no sample"."""
    width = max(min(largest, columns), 1)
    chosen = [one for size in range(width + 1) for one in combinations(range(columns), size)]
    return np.array([(*one, *[columns] * (width - len(one))) for one in chosen], np.intp).reshape(-1, width)


def _best(
    packing: Packing,
    sets: ExchangeSets,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """The best exchange for each row of giving bins [m, 1 or K] and taking bins [m, K].

    Returns value [m], partner [m], samples given and taken [m, width]. ``value`` is how much the higher excess of the
    two falls, doubled and negative; 0 or more is no improvement.
    """
    instance = packing.instance
    plain = instance.padding is None and not instance.limits.size and instance.capacity < PLAIN
    compiled = kernel(best_exchanges) if plain else None
    if compiled is not None:
        return _best_compiled(compiled, packing, sets, excess, giving, taking)
    gives, takes = sets.of(giving), sets.of(taking)
    high = np.broadcast_to(excess[giving // instance.slots], taking.shape)
    low = excess[taking // instance.slots]
    gap = high - low
    best, least = (_plain if plain else _priced)(packing, sets, gap, gives, takes, giving, taking)
    least[gap <= 0] = NEVER
    least = least - gap
    rows = np.arange(len(taking))
    partner = least.argmin(axis=1)
    give, take = np.divmod(best[rows, partner], sets.num)
    given = gives[rows, partner % gives.shape[1]]
    give = np.take_along_axis(given, sets.member[give], axis=1)
    take = np.take_along_axis(takes[rows, partner], sets.member[take], axis=1)
    gain = least[rows, partner]
    if gain.dtype != np.int64:
        cost = packing.costs[give].sum(axis=1) - packing.costs[take].sum(axis=1)
        worth = gap[rows, partner]
        gain = np.where(gain < 0, np.abs(2 * cost - worth) - worth, NEVER)
    return gain, partner, give, take


def _best_compiled(
    compiled: Callable[..., None],
    packing: Packing,
    sets: ExchangeSets,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    rows = len(taking)
    found = np.empty(rows, np.int64), np.empty(rows, np.intp)
    exchanged = np.empty((rows, sets.width), np.intp), np.empty((rows, sets.width), np.intp)
    inside = packing.inside()
    compiled(*inside, excess, sets.member, sets.at_most, giving, taking, packing.instance.slots, *found, *exchanged)
    return *found, *exchanged


def _plain(
    packing: Packing,
    sets: ExchangeSets,
    gap: NDArray[np.int64],
    gives: NDArray[np.intp],
    takes: NDArray[np.intp],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """[m, K]: which exchange has the lowest ``|2 * cost moved - gap|``, and that value, infinite if none is allowed.

    Rounded to float32, in a few passes over arrays that stay in the cache: several times faster than int64. It only
    chooses; what is chosen is weighed again in ints, and of tokens none is rounded.
    """
    room, other = packing.room(taking), packing.room(giving)
    gives_size, takes_size, whole = sets.size(gives), sets.size(takes), sets.sizes
    given = (2 * sets.total(packing.costs, gives) - gap[:, :, None]).astype(np.float32)
    taken = (2 * sets.total(packing.costs, takes)).astype(np.float32)
    # A set with "no sample" in it is a smaller set once more.
    given[np.broadcast_to(gives_size < whole, given.shape)] = np.inf
    taken[takes_size < whole] = -np.inf
    # -other <= tokens moved <= room, as one comparison.
    longer = (2 * sets.total(packing.tokens, gives) - (room - other)[:, :, None]).astype(np.float32)
    shorter = (2 * sets.total(packing.tokens, takes)).astype(np.float32)
    limit = (room + other).astype(np.float32)
    # A bin must not be emptied: taking all out and giving none back is no exchange.
    empties_giver = np.broadcast_to(gives_size == packing.count[giving][..., None], given.shape)
    empties_taker = takes_size == packing.count[taking][..., None]
    value = np.subtract(given[..., :, None], taken[..., None, :])
    np.abs(value, out=value)
    shift = np.subtract(longer[..., :, None], shorter[..., None, :])
    np.abs(shift, out=shift)
    np.copyto(value, np.float32(np.inf), where=shift > limit[:, :, None, None])
    value[..., 0][empties_giver] = np.inf
    value[..., 0, :][empties_taker] = np.inf
    return _lowest(value)


def _priced(
    packing: Packing,
    sets: ExchangeSets,
    gap: NDArray[np.int64],
    gives: NDArray[np.intp],
    takes: NDArray[np.intp],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """The same in ints, with budgets and the price of padding."""
    instance = packing.instance
    costs = moved(sets, packing.costs, gives, takes)
    if instance.padding is None:
        value = np.abs(2 * costs - gap[:, :, None, None])
    else:
        tokens = moved(sets, packing.tokens, gives, takes)
        giver = _padding_change(instance, packing.room(giving)[:, :, None, None], tokens) - costs
        taker = _padding_change(instance, packing.room(taking)[:, :, None, None], -tokens) + costs
        value = 2 * np.maximum(giver, taker - gap[:, :, None, None]) + gap[:, :, None, None]
    forbid(packing, sets, value, gives, takes, giving, taking)
    return _lowest(value)


def _lowest(value: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """[m, K]: where ``value`` [m, K, sets, sets] is lowest, and how low."""
    flat = value.reshape(*value.shape[:2], -1)
    best = flat.argmin(axis=2)
    return best, np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]


def moved(
    sets: ExchangeSets, values: NDArray[np.int64], gives: NDArray[np.intp], takes: NDArray[np.intp]
) -> NDArray[np.int64]:
    """[m, K, sets, sets]: what the taking bin gains of ``values`` when two sets change places."""
    return np.asarray(sets.total(values, gives)[..., :, None] - sets.total(values, takes)[..., None, :])


def forbid(
    packing: Packing,
    sets: ExchangeSets,
    value: NDArray[np.int64],
    gives: NDArray[np.intp],
    takes: NDArray[np.intp],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> None:
    """Sets ``value`` [m, K, sets, sets] to ``NEVER`` where an exchange would break a constraint."""
    tokens = moved(sets, packing.tokens, gives, takes)
    forbidden = tokens > packing.room(taking)[:, :, None, None]
    forbidden |= tokens < -packing.room(giving)[:, :, None, None]
    for column, limit in enumerate(packing.instance.limits):
        need = moved(sets, packing.needs[:, column], gives, takes)
        forbidden |= need > (limit - packing.taken[taking, column])[:, :, None, None]
        forbidden |= need < (packing.taken[giving, column] - limit)[:, :, None, None]
    value[forbidden] = NEVER
    # A bin with few samples must not be emptied: taking all out and giving none back is no exchange.
    few = (packing.count[giving] <= sets.width) | (packing.count[taking] <= sets.width)
    if 4 * np.count_nonzero(few) > few.size:
        left = sets.size(takes)[:, :, None, :] - sets.size(gives)[:, :, :, None]
        value[packing.count[giving][:, :, None, None] + left < 1] = NEVER
        value[packing.count[taking][:, :, None, None] - left < 1] = NEVER
        return
    row, partner = np.nonzero(few)
    if len(row):
        side = partner % giving.shape[1]
        left = sets.size(takes[row, partner])[:, None, :] - sets.size(gives[row, side])[:, :, None]
        block = value[row, partner]
        block[packing.count[giving[row, side]][:, None, None] + left < 1] = NEVER
        block[packing.count[taking[row, partner]][:, None, None] - left < 1] = NEVER
        value[row, partner] = block


def _padding_change(instance: Instance, room: NDArray[np.int64], gained: NDArray[np.int64]) -> NDArray[np.int64]:
    """What padding costs more in bins with ``room`` that gain more of it."""
    assert instance.padding is not None
    table = instance.padding
    last = len(table) - 1
    return np.asarray(table[np.clip(room + gained, 0, last)] - table[np.clip(room, 0, last)])
