"""Lower bounds: never above the optimum, and as high as the arguments behind them allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.planning import PackingProblem, plan_packing
from tests.planning.exhaustive import all_feasible, problems, values_of


def bound(tokens: list[int], costs: list[float], objective: str = "lockstep", **shape: Any) -> float:
    arguments = {"data_parallel_size": 2, "num_rounds": 2, "local_batch_size": 1, "seq_len": 100} | shape
    return plan_packing(PackingProblem(np.array(tokens), np.array(costs), **arguments), objective).report.lower_bound


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(("lockstep", "makespan", "balance")))
def test_no_plan_at_all_is_below_a_bound(small: PackingProblem, objective: str) -> None:
    best = values_of(small, all_feasible(small), objective).min()
    assert plan_packing(small, objective).report.lower_bound <= best * (1 + 1e-12) + 1e-12


def test_large_samples_that_may_share_a_micro_batch_bound_only_one_round() -> None:
    """Costs 10, 5, 5, 1 on two ranks and two rounds take 11: the third largest is no bound for the second round."""
    assert bound([1, 1, 1, 1], [10.0, 5, 5, 1]) <= 11


def test_large_samples_that_share_no_bin_bound_several_rounds() -> None:
    """Each fills more than half a bin: the third largest must open the second round, however the rest is spread."""
    assert bound([60, 60, 60, 60], [100.0, 90, 80, 1]) == pytest.approx(180, rel=1e-9)


def test_rounds_that_tokens_leave_half_empty_raise_the_others() -> None:
    """A full row of long samples costs what no row of short ones can: the work they leave over is spread elsewhere."""
    tokens = [100, 100] + [10] * 60
    costs = [float(t * t) for t in tokens]
    # Round one holds both long samples (10000 each); thirty short rows of 1000 are 6 rows: 6 * 1000 / 6 micro-batches.
    assert bound(tokens, costs, num_rounds=4) == pytest.approx(10_000 + 3 * 1000, rel=1e-9)


def test_even_work_is_rounded_up_to_what_loads_can_be() -> None:
    assert bound([1] * 5, [9.0, 9, 8, 8, 1]) == 18
    assert bound([1] * 5, [6.0, 6, 6, 6, 3], num_rounds=1) == 15


def test_loads_of_earlier_windows_count_in_makespan_alone() -> None:
    arguments = {"num_rounds": 1, "initial_loads": np.array([0.0, 50.0])}
    assert bound([1, 1], [4.0, 6.0], "makespan", **arguments) == 54
    assert bound([1, 1], [40.0, 60.0], "makespan", **arguments) == 90
    assert bound([1, 1], [4.0, 6.0], "lockstep", **arguments) == 6


def test_more_large_samples_than_ranks_crowd_one_of_them() -> None:
    assert bound([1] * 6, [9.0, 9, 9, 1, 1, 1], "makespan") == 18
    assert bound([1] * 6, [9.0, 9, 9, 9, 9, 1], "makespan") == 27


def test_one_sample_above_its_share_unbalances_any_plan() -> None:
    value = bound([1, 1, 1], [8.0, 1, 1], "balance", data_parallel_size=3, num_rounds=1)
    assert value == pytest.approx(np.var([8, 1, 1]) / (10 / 3) ** 2)
