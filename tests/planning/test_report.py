"""CONTRACT 11: reports of windows, and of the step that they make up."""

from __future__ import annotations

import numpy as np
import pytest

from hp_nodes.planning import PackingProblem, merge_reports, plan_packing
from hp_nodes.types import PlanReport


def window(
    costs: list[float], reference: list[int] | None, objective: str = "lockstep", loads: list[float] | None = None
) -> PlanReport:
    return plan_packing(
        PackingProblem(
            np.full(len(costs), 5),
            costs,
            reference,
            data_parallel_size=2,
            num_rounds=1,
            local_batch_size=1,
            seq_len=10,
            initial_loads=loads,
        ),
        objective,
    ).report


def test_a_report_counts_what_the_plan_did() -> None:
    report = window([9, 9, 1, 1], [0, 0, 1, 1])
    assert report.costs_before.tolist() == [[18], [2]]
    assert report.costs_after.tolist() == [[10], [10]]
    assert report.tokens_after.tolist() == report.tokens_before.tolist() == [[10], [10]]
    assert report.samples_after.tolist() == [[2], [2]]
    assert (report.before, report.after, report.lower_bound) == (18, 10, 10)
    assert report.padding == 0
    assert report.seconds > 0


def test_windows_of_a_step_are_laid_side_by_side() -> None:
    step = merge_reports([window([9, 9, 1, 1], [0, 0, 1, 1]), window([8, 1, 1, 1], [0, 0, 1, 1])])
    assert step.costs_after.shape == (2, 2)
    assert (step.before, step.after) == (18 + 9, 10 + 9)
    assert step.lower_bound <= step.after
    assert step.gain == 1 - 19 / 27
    assert step.accepted


def test_a_step_is_judged_over_all_its_rounds() -> None:
    """The second window makes up for the first: the slowest rank's total is even although neither window's is."""
    first = window([9, 1], [0, 1], "makespan")
    loads = first.costs_after.sum(axis=1)
    second = window([9, 1], [0, 1], "makespan", loads.tolist())
    step = merge_reports([first, second])
    assert (step.before, step.after, step.lower_bound) == (18, 10, 10)


@pytest.mark.parametrize("objective", ["lockstep", "makespan", "balance"])
def test_a_steps_bound_holds_for_any_plans_of_its_windows(objective: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        windows = [window(rng.integers(0, 20, 4).tolist(), None, objective) for _ in range(2)]
        assert merge_reports(windows).lower_bound <= merge_reports(windows).after + 1e-9


def test_one_report_is_its_own_step() -> None:
    report = window([9, 1], [0, 1])
    assert merge_reports([report]) is report


def test_reports_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="none"):
        merge_reports([])
    with pytest.raises(ValueError, match="'lockstep' on 2 and 'makespan' on 2"):
        merge_reports([window([9, 1], None), window([9, 1], None, "makespan")])
