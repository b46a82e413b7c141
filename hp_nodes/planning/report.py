"""What a plan did, in numbers: the report of one window, and of the windows of a step together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.bounds import balance_bound
from hp_nodes.planning.objectives import OBJECTIVES, evaluate
from hp_nodes.types import PlanReport

__all__ = ["merge_reports", "relative_gain"]


def relative_gain(before: float, after: float) -> float:
    """``1 - after / before``; 0 where there was nothing to gain."""
    if before == after:
        return 0.0
    return 1.0 - after / before if before > 0 else before - after


def merge_reports(reports: Sequence[PlanReport]) -> PlanReport:
    """The report of a step from those of its windows, in order: their rounds one after the other.

    A built-in objective is computed anew over all rounds; of a user's objective the values are added. ``gain`` is that
    of what was carried out.

    Raises:
        ValueError: there is no report, or they differ in objective or ranks.
    """
    if not reports:
        raise ValueError("merge_reports needs at least one report, it was given none")
    first = reports[0]
    if len(reports) == 1:
        return first
    for other in reports[1:]:
        if (other.objective, len(other.costs_after)) != (first.objective, len(first.costs_after)):
            raise ValueError(
                f"reports of one step have one objective and one number of ranks; given {first.objective!r} on "
                f"{len(first.costs_after)} and {other.objective!r} on {len(other.costs_after)} ranks"
            )
    costs_before = _joined([report.costs_before for report in reports])
    costs_after = np.concatenate([report.costs_after for report in reports], axis=1)
    if first.objective in OBJECTIVES:
        before = None if costs_before is None else evaluate(first.objective, costs_before)
        after = evaluate(first.objective, costs_after)
    else:
        befores = [report.before for report in reports]
        before = None if None in befores else float(sum(value for value in befores if value is not None))
        after = sum(report.after for report in reports)
    work = sum(report.work for report in reports)
    largest = max(report.largest_sample for report in reports)
    bound = _merged_bound(reports, work, largest)
    return PlanReport(
        objective=first.objective,
        before=before,
        after=after,
        lower_bound=bound,
        gain=None if before is None else relative_gain(before, after),
        threshold=first.threshold,
        accepted=any(report.accepted for report in reports),
        seconds=sum(report.seconds for report in reports),
        costs_before=costs_before,
        costs_after=costs_after,
        tokens_before=_joined([report.tokens_before for report in reports]),
        tokens_after=np.concatenate([report.tokens_after for report in reports], axis=1),
        samples_before=_joined([report.samples_before for report in reports]),
        samples_after=np.concatenate([report.samples_after for report in reports], axis=1),
        padding=sum(report.padding for report in reports),
        work=work,
        largest_sample=largest,
        note=next((report.note for report in reports if report.note), ""),
    )


def _merged_bound(reports: Sequence[PlanReport], work: float, largest: float) -> float:
    objective, ranks = reports[0].objective, len(reports[0].costs_after)
    if objective == "lockstep":
        return sum(report.lower_bound for report in reports)
    if objective == "makespan":
        return max(work / ranks, largest)
    if objective == "balance":
        # A window whose own bound is unknown to us (padding has a price) gives none to the whole either.
        exact = all(abs(float(report.costs_after.sum()) - report.work) <= 1e-9 * report.work for report in reports)
        return balance_bound(largest, work, ranks) if exact else 0.0
    return float("nan")


def _joined(parts: Sequence[NDArray[Any] | None]) -> NDArray[Any] | None:
    known = [part for part in parts if part is not None]
    return np.concatenate(known, axis=1) if len(known) == len(parts) else None
