"""Laws on windows of up to a few hundred bins, with budgets, prices for padding, oversized samples and full rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_nodes.planning import PackingProblem, plan_packing
from tests.planning.windows import rounds_alone, shuffled, window, windows

OBJECTIVES = ("lockstep", "makespan", "balance")
law = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@law
@given(windows(reference=True), st.sampled_from(OBJECTIVES))
def test_a_plan_keeps_every_constraint_and_is_never_worse_than_the_reference(
    problem: PackingProblem, objective: str
) -> None:
    plan = plan_packing(problem, objective)
    problem.check_bins("the plan", plan.bins)
    assert plan.report.before is not None
    assert plan.report.lower_bound * (1 - 1e-9) <= plan.report.after <= plan.report.before


@law
@given(windows(reference=True), st.sampled_from(OBJECTIVES))
def test_planning_rounds_together_is_never_worse_than_each_alone(problem: PackingProblem, objective: str) -> None:
    """By 0.01 % or more."""
    value, alone = plan_packing(problem, objective).report.after, _alone(problem, objective)
    assert value <= (max(alone, 1e-8) if objective == "balance" else alone * (1 + 1e-4))


@law
@given(windows(), st.sampled_from(OBJECTIVES), st.integers(0, 2**32 - 1))
def test_the_order_of_samples_with_keys_does_not_matter(problem: PackingProblem, objective: str, seed: int) -> None:
    if problem.keys is None:
        return
    order = np.random.default_rng(seed).permutation(problem.num_samples)
    bins = plan_packing(problem, objective).bins
    assert plan_packing(shuffled(problem, order), objective).bins.tolist() == bins[order].tolist()


@pytest.mark.parametrize("seed", [53, 82, 128, 137, 148, 259, 372, 390, 439, 479, 534, 559, 678, 706])
def test_rows_that_were_full_are_found_again_without_a_reference(seed: int) -> None:
    """Samples cut from rows of exactly ``seq_len`` tokens, some with budgets used up: no token may be wasted."""
    problem = window(seed)
    assert problem.reference is None
    full = int(np.minimum(problem.tokens, problem.seq_len).sum()) == problem.num_bins * problem.seq_len
    assert full
    problem.check_bins("the plan", plan_packing(problem).bins)


def _alone(problem: PackingProblem, objective: str) -> float:
    """The objective over all rounds, when each is planned for itself, knowing what ranks carry already."""
    loads, carried, alone = [], problem.initial_loads, 0.0
    for _, arguments in rounds_alone(problem):
        report: Any = plan_packing(PackingProblem(**arguments, initial_loads=carried), objective).report
        loads.append(report.costs_after[:, 0])
        alone = alone + report.after if objective == "lockstep" else report.after
        if objective == "makespan":
            carried = loads[-1] + (0 if carried is None else carried)
    if objective != "balance":
        return float(alone)
    totals = np.sum(loads, axis=0)
    return float(totals.var() / totals.mean() ** 2) if totals.any() else 0.0
