"""What a problem accepts, and how it names what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_nodes.planning import PackingProblem, plan_packing

GOOD: dict[str, Any] = {
    "tokens": [4, 5, 6],
    "costs": [1.0, 2, 3],
    "reference": [0, 1, 1],
    "data_parallel_size": 2,
    "num_rounds": 1,
    "local_batch_size": 1,
    "seq_len": 12,
    "keys": [7, 8, 9],
}


def build(**changed: Any) -> PackingProblem:
    return PackingProblem(**{**GOOD, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": [4, 0, 6]}, r"tokens must be at least 1: sample 8 has 0"),
        ({"tokens": [4, -5, 6]}, r"sample 8 has -5"),
        ({"tokens": [4.0, 5.0, 6.0]}, r"tokens .*float64; accepted: one int"),
        ({"tokens": [4, 13, 6]}, r"longer than seq_len 12: sample 8 has 13 tokens"),
        ({"costs": [1.0, float("nan"), 3]}, r"costs must be finite .*: sample 8 has nan"),
        ({"costs": [1.0, -2, 3]}, r"sample 8 has -2"),
        ({"costs": [1.0, 2]}, r"costs has shape \(2,\); accepted: \(3,\)"),
        ({"reference": [0, 1]}, r"reference has shape \(2,\)"),
        ({"reference": [0, 1, 2]}, r"must name bins 0 to 1: sample 9 has 2"),
        (
            {"reference": [0, 0, 0], "seq_len": 13},
            r"the reference puts 15 tokens, seq_len is 13, into bin 0 \(rank 0, round 0",
        ),
        ({"keys": [7, 8, 7]}, r"unique; \(7,\) stands at places \[0, 2\]"),
        ({"keys": [[7, 0], [8, 0]]}, r"keys has shape \(2, 2\)"),
        ({"seq_len": 0}, r"seq_len is 0; accepted: an int >= 1"),
        ({"data_parallel_size": True}, r"data_parallel_size is True"),
        ({"num_rounds": 2.0}, r"num_rounds is 2.0"),
        (
            {"num_rounds": 2**30, "local_batch_size": 2},
            r"bins \(ranks \* rounds \* slots\); accepted: fewer than 2\*\*31",
        ),
        ({"budgets": [[1.0]] * 3, "budget_limits": [4.0, 4.0]}, r"budgets has shape \(3, 1\); accepted: \(3, 2\)"),
        ({"sizes": [1, -1, 1]}, r"sizes must be at least 0: sample 8 has -1"),
        ({"budgets": [[1.0]] * 3}, r"together or not at all"),
        ({"budgets": [[1.0]] * 3, "budget_limits": [-1.0]}, r"budget_limits is \[-1.0\]"),
        ({"budgets": [[1.0], [5.0], [1.0]], "budget_limits": [4.0]}, r"budget 0 is limited to 4.0: sample 8 has 5.0"),
        (
            {"budgets": [[1.0], [3.0], [2.0]], "budget_limits": [4.0]},
            r"the reference puts 5.0 of budget 0, its limit is 4.0",
        ),
        (
            {"budgets": [[1.0, 1.0], [1.0, 5.0], [1.0, 1.0]], "budget_limits": {"pixels": 9.0, "images": 4.0}},
            r"budget 'images' is limited to 4.0: sample 8 has 5.0",
        ),
        ({"initial_loads": [1.0]}, r"initial_loads has shape \(1,\)"),
        ({"initial_loads": [1.0, float("inf")]}, r"initial_loads holds inf"),
        ({"padding_cost": np.zeros(3)}, r"padding_cost has shape \(3,\); accepted: \(13,\)"),
        ({"features": {"depth": [1.0]}}, r"feature 'depth' has shape"),
    ],
)
def test_what_is_refused_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changed)


def test_a_key_of_several_columns_names_samples_and_orders_them() -> None:
    with pytest.raises(ValueError, match=r"sample \(epoch 0, position 8, part 1\) has 0"):
        build(tokens=[4, 0, 5], keys=[[0, 7, 0], [0, 8, 1], [0, 9, 0]], key_names=["epoch", "position", "part"])
    with pytest.raises(ValueError, match=r"sample \(0, 8, 1\) has 0"):
        build(tokens=[4, 0, 6], keys=[[0, 8, 0], [0, 8, 1], [1, 2, 0]])
    forward = build(keys=[[0, 8, 0], [0, 8, 1], [1, 2, 0]], reference=None)
    backward = PackingProblem(
        [6, 5, 4], [3.0, 2, 1], keys=[[1, 2, 0], [0, 8, 1], [0, 8, 0]], **{k: GOOD[k] for k in list(GOOD)[3:7]}
    )
    assert plan_packing(forward).bins.tolist() == plan_packing(backward).bins[::-1].tolist()


def test_an_oversized_reference_is_fine_only_alone() -> None:
    build(tokens=[13, 5, 6], allow_oversized=True)
    with pytest.raises(ValueError, match="the reference puts 18 tokens"):
        build(tokens=[13, 5, 6], reference=[0, 0, 1], allow_oversized=True)


def test_budget_sums_are_compared_as_a_person_would() -> None:
    """0.1 + 0.2 is not above 0.3, whatever floats say."""
    problem = build(budgets=[[0.3], [0.1], [0.2]], budget_limits=[0.3])
    plan = plan_packing(problem)
    assert plan.bins[1] == plan.bins[2] != plan.bins[0]


def test_arrays_cannot_be_changed_behind_the_plan() -> None:
    tokens = np.array([4, 5, 6])
    problem = build(tokens=tokens)
    with pytest.raises(ValueError, match="read-only"):
        problem.tokens[0] = 1
    with pytest.raises(AttributeError):
        problem.seq_len = 5  # type: ignore[misc]
