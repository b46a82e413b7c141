"""Weighs exchanges: of all ways to swap two sets of samples between two bins, the one that evens out their slack best.

Many pairs at a time, in array expressions; where only tokens limit bins, in one compiled loop if numba is there.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning import compiled as loops
from hp_nodes.planning.compiled import kernel
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.packing import Packing

__all__ = ["NEVER", "ExchangeSets", "Pairs", "best_exchanges"]

NEVER = np.iinfo(np.int64).max // 4
PLAIN = 1 << 21
"""Sums of tokens in bins up to this long are exact in float32, oversized samples apart."""


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


def best_exchanges(
    packing: Packing,
    sets: ExchangeSets,
    excess: NDArray[np.int64],
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
) -> tuple[NDArray[np.int64], NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """The best exchange for each row of giving bins [m, 1 or K] and taking bins [m, K]; ``excess`` is of units.

    Returns value [m], partner [m], samples given and taken [m, width]. ``value`` is how much the higher excess of the
    two falls, doubled and negative; 0 or more is no improvement.
    """
    instance = packing.instance
    plain = instance.padding is None and not instance.limits.size and instance.capacity < PLAIN
    compiled = kernel(loops.best_exchanges) if plain else None
    if compiled is not None:
        count = len(taking)
        found = np.empty(count, np.int64), np.empty(count, np.intp)
        exchanged = np.empty((count, sets.width), np.intp), np.empty((count, sets.width), np.intp)
        fixed = excess, sets.member, sets.at_most, giving, taking, instance.slots
        compiled(*packing.inside(), *fixed, *found, *exchanged)
        return *found, *exchanged
    pairs = Pairs(packing, sets, giving, taking)
    gap = np.broadcast_to(excess[giving // instance.slots], taking.shape) - excess[taking // instance.slots]
    best, least = _plain(pairs, gap) if plain else _priced(pairs, gap)
    least[gap <= 0] = NEVER
    least = least - gap
    rows = np.arange(len(taking))
    partner = least.argmin(axis=1)
    give, take = pairs.samples(rows, partner, best[rows, partner])
    gain = least[rows, partner]
    if gain.dtype != np.int64:
        cost = packing.costs[give].sum(axis=1) - packing.costs[take].sum(axis=1)
        worth = gap[rows, partner]
        gain = np.where(gain < 0, np.abs(2 * cost - worth) - worth, NEVER)
    return gain, partner, give, take


class Pairs:
    """Bins that may exchange sets of samples: ``giving`` [m, 1 or K], each with ``taking`` [m, K]."""

    def __init__(
        self, packing: Packing, sets: ExchangeSets, giving: NDArray[np.intp], taking: NDArray[np.intp]
    ) -> None:
        self.packing, self.sets = packing, sets
        self.giving, self.taking = giving, taking
        self.gives, self.takes = sets.of(giving), sets.of(taking)

    def moved(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """[m, K, sets, sets]: what the taking bin gains of ``values`` when two sets change places."""
        given, taken = self.sets.total(values, self.gives), self.sets.total(values, self.takes)
        return np.asarray(given[..., :, None] - taken[..., None, :])

    def samples(
        self, row: NDArray[np.intp], partner: NDArray[np.intp], chosen: NDArray[np.intp]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Samples given and taken, [len(row), width], by the ``chosen`` exchange, give * sets + take, of each pair."""
        give, take = np.divmod(chosen, self.sets.num)
        given, taken = self.gives[row, partner % self.gives.shape[1]], self.takes[row, partner]
        member = self.sets.member
        return np.take_along_axis(given, member[give], axis=1), np.take_along_axis(taken, member[take], axis=1)

    def forbid(self, value: NDArray[np.int64]) -> None:
        """Sets ``value`` [m, K, sets, sets] to ``NEVER`` where an exchange would break a constraint."""
        packing, sets, giving, taking = self.packing, self.sets, self.giving, self.taking
        tokens = self.moved(packing.tokens)
        forbidden = tokens > packing.room(taking)[:, :, None, None]
        forbidden |= tokens < -packing.room(giving)[:, :, None, None]
        for column, limit in enumerate(packing.instance.limits):
            need = self.moved(packing.needs[:, column])
            forbidden |= need > (limit - packing.taken[taking, column])[:, :, None, None]
            forbidden |= need < (packing.taken[giving, column] - limit)[:, :, None, None]
        value[forbidden] = NEVER
        # A bin with few samples must not be emptied: taking all out and giving none back is no exchange.
        few = (packing.count[giving] <= sets.width) | (packing.count[taking] <= sets.width)
        row, partner = np.nonzero(few)
        if len(row):
            side = partner % giving.shape[1]
            left = sets.size(self.takes[row, partner])[:, None, :] - sets.size(self.gives[row, side])[:, :, None]
            block = value[row, partner]
            block[packing.count[giving[row, side]][:, None, None] + left < 1] = NEVER
            block[packing.count[taking[row, partner]][:, None, None] - left < 1] = NEVER
            value[row, partner] = block


def _plain(pairs: Pairs, gap: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """[m, K]: which exchange has the lowest ``|2 * cost moved - gap|``, and that value, infinite if none is allowed.

    Rounded to float32, in a few passes over arrays that stay in the cache: several times faster than int64. It only
    chooses; what is chosen is weighed again in ints, and of tokens none is rounded.
    """
    packing, sets, gives, takes = pairs.packing, pairs.sets, pairs.gives, pairs.takes
    room, other = packing.room(pairs.taking), packing.room(pairs.giving)
    gives_size, takes_size, whole = sets.size(gives), sets.size(takes), sets.sizes
    given = (2 * sets.total(packing.costs, gives) - gap[:, :, None]).astype(np.float32)
    taken = (2 * sets.total(packing.costs, takes)).astype(np.float32)
    # A set with "no sample" in it is a smaller set once more.
    given[np.broadcast_to(gives_size < whole, given.shape)] = np.inf
    taken[takes_size < whole] = -np.inf
    value = np.subtract(given[..., :, None], taken[..., None, :])
    np.abs(value, out=value)
    # -other <= tokens moved <= room, as one comparison.
    longer = (2 * sets.total(packing.tokens, gives) - (room - other)[:, :, None]).astype(np.float32)
    shorter = (2 * sets.total(packing.tokens, takes)).astype(np.float32)
    shift = np.subtract(longer[..., :, None], shorter[..., None, :])
    np.abs(shift, out=shift)
    np.copyto(value, np.float32(np.inf), where=shift > (room + other)[:, :, None, None].astype(np.float32))
    # A bin must not be emptied: taking all out and giving none back is no exchange.
    value[..., 0][np.broadcast_to(gives_size == packing.count[pairs.giving][..., None], given.shape)] = np.inf
    value[..., 0, :][takes_size == packing.count[pairs.taking][..., None]] = np.inf
    return _lowest(value)


def _priced(pairs: Pairs, gap: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """The same in ints, with budgets and the price of padding."""
    packing, instance = pairs.packing, pairs.packing.instance
    costs = pairs.moved(packing.costs)
    if instance.padding is None:
        value = np.abs(2 * costs - gap[:, :, None, None])
    else:
        tokens = pairs.moved(packing.tokens)
        giver = _padding_change(instance, packing.room(pairs.giving)[:, :, None, None], tokens) - costs
        taker = _padding_change(instance, packing.room(pairs.taking)[:, :, None, None], -tokens) + costs
        value = 2 * np.maximum(giver, taker - gap[:, :, None, None]) + gap[:, :, None, None]
    pairs.forbid(value)
    return _lowest(value)


def _lowest(value: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[Any]]:
    """[m, K]: where ``value`` [m, K, sets, sets] is lowest, and how low."""
    flat = value.reshape(*value.shape[:2], -1)
    best = flat.argmin(axis=2)
    return best, np.take_along_axis(flat, best[:, :, None], axis=2)[:, :, 0]


def _padding_change(instance: Instance, room: NDArray[np.int64], gained: NDArray[np.int64]) -> NDArray[np.int64]:
    """What padding costs more in bins with ``room`` that gain more of it."""
    assert instance.padding is not None
    table = instance.padding
    last = len(table) - 1
    return np.asarray(table[np.clip(room + gained, 0, last)] - table[np.clip(room, 0, last)])
