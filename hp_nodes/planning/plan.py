"""From a problem to a plan: candidates, the gate, and the report."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.algorithm import BalancingAlgorithm, assign_checked, score
from hp_nodes.planning.alone import bound_alone, bounds_alone, plan_alone
from hp_nodes.planning.bounds import lower_bound
from hp_nodes.planning.feasibility import explain_infeasible, refuse_hopeless
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.objectives import check_objective, evaluate
from hp_nodes.planning.problem import PackingProblem
from hp_nodes.planning.report import relative_gain
from hp_nodes.planning.search import CLOSE, arranged, levelled, search
from hp_nodes.types import PackingPlan, PlanReport

__all__ = ["plan_packing"]


def plan_packing(
    problem: PackingProblem,
    objective: str = "lockstep",
    min_balance_gain: float = 0.0,
    algorithm: BalancingAlgorithm | None = None,
) -> PackingPlan:
    """Puts every sample into a bin, so that the objective is as low as can be found, and says how far that is.

    A pure function of its arguments: the same plan on every machine and, with keys, for every order of the samples.
    With a reference, a plan is used only when its relative gain is strictly greater than ``min_balance_gain``;
    otherwise ``bins`` equals the reference. A reference with an empty bin cannot be used, so there the plan always is.
    With any other, the plan is not worse by 0.01 % or more than planning one round after the other.

    Args:
        objective: ``"lockstep"``, ``"makespan"`` or ``"balance"``; ignored with an algorithm of one's own.
        min_balance_gain: at least 0 and below 1.
        algorithm: plans and judges in the built-in planner's place.

    Raises:
        ValueError: an argument is out of range; the samples cannot fill the bins, or do not fit them (it says how many
            bins they need); the algorithm broke a constraint.
    """
    started = time.perf_counter()
    check_objective(objective)
    gate = float(min_balance_gain)
    if not 0 <= gate < 1:
        raise ValueError(f"min_balance_gain is {min_balance_gain!r}; accepted: 0 <= x < 1")
    refuse_hopeless(problem)
    instance = Instance.of(problem, carries_loads=algorithm is None and objective == "makespan")
    judge = _Judge(instance, objective, algorithm)
    if algorithm is not None:
        found = instance.canonical(assign_checked(algorithm, problem))
    else:
        found = _found(problem, instance, judge, objective)
    reference = instance.reference
    before = None if reference is None else judge(reference)
    gain = None if before is None else relative_gain(before, judge(found))
    accepted = gain is None or gain > gate or not instance.fills_all_bins
    used = found if accepted or reference is None else reference
    bins = instance.in_order_given(used)
    return PackingPlan(
        bins=bins,
        oversized=problem.oversized_bins(bins),
        report=_report(instance, judge, used, before, gain, gate, accepted, started),
    )


def _found(problem: PackingProblem, instance: Instance, judge: _Judge, objective: str) -> NDArray[np.int32]:
    """The best plan that the search finds: of all rounds together, or of each alone where that turns out better."""
    packed = search(judge.view, judge.ints, objective)
    if packed is None:
        raise ValueError(explain_infeasible(problem))
    packed = arranged(instance, packed, objective)
    if instance.rounds == 1 or not instance.fills_all_bins:
        return packed
    value = judge(packed)
    bounds: list[float] = []
    if objective == "lockstep":
        if value <= bound_alone(instance) / instance.scale * (1 + CLOSE):
            return packed
        bounds = bounds_alone(problem)
        if value <= sum(bounds) * (1 + CLOSE):
            return packed
        packed = arranged(instance, levelled(judge.view, judge.ints, packed), objective)
        value = judge(packed)
    close = CLOSE**2 if objective == "balance" else max(judge.bound()[0], sum(bounds)) * (1 + CLOSE)
    if value <= close:
        return packed
    alone = plan_alone(problem, objective, plan_packing, value, bounds)
    if alone is None:
        return packed
    return min(packed, arranged(instance, instance.canonical(alone), objective), key=judge)


class _Judge:
    """The objective of bins, in the unit of the costs."""

    def __init__(self, instance: Instance, objective: str, algorithm: BalancingAlgorithm | None) -> None:
        self.instance = instance
        self.algorithm = algorithm
        self.objective = objective if algorithm is None else type(algorithm).__name__
        self.view = instance if objective == "lockstep" else instance.in_one_round()
        self.ints = lower_bound(self.view, objective)

    def __call__(self, bins: NDArray[np.int32]) -> float:
        loads = self.instance.loads(bins)
        if self.algorithm is not None:
            return score(self.algorithm, loads / self.instance.scale)
        value = evaluate(self.objective, loads, self.instance.initial)
        return value if self.objective == "balance" else value / self.instance.scale

    def bound(self) -> tuple[float, float, float, bool]:
        """Lower bound, work, largest sample, in the unit of the costs; and whether that sample is what limits."""
        scale, found = self.instance.scale, self.ints
        if self.algorithm is not None:
            return float("nan"), found.work / scale, found.largest_sample / scale, False
        value = found.value if self.objective == "balance" else found.value / scale
        return value, found.work / scale, found.largest_sample / scale, found.limited_by_sample


def _report(
    instance: Instance,
    judge: _Judge,
    used: NDArray[np.int32],
    before: float | None,
    gain: float | None,
    gate: float,
    accepted: bool,
    started: float,
) -> PlanReport:
    reference = instance.reference
    bound, work, largest, limited = judge.bound()
    tokens = instance.used_tokens(used)
    return PlanReport(
        objective=judge.objective,
        before=before,
        after=judge(used),
        lower_bound=bound,
        gain=gain,
        threshold=gate,
        accepted=accepted,
        seconds=time.perf_counter() - started,
        costs_before=None if reference is None else instance.loads(reference) / instance.scale,
        costs_after=instance.loads(used) / instance.scale,
        tokens_before=None if reference is None else _grid(instance, instance.used_tokens(reference)),
        tokens_after=_grid(instance, tokens),
        samples_before=None
        if reference is None
        else _grid(instance, np.bincount(reference, minlength=instance.num_bins)),
        samples_after=_grid(instance, np.bincount(used, minlength=instance.num_bins)),
        padding=int(np.maximum(instance.capacity - tokens, 0).sum()),
        work=work,
        largest_sample=largest,
        note=_LARGEST if limited else "",
    )


_LARGEST = (
    "the most expensive samples limit the plan: they outweigh an even share; "
    "a wider window spreads the rest over more rounds"
)


def _grid(instance: Instance, of_bins: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.asarray(of_bins.reshape(instance.ranks, instance.rounds, instance.slots).sum(axis=2))
