"""A user's own algorithm: what it is given, and how its result is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_nodes.planning import BalancingAlgorithm, PackingProblem, merge_reports, plan_packing


def problem(**changed: Any) -> PackingProblem:
    arguments = {
        "data_parallel_size": 2,
        "num_rounds": 1,
        "local_batch_size": 1,
        "seq_len": 10,
        "keys": [10, 11, 12, 13],
    }
    return PackingProblem([5, 5, 5, 5], [9.0, 9, 1, 1], [0, 0, 1, 1], **(arguments | changed))


class Fixed:
    def __init__(self, *bins: int) -> None:
        self.bins = bins

    def assign(self, problem: PackingProblem) -> Any:
        return np.array(self.bins)

    def objective(self, loads: Any) -> float:
        return float(loads.max() - loads.min())


def test_it_plans_and_judges_in_the_planners_place() -> None:
    algorithm = Fixed(0, 1, 0, 1)
    assert isinstance(algorithm, BalancingAlgorithm)
    plan = plan_packing(problem(), algorithm=algorithm)
    assert plan.bins.tolist() == [0, 1, 0, 1]
    assert (plan.report.objective, plan.report.before, plan.report.after) == ("Fixed", 16, 0)
    assert np.isnan(plan.report.lower_bound)
    assert merge_reports([plan.report, plan.report]).after == 0


def test_it_passes_the_same_gate() -> None:
    plan = plan_packing(problem(), algorithm=Fixed(0, 0, 1, 1))
    assert not plan.report.accepted
    kept = plan_packing(problem(), algorithm=Fixed(1, 0, 0, 1), min_balance_gain=0.99)
    assert kept.report.accepted  # a gain of 1


def test_it_reads_named_features() -> None:
    class ByFeature(Fixed):
        def assign(self, problem: PackingProblem) -> Any:
            return problem.feature_columns["side"].astype(np.int64)

    plan = plan_packing(problem(features={"side": [1.0, 0, 1, 0]}), algorithm=ByFeature())
    assert plan.bins.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        ((0, 0, 0, 1), r"Fixed.assign puts 15 tokens, seq_len is 10, into bin 0 .*: sample 10, sample 11, sample 12"),
        ((0, 0, 1), r"Fixed.assign has shape \(3,\)"),
        ((0, 0, 1, 2), r"Fixed.assign must name bins 0 to 1: sample 13 has 2"),
        ((0.0, 0.0, 1.0, 1.0), r"float64; accepted: one int a sample"),
    ],
)
def test_a_broken_constraint_names_algorithm_and_samples(bins: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_packing(problem(), algorithm=Fixed(*bins))


def test_an_empty_bin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Fixed.assign leaves 1 of 2 bins empty, the first is bin 1 \(rank 1"):
        plan_packing(problem(seq_len=20), algorithm=Fixed(0, 0, 0, 0))


def test_an_objective_that_is_no_number_is_refused() -> None:
    class Undecided(Fixed):
        def objective(self, loads: Any) -> float:
            return float("nan")

    with pytest.raises(ValueError, match=r"Undecided.objective gave nan"):
        plan_packing(problem(), algorithm=Undecided(0, 1, 0, 1))
