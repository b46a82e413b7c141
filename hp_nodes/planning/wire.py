"""A plan as bytes: what the planning rank sends, so that every rank has the same plan and the same report.

The receiver holds the same gathered numbers, so only what it cannot count by itself travels: the bins, the costs of
each rank and round (exact sums of the planner's quantised costs), and a few values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.problem import PackingProblem
from hp_nodes.types import PackingPlan, PlanReport

__all__ = ["plan_from_bytes", "plan_nbytes", "plan_to_bytes"]

_NOTE_BYTES = 192
_VALUES = 8


def plan_nbytes(problem: PackingProblem) -> int:
    """Length of every plan of this problem."""
    grid = problem.data_parallel_size * problem.num_rounds
    return 8 * (_VALUES + 2 * grid) + _NOTE_BYTES + 4 * problem.num_samples


def plan_to_bytes(plan: PackingPlan) -> NDArray[np.uint8]:
    """uint8[plan_nbytes(problem)]."""
    report = plan.report
    values = np.array(
        [
            np.nan if report.before is None else report.before,
            report.after,
            report.lower_bound,
            np.nan if report.gain is None else report.gain,
            float(report.accepted),
            report.seconds,
            report.work,
            report.largest_sample,
        ]
    )
    costs_before = np.zeros_like(report.costs_after) if report.costs_before is None else report.costs_before
    note = report.note.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b" ")
    parts = [values, costs_before.astype(np.float64), report.costs_after.astype(np.float64)]
    pieces = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    return np.concatenate([*pieces, np.frombuffer(note, np.uint8), plan.bins.astype(np.int32).view(np.uint8)])


def plan_from_bytes(data: NDArray[np.uint8], problem: PackingProblem, objective: str, threshold: float) -> PackingPlan:
    """The plan that :func:`plan_to_bytes` encoded, for the receiver's own copy of the problem."""
    shape = (problem.data_parallel_size, problem.num_rounds)
    grid = shape[0] * shape[1]
    values = data[: 8 * _VALUES].view(np.float64)
    costs = data[8 * _VALUES : 8 * (_VALUES + 2 * grid)].view(np.float64).reshape(2, *shape)
    start = 8 * (_VALUES + 2 * grid)
    note = data[start : start + _NOTE_BYTES].tobytes().decode(errors="ignore").rstrip()
    bins = data[start + _NOTE_BYTES :].view(np.int32)
    tokens_after, padding = _tokens(problem, bins)
    reference = problem.reference
    report = PlanReport(
        objective=objective,
        before=None if np.isnan(values[0]) else float(values[0]),
        after=float(values[1]),
        lower_bound=float(values[2]),
        gain=None if np.isnan(values[3]) else float(values[3]),
        threshold=threshold,
        accepted=bool(values[4]),
        seconds=float(values[5]),
        costs_before=None if reference is None else costs[0].copy(),
        costs_after=costs[1].copy(),
        tokens_before=None if reference is None else _tokens(problem, reference)[0],
        tokens_after=tokens_after,
        samples_before=None if reference is None else _counts(problem, reference),
        samples_after=_counts(problem, bins),
        padding=padding,
        work=float(values[6]),
        largest_sample=float(values[7]),
        note=note,
    )
    return PackingPlan(bins=bins.copy(), oversized=problem.oversized_bins(bins), report=report)


def _tokens(problem: PackingProblem, bins: NDArray[np.int32]) -> tuple[NDArray[np.int64], int]:
    used = np.zeros(problem.num_bins, np.int64)
    np.add.at(used, bins, problem.tokens)
    shape = (problem.data_parallel_size, problem.num_rounds, problem.local_batch_size)
    return used.reshape(shape).sum(axis=2), int(np.maximum(problem.seq_len - used, 0).sum())


def _counts(problem: PackingProblem, bins: NDArray[np.int32]) -> NDArray[np.int64]:
    shape = (problem.data_parallel_size, problem.num_rounds, problem.local_batch_size)
    counts: NDArray[np.int64] = (
        np.bincount(bins, minlength=problem.num_bins).astype(np.int64).reshape(shape).sum(axis=2)
    )
    return counts
