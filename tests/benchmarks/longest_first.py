"""The named baseline: longest processing time first (Graham 1969), as sequence-packing loaders do it.

Samples in descending cost; the first R * M each open a bin; every further one goes to the least loaded rank with room
for it, into the fullest bin there that still fits, scanning all bins in Python. At a dead end the reference is kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning import PackingProblem


def longest_first(problem: PackingProblem) -> NDArray[np.int32] | None:
    """The bin of each sample, or None at a dead end. Bins of a rank are in descending cost, so heavy rounds meet."""
    ranks, per_rank = problem.data_parallel_size, problem.num_rounds * problem.local_batch_size
    tokens, costs = problem.tokens.tolist(), problem.costs.tolist()
    order = sorted(range(len(tokens)), key=lambda sample: (-costs[sample], -tokens[sample]))
    room = [[problem.seq_len] * per_rank for _ in range(ranks)]
    load = [0.0] * ranks
    place = [(-1, -1)] * len(tokens)
    for turn, sample in enumerate(order):
        need = tokens[sample]
        best: tuple[float, int, int, int] | None = None
        if turn < ranks * per_rank:
            options = [
                (load[rank], turn // ranks, rank, turn // ranks)
                for rank in range(ranks)
                if room[rank][turn // ranks] == problem.seq_len
            ]
            best = min(options)
        else:
            for rank in range(ranks):
                for slot, left in enumerate(room[rank]):
                    if left >= need and (best is None or (load[rank], left) < best[:2]):
                        best = (load[rank], left, rank, slot)
        if best is None:
            return None
        _, _, rank, slot = best
        room[rank][slot] -= need
        load[rank] += costs[sample]
        place[sample] = (rank, slot)
    bins = np.array([rank * per_rank + slot for rank, slot in place])
    cost_of_bin = np.bincount(bins, weights=problem.costs, minlength=problem.num_bins).reshape(ranks, per_rank)
    position = np.argsort(np.argsort(-cost_of_bin, axis=1, kind="stable"), axis=1)
    return (bins // per_rank * per_rank + position.ravel()[bins]).astype(np.int32)
