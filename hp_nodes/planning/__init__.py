"""Planning: which sample goes to which bin. Pure functions on arrays; neither torch nor torchdata is imported."""

from hp_nodes.planning.algorithm import BalancingAlgorithm
from hp_nodes.planning.backbone import BackboneCostModel
from hp_nodes.planning.costs import CausalAttentionCostModel, PolynomialCostModel, fit_cost_model
from hp_nodes.planning.plan import plan_packing
from hp_nodes.planning.problem import PackingProblem
from hp_nodes.planning.report import merge_reports
from hp_nodes.types import PackingPlan, PlanReport

__all__ = [
    "BackboneCostModel",
    "BalancingAlgorithm",
    "CausalAttentionCostModel",
    "PackingPlan",
    "PackingProblem",
    "PlanReport",
    "PolynomialCostModel",
    "fit_cost_model",
    "merge_reports",
    "plan_packing",
]
