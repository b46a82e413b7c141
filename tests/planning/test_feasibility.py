"""How many bins samples need at least."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.planning import PackingProblem, plan_packing
from hp_nodes.planning.feasibility import bins_needed


def fewest(tokens: list[int], seq_len: int) -> int:
    for bins in range(1, len(tokens) + 1):
        for ways in itertools.product(range(bins), repeat=len(tokens)):
            if (
                max(sum(t for t, b in zip(tokens, ways, strict=True) if b == number) for number in range(bins))
                <= seq_len
            ):
                return bins
    raise AssertionError


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_never_more_than_the_fewest_there_are(tokens: list[int]) -> None:
    problem = PackingProblem(
        np.array(tokens), np.ones(len(tokens)), data_parallel_size=1, num_rounds=1, local_batch_size=1, seq_len=10
    )
    needed = bins_needed(problem)
    assert -(-sum(tokens) // 10) <= needed <= fewest(tokens, 10)


def test_an_infeasible_problem_names_samples_tokens_and_bins() -> None:
    """No bound rules these out, but three sixes and three fives do not fit three bins of eleven and one short."""
    problem = PackingProblem(
        [6, 6, 6, 4, 4, 4, 3], np.ones(7), data_parallel_size=3, num_rounds=1, local_batch_size=1, seq_len=11
    )
    with pytest.raises(
        ValueError, match=r"7 samples of 33 tokens .* 3 bins of 11 tokens.*sample at place 0 \(6 tokens\)"
    ):
        plan_packing(problem)


def test_budgets_that_cannot_be_kept_are_named() -> None:
    problem = PackingProblem(
        [1, 1, 1],
        np.ones(3),
        data_parallel_size=2,
        num_rounds=1,
        local_batch_size=1,
        seq_len=11,
        budgets=[[1.0, 0.0]] * 3,
        budget_limits={"images": 1, "pixels": 7},
    )
    with pytest.raises(ValueError, match=r"no way was found.* and budgets \{'images': 1.0, 'pixels': 7.0\}"):
        plan_packing(problem)
