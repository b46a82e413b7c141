"""A user's own algorithm in the planner's place."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.problem import PackingProblem

__all__ = ["BalancingAlgorithm", "assign_checked", "score"]


@runtime_checkable
class BalancingAlgorithm(Protocol):
    """Decides bins, and says what is better. Both must be pure functions: every rank calls them on the same arrays."""

    def assign(self, problem: PackingProblem) -> NDArray[np.int32]:
        """int32[N]: the bin of each sample. ``problem.features`` holds named numeric columns."""
        ...

    def objective(self, loads: NDArray[np.float64]) -> float:
        """One finite number for float64[ranks, rounds]; lower is better."""
        ...


def assign_checked(algorithm: BalancingAlgorithm, problem: PackingProblem) -> NDArray[np.int32]:
    """The algorithm's bins, after checking that every sample has one and that no hard constraint is broken.

    Raises:
        ValueError: it names the algorithm, the rule and the samples.
    """
    return problem.check_bins(f"{type(algorithm).__name__}.assign", algorithm.assign(problem))


def score(algorithm: BalancingAlgorithm, loads: NDArray[np.float64]) -> float:
    """
    Raises:
        ValueError: the algorithm's objective is not a finite number.
    """
    value: Any = algorithm.objective(loads)
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(
            f"{type(algorithm).__name__}.objective gave {value!r}; accepted: a finite number, lower is better"
        )
    return number
