"""Gives finished micro-batches their ranks and rounds so that fewest bytes change rank, at no cost to the objective.

Which rank takes which micro-batch of a round is free, and so is which of several identical samples goes where. A rank
keeps
the bytes that it holds already: the micro-batch and rank with most bytes in common are matched first (each matching
that is best for both sides at once, so few passes suffice), then pairs are exchanged while that keeps more. Up to
``EXACT_RANKS`` ranks all permutations are compared instead. The assignment problem: Kuhn (1955).
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.compiled import kernel
from hp_nodes.planning.compiled import seat as seat_compiled
from hp_nodes.planning.instance import Instance

__all__ = ["arrange_ranks", "arrange_rounds", "keep_identical", "sort_rounds_of_ranks"]

EXACT_RANKS = 6
EXCHANGE_RANKS = 128
EXCHANGES = 512
"""Divided by the ranks: how often pairs are exchanged."""
PASSES = 64


def arrange_rounds(instance: Instance, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Micro-batches sorted by load, R at a time, become the rounds, heaviest first: the lowest lockstep there is."""
    load = instance.loads(bins).ravel()
    order = np.argsort(-load, kind="stable")
    group = np.empty(instance.units, np.int64)
    group[order] = np.arange(instance.units) // instance.ranks
    rank = _seats(instance, bins, group, np.tile(np.arange(instance.ranks), (instance.rounds, 1)))
    return _renumbered(instance, bins, rank * instance.rounds + group)


def arrange_ranks(instance: Instance, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Ranks that carry the same from earlier windows may change places (``instance`` is in one round)."""
    _, group = np.unique(instance.initial, return_inverse=True)
    if group.max(initial=0) == 0:
        return _renumbered(instance, bins, _seats(instance, bins, group, np.arange(instance.ranks)[None, :]))
    rank = np.arange(instance.ranks)
    for number in range(int(group.max()) + 1):
        members = np.flatnonzero(group == number)
        if len(members) > 1:
            inside = np.where(group == number, 0, -1)
            rank[members] = _seats(instance, bins, inside, members[None, :])[members]
    return _renumbered(instance, bins, rank)


def sort_rounds_of_ranks(instance: Instance, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Bins of a rank in descending cost: its total stays, and heavy rounds of different ranks meet."""
    costs = instance.bin_costs(bins).reshape(instance.ranks, -1)
    order = np.argsort(-costs, axis=1, kind="stable")
    target = np.empty_like(order)
    np.put_along_axis(target, order, np.broadcast_to(np.arange(costs.shape[1]), costs.shape), axis=1)
    return (bins // costs.shape[1] * costs.shape[1] + target.ravel()[bins]).astype(np.int32)


def keep_identical(instance: Instance, bins: NDArray[np.int32]) -> NDArray[np.int32]:
    """Among samples alike in tokens, cost and budgets, those on the right rank already stay, large ones first."""
    if instance.reference is None:
        return bins
    samples, kind = _alike(instance)
    if not len(samples):
        return bins
    per_rank = instance.rounds * instance.slots
    by_goal = np.argsort(kind * instance.ranks + bins[samples] // per_rank, kind="stable")
    places = bins[samples[by_goal]]
    goal = kind[by_goal] * instance.ranks + places // per_rank
    del by_goal
    origin = kind * instance.ranks + instance.reference[samples] // per_rank
    sizes = instance.sizes[samples]
    if (np.diff(sizes)[np.diff(kind) == 0] == 0).all():
        by_origin = np.argsort(origin, kind="stable")
    else:
        by_origin = np.lexsort((-sizes, origin))
    del kind, sizes
    origin, samples = origin[by_origin], samples[by_origin]
    del by_origin
    first = np.searchsorted(goal, origin, side="left")
    seat = first + np.arange(len(origin)) - np.searchsorted(origin, origin, side="left")
    del first
    stays = seat < np.searchsorted(goal, origin, side="right")
    free = np.ones(len(places), np.bool_)
    free[seat[stays]] = False
    kept: NDArray[np.int32] = bins.copy()
    kept[samples[stays]] = places[seat[stays]]
    # The rest of each kind takes what is left to that kind: both sides are still sorted by it.
    kept[samples[~stays]] = places[free]
    return kept


def _alike(instance: Instance) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Samples that have a twin, sorted by kind, and the number of each one's kind."""
    columns = (instance.tokens, instance.costs, *instance.needs.T)
    order = instance.by_tokens if len(columns) == 2 and _costs_follow(instance) else np.lexsort(columns[::-1])
    changes = np.ones(len(order) + 1, np.bool_)
    changes[1:-1] = False
    for values in columns:
        changes[1:-1] |= np.diff(values[order]) != 0
    twins = ~(changes[1:] & changes[:-1])
    return order[twins], np.cumsum(changes[:-1], dtype=np.int64)[twins]


def _costs_follow(instance: Instance) -> bool:
    return bool((np.diff(instance.costs[instance.by_tokens]) >= 0).all())


def _renumbered(instance: Instance, bins: NDArray[np.int32], unit: NDArray[np.int64]) -> NDArray[np.int32]:
    return (unit[bins // instance.slots] * instance.slots + bins % instance.slots).astype(np.int32)


def _seats(
    instance: Instance, bins: NDArray[np.int32], group: NDArray[np.int64], ranks: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The rank of each unit: those of group g share out ``ranks[g]``. Units of group -1 are left out (rank -1)."""
    rank = np.full(len(group), -1, np.int64)
    if instance.reference is None:
        units = np.argsort(group, kind="stable")
        units = units[group[units] >= 0]
        rank[units] = ranks.ravel()
        return rank
    unit, origin, size = _held(instance, bins)
    used = group[unit] >= 0
    unit, origin, size = unit[used], origin[used], size[used]
    if ranks.shape[1] <= EXCHANGE_RANKS:
        _seat_few(rank, unit, origin, size, group, ranks)
    else:
        _seat_many(rank, unit, origin, size, group, ranks)
    return rank


def _held(instance: Instance, bins: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Bytes of each unit that each rank holds now: unit, rank, bytes; only where there are any."""
    assert instance.reference is not None
    pair = (bins // instance.slots).astype(np.int64) * instance.ranks
    pair += instance.reference // (instance.num_bins // instance.ranks)
    if instance.units * instance.ranks <= max(4 * len(pair), 4096):
        size = np.bincount(pair, weights=instance.sizes, minlength=instance.units * instance.ranks)
        found = np.flatnonzero(size)
        return found // instance.ranks, found % instance.ranks, size[found]
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    starts = np.flatnonzero(np.diff(pair, prepend=-1))
    size = np.add.reduceat(instance.sizes[order], starts)
    unit, rank = np.divmod(pair[starts], instance.ranks)
    return unit.astype(np.int32), rank.astype(np.int32), size


def _seat_many(
    rank: NDArray[np.int64],
    unit: NDArray[Any],
    origin: NDArray[Any],
    size: NDArray[Any],
    group: NDArray[np.int64],
    ranks: NDArray[np.int64],
) -> None:
    """Greedy: whatever is the largest for both its unit and its rank is settled; repeat on the rest."""
    width = int(ranks.max()) + 1
    offered = np.zeros((len(ranks), width), np.bool_)
    np.put_along_axis(offered, ranks, True, axis=1)
    seat = group[unit] * width + origin
    open_seat = offered.ravel()
    order = np.lexsort((seat, -size))
    unit, origin, seat = unit[order], origin[order], seat[order]
    for _ in range(PASSES):
        keep = (rank[unit] < 0) & open_seat[seat]
        unit, origin, seat = unit[keep], origin[keep], seat[keep]
        if not len(unit):
            break
        place = np.arange(len(unit))
        first_of_unit, first_of_seat = np.empty(len(rank), np.int64), np.empty(len(open_seat), np.int64)
        first_of_unit[unit[::-1]], first_of_seat[seat[::-1]] = place[::-1], place[::-1]
        settled = (first_of_unit[unit] == place) & (first_of_seat[seat] == place)
        rank[unit[settled]] = origin[settled]
        open_seat[seat[settled]] = False
    _seat_rest(rank, group, np.argwhere(open_seat.reshape(offered.shape)))


def _seat_rest(rank: NDArray[np.int64], group: NDArray[np.int64], seats: NDArray[np.int64]) -> None:
    """Units without a rank take the seats left to their group (rows group, rank; sorted), in order."""
    waiting = np.flatnonzero((rank < 0) & (group >= 0))
    rank[waiting[np.argsort(group[waiting], kind="stable")]] = seats[:, 1]


def _seat_few(
    rank: NDArray[np.int64],
    unit: NDArray[Any],
    origin: NDArray[Any],
    size: NDArray[Any],
    group: NDArray[np.int64],
    ranks: NDArray[np.int64],
) -> None:
    """The same with a full table of bytes for each group; exact for few ranks, otherwise improved by exchanges."""
    groups, width = ranks.shape
    used = np.flatnonzero(group >= 0)
    members = used[np.argsort(group[used], kind="stable")].reshape(groups, width)
    row = np.empty(len(group), np.int64)
    row[members] = np.arange(width)
    column = np.full(int(max(ranks.max(), origin.max(initial=0))) + 1, -1, np.int64)
    column[ranks[0]] = np.arange(width)  # every group offers the same ranks
    there = column[origin] >= 0
    held = np.zeros((groups, width, width))
    held[group[unit[there]], row[unit[there]], column[origin[there]]] = size[there]
    compiled = kernel(seat_compiled)
    if width <= EXACT_RANKS:
        seat = _exact(held)
    elif compiled is not None:
        seat = compiled(held, EXCHANGES // width)
    else:
        seat = _exchanged(held, _greedy(held))
    np.put(rank, members, np.take_along_axis(ranks, seat, axis=1))


def _exact(held: NDArray[np.float64]) -> NDArray[np.int64]:
    """[groups, width]: the column of each row, the best of all permutations."""
    width = held.shape[1]
    ways = np.array(list(permutations(range(width))))
    kept = held[:, np.arange(width), ways].sum(axis=2)
    return np.asarray(ways[kept.argmax(axis=1)])


def _greedy(held: NDArray[np.float64]) -> NDArray[np.int64]:
    """What is best for its row and its column at once is settled; repeat on the rest."""
    groups, width, _ = held.shape
    left = held.copy()
    seat = np.full((groups, width), -1)
    column = np.arange(width)[None, :]
    for _ in range(width):
        best_column, best_row = left.argmax(axis=2), left.argmax(axis=1)
        group, row = np.nonzero((np.take_along_axis(best_row, best_column, axis=1) == column) & (seat < 0))
        seat[group, row] = best_column[group, row]
        if (seat >= 0).all():
            break
        left[group, row, :] = -1
        left[group, :, best_column[group, row]] = -1
    return seat


def _exchanged(held: NDArray[np.float64], seat: NDArray[np.int64]) -> NDArray[np.int64]:
    """Two rows swap columns while that keeps more bytes, the best swap of each group at a time."""
    groups, width = seat.shape
    group = np.arange(groups)
    # crossed[g, i, j]: what row i keeps in the column of row j.
    crossed = np.take_along_axis(held, np.broadcast_to(seat[:, None, :], held.shape), axis=2)
    for _ in range(EXCHANGES // width):
        own = np.einsum("gii->gi", crossed)
        gain = crossed + crossed.transpose(0, 2, 1)
        gain -= own[:, :, None]
        gain -= own[:, None, :]
        gain = gain.reshape(groups, -1)
        best = gain.argmax(axis=1)
        better = gain[group, best] > 0
        if not better.any():
            break
        one, other = np.divmod(best[better], width)
        rows = group[better]
        seat[rows, one], seat[rows, other] = seat[rows, other], seat[rows, one]
        crossed[rows, :, one], crossed[rows, :, other] = crossed[rows, :, other], crossed[rows, :, one]
    return seat
