"""Simulated annealing on single moves and swaps: what a long search finds where the lower bound is loose.

Needs numba; 20 million moves take some seconds. It starts from a given plan and returns the best lockstep that it met.
Kirkpatrick, Gelatt and Vecchi, Optimization by simulated annealing (1983).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hp_nodes.planning import PackingProblem


def anneal(problem: PackingProblem, bins: np.ndarray, moves: int = 20_000_000, seed: int = 0) -> float:
    """The lowest lockstep met in ``moves`` moves from ``bins``; temperatures fall from 3 % of a load to 0.0003 %."""
    order = np.argsort(problem.tokens, kind="stable")
    lowest = _compiled()(
        problem.tokens[order],
        problem.costs[order],
        bins[order].astype(np.int64),
        problem.data_parallel_size,
        problem.num_rounds,
        problem.local_batch_size,
        problem.seq_len,
        moves,
        seed,
    )
    return float(lowest)


_CACHE: list[Callable[..., Any]] = []


def _compiled() -> Callable[..., Any]:
    if not _CACHE:
        from numba import njit

        _CACHE.append(njit(_anneal))
    return _CACHE[0]


def _anneal(tokens, costs, bins, ranks, rounds, slots, capacity, moves, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    count = len(tokens)
    num_bins = ranks * rounds * slots
    used = np.zeros(num_bins, np.int64)
    inside = np.zeros(num_bins, np.int64)
    load = np.zeros((rounds, ranks), np.float64)
    for i in range(count):
        used[bins[i]] += tokens[i]
        inside[bins[i]] += 1
        load[bins[i] // slots % rounds, bins[i] // slots // rounds] += costs[i]
    level = np.zeros(rounds)
    for w in range(rounds):
        level[w] = load[w].max()
    value = level.sum()
    best = value
    mean = load.sum() / (ranks * rounds)
    hot, cold = 0.03 * mean, 3e-6 * mean
    temperature = hot
    cooling = (cold / hot) ** (1000.0 / moves)
    for move in range(moves):
        if move % 1000 == 0:
            temperature *= cooling
        i = np.random.randint(count)
        from_bin = bins[i]
        swap = np.random.random() < 0.7
        j = i
        if swap:
            # Partners of about the same length are swapped most often.
            if np.random.random() < 0.7:
                j = min(max(i + np.random.randint(-8, 9), 0), count - 1)
            else:
                j = np.random.randint(count)
            to_bin = bins[j]
        else:
            to_bin = np.random.randint(num_bins)
        if to_bin == from_bin:
            continue
        shift, cost = tokens[i], costs[i]
        if swap:
            shift -= tokens[j]
            cost -= costs[j]
        elif inside[from_bin] == 1:
            continue
        if used[to_bin] + shift > capacity or used[from_bin] - shift > capacity:
            continue
        w0, r0 = from_bin // slots % rounds, from_bin // slots // rounds
        w1, r1 = to_bin // slots % rounds, to_bin // slots // rounds
        load[w0, r0] -= cost
        load[w1, r1] += cost
        new0, new1 = 0.0, 0.0
        for r in range(ranks):
            new0 = max(new0, load[w0, r])
            new1 = max(new1, load[w1, r])
        change = new0 - level[w0]
        if w1 != w0:
            change += new1 - level[w1]
        if change <= 0 or np.random.random() < np.exp(-change / temperature):
            level[w0] = new0
            level[w1] = new1
            used[from_bin] -= shift
            used[to_bin] += shift
            bins[i] = to_bin
            if swap:
                bins[j] = from_bin
            else:
                inside[from_bin] -= 1
                inside[to_bin] += 1
            value += change
            best = min(best, value)
        else:
            load[w0, r0] += cost
            load[w1, r1] -= cost
    return best
