"""Loops that numba compiles where it is installed (extra ``fast``); without it, arrays do the same in several passes.

Both give the same plan, to the last bit: each loop is the array expression beside its call, element by element and in
the same precision. Compiled code is kept on disk, so only the first process that ever plans waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["best_exchanges", "kernel", "place_waves", "seat"]


@cache
def kernel(loop: Callable[..., Any]) -> Callable[..., Any] | None:
    """``loop`` compiled, or None without numba."""
    compiler = _compiler()
    if compiler is None:
        return None
    compiled: Callable[..., Any]
    try:
        compiled = compiler(cache=True, nogil=True)(loop)
    except RuntimeError:  # no directory can be written to: compiled again by each process
        compiled = compiler(nogil=True)(loop)
    return compiled


def _compiler() -> Callable[..., Any] | None:
    try:
        njit: Callable[..., Any] = import_module("numba").njit
    except ImportError:  # not installed, or not for this version of numpy
        return None
    return njit


def best_exchanges(
    order: NDArray[np.intp],
    start: NDArray[np.intp],
    count: NDArray[np.intp],
    room: NDArray[np.int64],
    tokens: NDArray[np.int64],
    costs: NDArray[np.int64],
    excess: NDArray[np.int64],
    member: NDArray[np.intp],
    at_most: int,
    giving: NDArray[np.intp],
    taking: NDArray[np.intp],
    slots: int,
    gain: NDArray[np.int64],
    partner: NDArray[np.intp],
    given: NDArray[np.intp],
    taken: NDArray[np.intp],
) -> None:
    """The best exchange for each row of giving bins [m, 1 or K] and taking bins [m, K], as ``weigh`` defines it.

    ``order[start[b]:][:count[b]]`` are the samples of bin b, ``member`` [sets, width] the sets of ``at_most`` of them.
    Writes gain [m] (positive: none), partner [m], and the samples given and taken, [m, width].
    """
    rows, partners = taking.shape
    sets, width = member.shape
    none = len(tokens) - 1
    samples = np.full((2, at_most + 1), none)
    cost, token, size = np.zeros((2, sets), np.int64), np.zeros((2, sets), np.int64), np.zeros((2, sets), np.int64)
    weight, length = np.empty((2, sets), np.float32), np.empty((2, sets), np.float32)
    allowed = np.empty((2, sets), np.bool_)
    whole = np.zeros(sets, np.int64)
    for one in range(sets):
        for column in range(width):
            whole[one] += member[one, column] < at_most
    for row in range(rows):
        least, gain[row], partner[row] = np.inf, 1, 0
        for turn in range(partners):
            giver, taker = giving[row, turn if giving.shape[1] > 1 else 0], taking[row, turn]
            gap = excess[giver // slots] - excess[taker // slots]
            if gap <= 0:
                continue
            for side in range(0 if turn == 0 or giving.shape[1] > 1 or least == np.inf else 1, 2):
                bin_ = giver if side == 0 else taker
                for column in range(at_most):
                    place = column * count[bin_] // at_most if count[bin_] > at_most else column
                    samples[side, column] = order[start[bin_] + place] if column < count[bin_] else none
                for one in range(sets):
                    cost[side, one], token[side, one], size[side, one] = 0, 0, 0
                    for column in range(width):
                        sample = samples[side, member[one, column]]
                        cost[side, one] += costs[sample]
                        token[side, one] += tokens[sample]
                        size[side, one] += sample < none
                    allowed[side, one] = size[side, one] == whole[one]
            shift, limit = room[taker] - room[giver], np.float32(room[taker] + room[giver])
            for one in range(sets):
                weight[0, one], weight[1, one] = np.float32(2 * cost[0, one] - gap), np.float32(2 * cost[1, one])
                length[0, one], length[1, one] = np.float32(2 * token[0, one] - shift), np.float32(2 * token[1, one])
            lowest, give, take = np.float32(np.inf), 0, 0
            for one in range(sets):
                if allowed[0, one]:
                    for other in range(1 if size[0, one] == count[giver] else 0, sets):
                        value = abs(weight[0, one] - weight[1, other])
                        fits = allowed[1, other] and abs(length[0, one] - length[1, other]) <= limit
                        if value < lowest and fits and (one > 0 or size[1, other] < count[taker]):
                            lowest, give, take = value, one, other
            if np.float64(lowest) - np.float64(gap) < least:
                least = np.float64(lowest) - np.float64(gap)
                gain[row] = abs(2 * (cost[0, give] - cost[1, take]) - gap) - gap if least < 0 else 1
                partner[row] = turn
                for column in range(width):
                    given[row, column] = samples[0, member[give, column]]
                    taken[row, column] = samples[1, member[take, column]]


def place_waves(
    order: NDArray[np.intp],
    descending: NDArray[np.int64],
    tokens: NDArray[np.int64],
    costs: NDArray[np.int64],
    room: NDArray[np.int64],
    most_room: NDArray[np.int64],
    share: NDArray[np.int64],
    need: NDArray[np.int64],
    empty: NDArray[np.bool_],
    bins: NDArray[np.int32],
    place: int,
    num_empty: int,
    least_share: int,
    growth: int,
    least_wave: int,
    similar: float,
    alike: float,
) -> tuple[int, int]:
    """Waves of ``construct`` in which every sample fits, beginning with ``order[place]``; changes its arrays.

    Returns place and number of empty bins before the first wave of another kind, which is left to the caller.
    """
    units, slots = room.shape
    count = len(order)
    chosen, value, slot = np.empty(units, np.intp), np.empty(units, np.float64), np.empty(units, np.intp)
    while place < count and count - place > num_empty:
        first_tokens, first_cost = tokens[order[place]], costs[order[place]]
        wave = min(max(place // growth, least_wave, 1), units)
        found, fitting, densest = 0, 0, 0.0
        for unit in range(units):
            if most_room[unit] >= first_tokens:
                fitting += 1
                if need[unit] >= first_cost:
                    chosen[found] = unit
                    value[found] = need[unit] / -max(share[unit], least_share)
                    densest = value[found] if found == 0 else min(densest, value[found])
                    found += 1
        if found:
            near, last, after = 0, place, count
            for one in range(found):
                near += value[one] <= alike * densest
            while last < after:  # the first that is not similar
                middle = (last + after) // 2
                if descending[middle] <= -similar * first_tokens:
                    last = middle + 1
                else:
                    after = middle
            size = min(max(min(near, last - place), wave), found)
        elif fitting:
            for unit in range(units):
                if most_room[unit] >= first_tokens:
                    chosen[found], value[found] = unit, -need[unit]
                    found += 1
            size = min(wave, found)
        else:
            break
        size = min(size, count - place - num_empty)
        # The lowest to the front, the first of equal ones (Hoare's selection) ...
        low, high = 0, found - 1
        while low < high:
            middle = (low + high) // 2
            pivot, tie, left, right = value[middle], chosen[middle], low, high
            while left <= right:
                while value[left] < pivot or (value[left] == pivot and chosen[left] < tie):
                    left += 1
                while value[right] > pivot or (value[right] == pivot and chosen[right] > tie):
                    right -= 1
                if left <= right:
                    value[left], value[right] = value[right], value[left]
                    chosen[left], chosen[right] = chosen[right], chosen[left]
                    left, right = left + 1, right - 1
            if size - 1 <= right:
                high = right
            elif size - 1 >= left:
                low = left
            else:
                break
        # ... and in ascending order (heap sort).
        for step in range(size // 2 + size - 1):
            root, end = size // 2 - 1 - step, size
            if root < 0:
                end, root = size + root, 0
                value[0], value[end] = value[end], value[0]
                chosen[0], chosen[end] = chosen[end], chosen[0]
            while 2 * root + 1 < end:
                child = 2 * root + 1
                other = child + 1
                if other < end and (value[other], chosen[other]) > (value[child], chosen[child]):
                    child = other
                if (value[child], chosen[child]) <= (value[root], chosen[root]):
                    break
                value[root], value[child] = value[child], value[root]
                chosen[root], chosen[child] = chosen[child], chosen[root]
                root = child
        fits = True
        for one in range(size):
            unit, needed, best = chosen[one], tokens[order[place + one]], -1
            for other in range(slots):
                if room[unit, other] >= needed and (best < 0 or room[unit, other] < room[unit, best]):
                    best = other
            slot[one] = best
            fits = fits and best >= 0
        if not fits:
            break
        for one in range(size):
            unit, sample, best = chosen[one], order[place + one], slot[one]
            bins[sample] = unit * slots + best
            room[unit, best] -= tokens[sample]
            share[unit] -= tokens[sample]
            need[unit] -= costs[sample]
            most_room[unit] = room[unit, 0]
            for other in range(1, slots):
                most_room[unit] = max(most_room[unit], room[unit, other])
            num_empty -= empty[unit, best]
            empty[unit, best] = False
        place += size
    return place, num_empty


def seat(held: NDArray[np.float64], exchanges: int) -> NDArray[np.int64]:
    """[groups, width]: the column of each row, greedily, then improved by swaps of two: ``arrange``'s two steps."""
    groups, width, _ = held.shape
    seats = np.full((groups, width), -1, np.int64)
    best_row, best_column = np.empty(width, np.int64), np.empty(width, np.int64)
    highest = np.empty(width, np.float64)
    for group in range(groups):
        chosen, taken = seats[group], np.zeros(width, np.bool_)
        left = width
        while left:
            highest[:] = -1
            for row in range(width):
                if chosen[row] < 0:
                    most = -1.0
                    for column in range(width):
                        value = held[group, row, column]
                        if not taken[column]:
                            if value > most:
                                most, best_column[row] = value, column
                            if value > highest[column]:
                                highest[column], best_row[column] = value, row
            for row in range(width):
                column = best_column[row]
                if chosen[row] < 0 and best_row[column] == row:
                    chosen[row], taken[column] = column, True
                    left -= 1
        for _ in range(exchanges):
            most, one, other = 0.0, 0, 0
            for row in range(width):
                for column in range(width):
                    # What both keep in each other's column, less what they keep in their own.
                    gain = held[group, row, chosen[column]] + held[group, column, chosen[row]]
                    gain = gain - held[group, row, chosen[row]] - held[group, column, chosen[column]]
                    if gain > most:
                        most, one, other = gain, row, column
            if most <= 0:
                break
            chosen[one], chosen[other] = chosen[other], chosen[one]
    return seats
