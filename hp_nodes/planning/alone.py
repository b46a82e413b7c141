"""Rounds planned one by one: what a plan of all rounds together must not be worse than.

A joint plan may do all that plans of single rounds do, and more; yet a search that shares its effort among all rounds
may miss what a search of each would find. Bounds tell, nearly always and at little cost, that this cannot be.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.bounds import lower_bound
from hp_nodes.planning.instance import Instance, sums
from hp_nodes.planning.problem import PackingProblem
from hp_nodes.types import PackingPlan

__all__ = ["bound_alone", "bounds_alone", "plan_alone"]


def bound_alone(instance: Instance) -> float:
    """No plan that leaves every sample in its round has a lockstep below this.

    Each round is at least its even share, and its most expensive sample.
    """
    assert instance.reference is not None
    rounds = instance.reference // instance.slots % instance.rounds
    even = sums(instance.costs, rounds, instance.rounds) / instance.ranks
    largest = np.zeros(instance.rounds, np.int64)
    np.maximum.at(largest, rounds, instance.costs)
    return float(np.maximum(even, largest).sum())


def bounds_alone(problem: PackingProblem) -> list[float]:
    """For each round, from all that is known of its samples: in the unit of the costs."""
    instances = (Instance.of(_round(problem, number, None)[1]) for number in range(problem.num_rounds))
    return [lower_bound(instance, "lockstep").value / instance.scale for instance in instances]


def plan_alone(
    problem: PackingProblem,
    objective: str,
    plan: Callable[[PackingProblem, str], PackingPlan],
    lockstep: float,
    bounds: list[float],
) -> NDArray[np.int32] | None:
    """int32[N]: the bins of ``plan(round, objective)`` for one round after the other; no reference bin is empty.

    For ``makespan`` each carries the loads of those before. For ``lockstep``, None as soon as ``bounds`` of the rounds
    that are left say that the whole will not be below ``lockstep``.
    """
    assert problem.reference is not None
    slots, initial, left = problem.local_batch_size, problem.initial_loads, sum(bounds)
    bins = np.empty_like(problem.reference)
    for number in range(problem.num_rounds):
        here, alone = _round(problem, number, initial)
        found = plan(alone, objective)
        bins[here] = (found.bins // slots * problem.num_rounds + number) * slots + found.bins % slots
        if objective == "makespan":
            initial = found.report.costs_after[:, 0] + (0.0 if initial is None else initial)
        if objective == "lockstep":
            left += found.report.after - bounds[number]
            if left >= lockstep:
                return None
    return bins


def _round(
    problem: PackingProblem, number: int, initial: NDArray[np.float64] | None
) -> tuple[NDArray[np.intp], PackingProblem]:
    """The samples whose reference bin is in this round, and the problem that they are."""
    assert problem.reference is not None
    slots = problem.local_batch_size
    unit = problem.reference // slots
    here = np.flatnonzero(unit % problem.num_rounds == number)
    alone = PackingProblem(
        problem.tokens[here],
        problem.costs[here],
        unit[here] // problem.num_rounds * slots + problem.reference[here] % slots,
        data_parallel_size=problem.data_parallel_size,
        num_rounds=1,
        local_batch_size=slots,
        seq_len=problem.seq_len,
        keys=None if problem.keys is None else problem.keys[here],
        sizes=None if problem.sizes is None else problem.sizes[here],
        budgets=None if problem.budgets is None else problem.budgets[here],
        budget_limits=problem.budget_limits,
        initial_loads=initial,
        allow_oversized=problem.allow_oversized,
        padding_cost=problem.padding_cost,
    )
    return here, alone
