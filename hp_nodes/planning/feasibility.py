"""When samples cannot be packed at all, and what to tell the user."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.problem import NAMED_AT_MOST, PackingProblem

__all__ = ["bins_needed", "explain_infeasible", "refuse_hopeless"]


def bins_needed(problem: PackingProblem) -> int:
    """At least this many bins are needed: ``max(ceil(sum / seq_len), the bound L2)``, oversized samples each one more.

    L2 of Martello and Toth, Lower bounds and reduction procedures for the bin packing problem (1990), section 3.
    """
    fitting = problem.tokens[problem.tokens <= problem.seq_len]
    oversized = problem.num_samples - len(fitting)
    return oversized + _martello_toth(np.sort(fitting), problem.seq_len)


def _martello_toth(tokens: NDArray[np.int64], capacity: int) -> int:
    if not len(tokens):
        return 0
    before = np.concatenate([[0], np.cumsum(tokens)])
    half = int(np.searchsorted(tokens, capacity // 2, side="right"))  # from here on: more than half a bin
    thresholds = np.concatenate([[0], np.unique(tokens[:half])])
    # Samples above capacity - threshold are alone; those above half share a bin only with [threshold, half].
    alone_from = np.searchsorted(tokens, capacity - thresholds, side="right")
    pair_from = np.maximum(half, 0)
    small_from = np.searchsorted(tokens, thresholds, side="left")
    paired = alone_from - pair_from
    free = paired * capacity - (before[alone_from] - before[pair_from])
    rest = before[pair_from] - before[np.minimum(small_from, pair_from)]
    needed = (len(tokens) - alone_from) + paired + np.maximum(0, -(-(rest - free) // capacity))
    return int(needed.max())


def refuse_hopeless(problem: PackingProblem) -> None:
    """
    Raises:
        ValueError: there are fewer samples than bins, or fewer bins than the samples need in any packing.
    """
    if problem.num_samples < problem.num_bins:
        raise ValueError(
            f"{problem.num_samples} samples cannot fill {problem.num_bins} bins ({_shape(problem)}); "
            f"{problem.num_bins - problem.num_samples} samples are missing"
        )
    if problem.reference is not None:
        return  # it shows that they fit
    needed = bins_needed(problem)
    if needed > problem.num_bins:
        raise ValueError(
            f"{problem.num_samples} samples of {int(problem.tokens.sum())} tokens need at least {needed} bins of "
            f"{problem.seq_len} tokens, there are {problem.num_bins} ({_shape(problem)}): "
            f"{needed - problem.num_bins} short; the longest are {_longest(problem)}"
        )


def explain_infeasible(problem: PackingProblem) -> str:
    """The message for samples that no search could pack, although no bound rules it out."""
    limits = [] if problem.budget_limits is None else problem.budget_limits.tolist()
    named = ", ".join(f"{name}: {limit}" for name, limit in zip(problem.budget_names, limits, strict=True))
    budgets = f" and budgets {{{named}}}" if named else ""
    return (
        f"no way was found to pack {problem.num_samples} samples of {int(problem.tokens.sum())} tokens into "
        f"{problem.num_bins} bins of {problem.seq_len} tokens{budgets} ({_shape(problem)}); at least "
        f"{bins_needed(problem)} bins are needed; the longest are {_longest(problem)}; "
        "leave more room, or give a reference"
    )


def _shape(problem: PackingProblem) -> str:
    return f"{problem.data_parallel_size} ranks * {problem.num_rounds} rounds * {problem.local_batch_size} slots"


def _longest(problem: PackingProblem) -> str:
    longest = np.argsort(-problem.tokens, kind="stable")[:NAMED_AT_MOST]
    return ", ".join(f"{problem.name(int(sample))} ({problem.tokens[sample]} tokens)" for sample in longest)
