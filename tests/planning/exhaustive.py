"""Every assignment of a few samples to a few bins, and a strategy that draws such problems."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from hp_nodes.planning import PackingProblem


def all_feasible(problem: PackingProblem) -> NDArray[np.int64]:
    """int[ways, N]: every assignment that keeps every hard constraint."""
    ways = np.array(list(itertools.product(range(problem.num_bins), repeat=problem.num_samples)))
    inside = ways[:, :, None] == np.arange(problem.num_bins)
    used = (inside * problem.tokens[None, :, None]).sum(axis=1)
    count = inside.sum(axis=1)
    alone = (count == 1) & problem.allow_oversized
    fine = ((used <= problem.seq_len) | alone).all(axis=1) & (count > 0).all(axis=1)
    if problem.budgets is not None and problem.budget_limits is not None:
        for column, limit in enumerate(problem.budget_limits):
            taken = (inside * problem.budgets[None, :, column, None]).sum(axis=1)
            fine &= (taken <= limit * (1 + 1e-9)).all(axis=1)
    return np.asarray(ways[fine])


def loads_of(problem: PackingProblem, ways: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64[ways, ranks, rounds], padding included."""
    inside = ways[:, :, None] == np.arange(problem.num_bins)
    costs = (inside * problem.costs[None, :, None]).sum(axis=1)
    if problem.padding_cost is not None:
        used = (inside * problem.tokens[None, :, None]).sum(axis=1)
        costs = costs + problem.padding_cost[np.maximum(problem.seq_len - used, 0)]
    shape = (len(ways), problem.data_parallel_size, problem.num_rounds, problem.local_batch_size)
    return np.asarray(costs.reshape(shape).sum(axis=3))


def values_of(problem: PackingProblem, ways: NDArray[np.int64], objective: str) -> NDArray[np.float64]:
    """float64[ways]: the objective, straight from its definition."""
    loads = loads_of(problem, ways)
    if objective == "lockstep":
        return np.asarray(loads.max(axis=1).sum(axis=1))
    totals = loads.sum(axis=2)
    if objective == "makespan":
        carried = 0 if problem.initial_loads is None else problem.initial_loads
        return np.asarray((totals + carried).max(axis=1))
    mean = totals.mean(axis=1)
    return np.asarray(np.where(mean > 0, totals.var(axis=1) / np.where(mean > 0, mean, 1) ** 2, 0))


SHAPES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (3, 1, 1), (1, 1, 2)]


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    with_reference: bool | None = None,
    with_budgets: bool = False,
    with_padding: bool = False,
    with_loads: bool = False,
    oversized: bool = False,
    max_samples: int = 6,
) -> PackingProblem:
    """Feasible problems of up to four bins; half of them with a reference, which is one of the feasible assignments."""
    ranks, rounds, slots = draw(st.sampled_from(SHAPES))
    num_bins = ranks * rounds * slots
    count = draw(st.integers(num_bins, max(max_samples, num_bins)))
    seq_len = draw(st.integers(3, 12))
    most = seq_len + 4 if oversized else seq_len
    tokens = draw(st.lists(st.integers(1, most), min_size=count, max_size=count))
    if draw(st.booleans()):
        costs: list[float] = [float(t * t) for t in tokens]
    else:
        costs = [float(c) for c in draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))]
    arguments: dict[str, Any] = {
        "data_parallel_size": ranks,
        "num_rounds": rounds,
        "local_batch_size": slots,
        "seq_len": seq_len,
        "keys": np.array(draw(st.permutations(range(count)))),
        "allow_oversized": oversized,
    }
    if with_budgets:
        budgets = draw(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0]), min_size=count, max_size=count))
        arguments |= {"budgets": np.array(budgets)[:, None], "budget_limits": [draw(st.sampled_from([1.0, 1.2, 2.0]))]}
    if with_padding:
        table = np.array(draw(st.lists(st.integers(0, 30), min_size=seq_len + 1, max_size=seq_len + 1)), np.float64)
        arguments["padding_cost"] = np.arange(seq_len + 1.0) ** 2 if draw(st.booleans()) else table
    if with_loads:
        arguments["initial_loads"] = np.array(draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks)), float)
    problem = PackingProblem(np.array(tokens), np.array(costs), **arguments)
    ways = all_feasible(problem)
    if not len(ways):
        # Shortening makes it feasible: one token each always fits in some way, budgets aside.
        problem = PackingProblem(
            np.ones(count, np.int64), np.array(costs), **{**arguments, "budgets": None, "budget_limits": None}
        )
        ways = all_feasible(problem)
        if not len(ways):
            arguments |= {"seq_len": count, "padding_cost": None, "budgets": None, "budget_limits": None}
            problem = PackingProblem(np.ones(count, np.int64), np.array(costs), **arguments)
            ways = all_feasible(problem)
    if with_reference is None:
        with_reference = draw(st.booleans())
    if not with_reference:
        return problem
    reference = ways[draw(st.integers(0, len(ways) - 1))]
    return with_bins(problem, reference)


def with_bins(problem: PackingProblem, reference: NDArray[Any] | None, **changed: Any) -> PackingProblem:
    """The same problem with another reference, or other arguments."""
    arguments: dict[str, Any] = {
        name: getattr(problem, name)
        for name in (
            "data_parallel_size",
            "num_rounds",
            "local_batch_size",
            "seq_len",
            "keys",
            "sizes",
            "budgets",
            "budget_limits",
            "initial_loads",
            "allow_oversized",
            "padding_cost",
        )
    }
    arguments |= changed
    return PackingProblem(problem.tokens, problem.costs, reference, **arguments)
