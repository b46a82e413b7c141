"""The problem as the planner computes with it: canonical order, integers only.

Costs become integers by one power of two, chosen so that every sum stays below 2**52: integer sums are exact in any
order, and so is their conversion back to float64. That is why a plan is the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.problem import PackingProblem, tolerated

__all__ = ["Instance"]

COST_BITS = 52
BUDGET_BITS = 50


@dataclass(frozen=True, eq=False)
class Instance:
    """Samples in canonical order (by key); ``order[i]`` is the place of the i-th in the problem's arrays.

    ``costs``, ``padding`` and ``initial`` are ints in units of ``1 / scale``. ``needs`` is int64[n, K] against
    ``limits`` int64[K]. ``sizes`` are bytes. ``reference`` is int32[n] or None.
    """

    order: NDArray[np.intp] | None
    tokens: NDArray[np.int64]
    costs: NDArray[np.int64]
    sizes: NDArray[np.int64]
    needs: NDArray[np.int64]
    limits: NDArray[np.int64]
    reference: NDArray[np.int32] | None
    ranks: int
    rounds: int
    slots: int
    capacity: int
    padding: NDArray[np.int64] | None
    initial: NDArray[np.int64]
    scale: float

    @classmethod
    def of(cls, problem: PackingProblem, *, carries_loads: bool = False) -> Instance:
        """``carries_loads``: whether the objective counts ``initial_loads``."""
        order = _canonical_order(problem.keys)
        initial = problem.initial_loads if carries_loads and problem.initial_loads is not None else None
        scale = _scale(problem, initial)
        needs, limits = _budgets(problem, order)
        ranks = problem.data_parallel_size
        tokens = _taken(problem.tokens, order)
        return cls(
            order=order,
            tokens=tokens,
            costs=_units(_taken(problem.costs, order), scale),
            sizes=tokens if problem.sizes is None else _taken(problem.sizes, order),
            needs=needs,
            limits=limits,
            reference=None if problem.reference is None else _taken(problem.reference, order),
            ranks=ranks,
            rounds=problem.num_rounds,
            slots=problem.local_batch_size,
            capacity=problem.seq_len,
            padding=None if problem.padding_cost is None else _units(problem.padding_cost, scale),
            initial=np.zeros(ranks, np.int64) if initial is None else _units(initial, scale),
            scale=scale,
        )

    @property
    def num_bins(self) -> int:
        return self.ranks * self.rounds * self.slots

    @property
    def units(self) -> int:
        """Micro-batches over all ranks; ``unit = bin // slots``."""
        return self.ranks * self.rounds

    @cached_property
    def by_tokens(self) -> NDArray[np.intp]:
        """Samples in ascending order of tokens."""
        return np.argsort(self.tokens, kind="stable")

    @cached_property
    def by_size(self) -> NDArray[np.intp]:
        """Samples in descending order of cost; where cost does not follow tokens, of the shares of both."""
        order = np.ascontiguousarray(self.by_tokens[::-1])
        if (np.diff(self.costs[order]) <= 0).all():
            return order
        share = self.costs / max(int(self.costs.sum()), 1) + self.tokens / max(int(self.tokens.sum()), 1)
        return np.argsort(-share, kind="stable")

    @cached_property
    def fills_all_bins(self) -> bool:
        """Whether there is a reference, and it is a plan: no bin of it is empty."""
        return self.reference is not None and bool(np.bincount(self.reference, minlength=self.num_bins).all())

    def in_one_round(self) -> Instance:
        """The same bins when only a rank's total counts: one long micro-batch a rank."""
        return replace(self, rounds=1, slots=self.rounds * self.slots)

    def of_bins(self, bins: NDArray[np.int32]) -> Instance:
        """Whole bins as samples: each fills a bin, so that all they can do is change places."""
        tokens = np.full(self.num_bins, self.capacity)
        return replace(
            self,
            order=None,
            tokens=tokens,
            costs=self.bin_costs(bins),
            sizes=tokens,
            needs=np.zeros((self.num_bins, 0), np.int64),
            limits=np.zeros(0, np.int64),
            reference=np.arange(self.num_bins, dtype=np.int32),
            padding=None,
        )

    def in_order_given(self, bins: NDArray[np.int32]) -> NDArray[np.int32]:
        """Bins of the samples in the order of the problem's arrays."""
        if self.order is None:
            return bins
        placed = np.empty_like(bins)
        placed[self.order] = bins
        return placed

    def canonical(self, bins: NDArray[np.int32]) -> NDArray[np.int32]:
        """The inverse of :meth:`in_order_given`."""
        return _taken(bins, self.order)

    def used_tokens(self, bins: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[num_bins]: the tokens of each bin."""
        return sums(self.tokens, bins, self.num_bins)

    def bin_costs(self, bins: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[num_bins]: the cost of each bin, its padding included."""
        costs = sums(self.costs, bins, self.num_bins)
        if self.padding is not None:
            costs += self.padding[np.maximum(self.capacity - self.used_tokens(bins), 0)]
        return costs

    def loads(self, bins: NDArray[np.int32]) -> NDArray[np.int64]:
        """int64[ranks, rounds]: the cost of each micro-batch, without initial loads."""
        return np.asarray(self.bin_costs(bins).reshape(self.ranks, self.rounds, self.slots).sum(axis=2))


def sums(values: NDArray[np.int64], bins: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """Exact sums of ``values`` for each of ``count`` bins."""
    # Weights are float64, which is exact here: all sums of costs and tokens stay below 2**52.
    return np.bincount(bins, weights=values, minlength=count).astype(np.int64)


def _taken(values: NDArray[Any], order: NDArray[np.intp] | None) -> NDArray[Any]:
    return values if order is None else values[order]


def _canonical_order(keys: NDArray[np.int64] | None) -> NDArray[np.intp] | None:
    if keys is None:
        return None
    columns = keys[:, None] if keys.ndim == 1 else keys
    return np.lexsort(columns.T[::-1])


def _scale(problem: PackingProblem, initial: NDArray[np.float64] | None) -> float:
    # A bound on every sum, from the maxima: unlike a sum of floats it does not depend on the order of the samples.
    highest = float(problem.costs.max(initial=0.0)) * max(problem.num_samples, 1)
    if problem.padding_cost is not None:
        highest += float(problem.padding_cost.max()) * problem.num_bins
    if initial is not None:
        highest += float(initial.max()) * problem.data_parallel_size
    if highest == 0:
        return 1.0
    return math.ldexp(1.0, min(COST_BITS - math.frexp(highest)[1], 1000))


def _units(values: NDArray[np.float64], scale: float) -> NDArray[np.int64]:
    return np.rint(values * scale).astype(np.int64)


def _budgets(problem: PackingProblem, order: NDArray[np.intp] | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if problem.budgets is None or problem.budget_limits is None:
        return np.zeros((problem.num_samples, 0), np.int64), np.zeros(0, np.int64)
    limits = np.array([tolerated(limit) for limit in problem.budget_limits])
    exponents = [BUDGET_BITS - math.frexp(limit)[1] if limit > 0 else 0 for limit in limits]
    scales = np.array([math.ldexp(1.0, exponent) for exponent in exponents])
    return np.rint(_taken(problem.budgets, order) * scales).astype(np.int64), np.floor(limits * scales).astype(np.int64)
