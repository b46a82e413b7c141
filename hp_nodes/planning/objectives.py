"""What is made small: one number for the loads of all ranks and rounds. Lower is better.

* ``lockstep``: the sum over rounds of the slowest rank of that round. FSDP, ZeRO-3, DDP that reduces in every round.
* ``makespan``: the slowest rank's total over the step. DDP with ``no_sync``, pipelines without sharded parameters.
* ``balance``: the squared coefficient of variation of the rank totals; it has no unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OBJECTIVES", "check_objective", "evaluate"]

OBJECTIVES = ("lockstep", "makespan", "balance")


def check_objective(objective: str) -> None:
    """
    Raises:
        ValueError: there is no such objective.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; accepted: {', '.join(map(repr, OBJECTIVES))}")


def evaluate(objective: str, loads: NDArray[Any], initial: NDArray[Any] | None = None) -> float:
    """The objective of ``loads[ranks, rounds]``; ``initial[ranks]`` is what makespan adds to each rank's total.

    Exact for integers whose sums stay below 2**52.
    """
    return _EVALUATE[objective](loads, 0 if initial is None else initial)


def _lockstep(loads: NDArray[Any], initial: Any) -> float:
    return float(loads.max(axis=0).sum())


def _makespan(loads: NDArray[Any], initial: Any) -> float:
    return float((loads.sum(axis=1) + initial).max())


def _balance(loads: NDArray[Any], initial: Any) -> float:
    totals: list[Any] = loads.sum(axis=1).tolist()
    return squared_variation(totals)


def squared_variation(totals: list[Any]) -> float:
    """``n * sum(t**2) / sum(t)**2 - 1``, with one rounding for ints of any size."""
    whole = sum(totals)
    if whole == 0:
        return 0.0
    return float((len(totals) * sum(total * total for total in totals) - whole * whole) / (whole * whole))


_EVALUATE: dict[str, Callable[[NDArray[Any], Any], float]] = {
    "lockstep": _lockstep,
    "makespan": _makespan,
    "balance": _balance,
}


def as_float(loads: NDArray[np.int64], scale: float) -> NDArray[np.float64]:
    """Loads in the unit of the costs; exact, ``scale`` is a power of two."""
    return loads / scale
