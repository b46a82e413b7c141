"""Windows of up to a few hundred bins with everything that a problem may have, for laws too large to enumerate."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hp_nodes.planning import PackingProblem


@st.composite
def windows(draw: st.DrawFn, *, most_ranks: int = 8, reference: bool | None = None) -> PackingProblem:
    return window(draw(st.integers(0, 2**32 - 1)), most_ranks=most_ranks, reference=reference)


def window(seed: int, *, most_ranks: int = 8, reference: bool | None = None) -> PackingProblem:
    """Always feasible: samples are what reference bins are cut into, be they nearly empty or filled to the last token.

    Everything else is drawn as well: shape, lengths, kind of cost, and whether there are keys, sizes, budgets, a price
    for padding, oversized samples, earlier loads and a reference.
    """
    rng = np.random.default_rng(seed)
    ranks, rounds, slots = rng.integers(1, most_ranks + 1), rng.integers(1, 6), rng.choice([1, 1, 1, 2, 4])
    num_bins = int(ranks * rounds * slots)
    seq_len = int(rng.choice([7, 64, 1000, 8192]))
    fill = float(rng.choice([0.3, 0.6, 0.9, 0.98, 1.0]))
    oversized = rng.random() < 0.15
    tokens, bins = _cut(rng, num_bins, seq_len, fill, oversized)
    arguments: dict[str, Any] = {"allow_oversized": bool(oversized)}
    if rng.random() < 0.2:
        arguments |= _budgets(rng, bins, num_bins)
    if rng.random() < 0.2:
        arguments["padding_cost"] = np.arange(seq_len + 1.0) ** rng.choice([1, 2])
    if rng.random() < 0.2:
        arguments["initial_loads"] = rng.random(ranks) * float(_costs(rng, tokens).sum()) / ranks
    if rng.random() < 0.5:
        arguments["sizes"] = rng.integers(0, 100, len(tokens))
    if rng.random() < 0.5:
        arguments["keys"] = rng.permutation(len(tokens))
    keeps = rng.random() < 0.75 if reference is None else reference
    return PackingProblem(
        tokens,
        _costs(rng, tokens),
        bins if keeps else None,
        data_parallel_size=int(ranks),
        num_rounds=int(rounds),
        local_batch_size=int(slots),
        seq_len=seq_len,
        **arguments,
    )


def shuffled(problem: PackingProblem, order: NDArray[np.intp]) -> PackingProblem:
    """The same samples in another order; they have keys."""

    def taken(values: Any) -> Any:
        return None if values is None else values[order]

    return PackingProblem(
        problem.tokens[order],
        problem.costs[order],
        taken(problem.reference),
        data_parallel_size=problem.data_parallel_size,
        num_rounds=problem.num_rounds,
        local_batch_size=problem.local_batch_size,
        seq_len=problem.seq_len,
        keys=taken(problem.keys),
        sizes=taken(problem.sizes),
        budgets=taken(problem.budgets),
        budget_limits=problem.budget_limits,
        initial_loads=problem.initial_loads,
        allow_oversized=problem.allow_oversized,
        padding_cost=problem.padding_cost,
    )


def rounds_alone(problem: PackingProblem) -> list[tuple[NDArray[np.intp], dict[str, Any]]]:
    """For each round, its samples in the reference, and the arguments of the problem that they alone are."""
    assert problem.reference is not None
    slots = problem.local_batch_size
    unit = problem.reference // slots
    found = []
    for number in range(problem.num_rounds):
        here = np.flatnonzero(unit % problem.num_rounds == number)
        arguments = {
            "tokens": problem.tokens[here],
            "costs": problem.costs[here],
            "reference": unit[here] // problem.num_rounds * slots + problem.reference[here] % slots,
            "data_parallel_size": problem.data_parallel_size,
            "num_rounds": 1,
            "local_batch_size": slots,
            "seq_len": problem.seq_len,
            "keys": None if problem.keys is None else problem.keys[here],
            "sizes": None if problem.sizes is None else problem.sizes[here],
            "budgets": None if problem.budgets is None else problem.budgets[here],
            "budget_limits": problem.budget_limits,
            "allow_oversized": problem.allow_oversized,
            "padding_cost": problem.padding_cost,
        }
        found.append((here, arguments))
    return found


def _cut(
    rng: np.random.Generator, num_bins: int, seq_len: int, fill: float, oversized: bool
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    per_bin = float(rng.choice([1.3, 3, 8, 20]))
    tokens: list[int] = []
    bins: list[int] = []
    for number in range(num_bins):
        if oversized and rng.random() < 0.1:
            parts = np.array([seq_len + rng.integers(1, seq_len)])
        else:
            used = max(int(seq_len * (fill if fill == 1.0 else fill * rng.uniform(0.7, 1.0))), 1)
            count = int(np.clip(rng.poisson(per_bin), 1, used))
            shares = rng.lognormal(0, rng.choice([0.1, 1.0]), count)
            cuts = np.unique(np.clip(np.cumsum(shares / shares.sum() * used).astype(int), 1, used))
            cuts[-1] = used
            parts = np.diff(cuts, prepend=0)
        tokens += parts.tolist()
        bins += [number] * len(parts)
    return np.array(tokens), np.array(bins, np.int32)


def _costs(rng: np.random.Generator, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    length = tokens.astype(np.float64)
    kind = rng.integers(0, 6)
    if kind == 0:
        return length
    if kind in (1, 2):
        return length**2
    if kind == 3:
        return 24576 * length + length**2
    if kind == 4:
        return rng.random(len(tokens)) * length * 0.1
    return np.asarray(rng.integers(0, 3, len(tokens)) * 7.0)


def _budgets(rng: np.random.Generator, bins: NDArray[np.int32], num_bins: int) -> dict[str, Any]:
    taken = rng.choice([0.0, 0.1, 0.3, 1.0], (len(bins), rng.integers(1, 3)))
    used = np.array([np.bincount(bins, weights=column, minlength=num_bins).max() for column in taken.T])
    return {"budgets": taken, "budget_limits": np.maximum(used * rng.choice([1.0, 1.0, 1.5]), 0.1)}
