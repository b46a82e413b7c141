"""Plan: decides for a window, over all ranks, which bin each sample goes to.

Takes windows with metadata (tokens, costs), gives them with ``plan`` and, for this rank, ``assignment``. Communicates:
the opening exchange (status and numbers), and the plan when one rank makes it for all. An error or an end below becomes
a status, so the same error is raised on every rank. Keeps the loads that a step's earlier windows left on each rank,
where the objective counts them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at
from hp_nodes.nodes.run_ahead import is_interruption
from hp_nodes.nodes.stage import Stage
from hp_nodes.planning import BalancingAlgorithm, PackingPlan, PackingProblem, plan_packing
from hp_nodes.planning.wire import plan_from_bytes, plan_nbytes, plan_to_bytes
from hp_nodes.transport import Transport
from hp_nodes.transport.agreement import own_failure, raise_common
from hp_nodes.transport.opening import Gathered, Opening, Room, Status, open_window
from hp_nodes.transport.opening_rows import row_dtype
from hp_nodes.types import Assignment, BalanceReport, Window

__all__ = ["Planner"]


class Planner(Stage[Window]):
    """Windows with a plan.

    Args:
        source: gives windows with ``tokens``, ``costs`` and ``reference``.
        transport: of the data-parallel group.
        seq_len: tokens of a bin.
        local_batch_size: bins of a round on one rank.
        objective, min_balance_gain, algorithm: see :func:`hp_nodes.planning.plan_packing`.
        allow_oversized: a sample longer than ``seq_len`` goes alone into a bin instead of being an error.
        packing_budgets: name → limit of each bin; every sample states each name in ``packing_costs``.
        padding_cost: float64[seq_len + 1], what 0, 1, ... tokens of padding cost; None: nothing.
        broadcast_plan: True: the first rank plans for all; False: each computes the same plan.
        keep_reference: True: there is nothing to plan; samples are checked and stay where the sampler put them.

    Raises:
        DataPlaneError: (on ``next``) something below failed on any rank, or a window cannot be planned.
    """

    LOADS_KEY = "loads"
    EPOCH_KEY = "epoch"
    STEP_KEY = "step"
    communicates = True

    def __init__(
        self,
        source: BaseNode[Window],
        transport: Transport,
        *,
        seq_len: int,
        local_batch_size: int,
        objective: Literal["lockstep", "makespan", "balance"] = "lockstep",
        min_balance_gain: float = 0.0,
        algorithm: BalancingAlgorithm | None = None,
        allow_oversized: bool = False,
        packing_budgets: Mapping[str, float] | None = None,
        padding_cost: ArrayLike | None = None,
        broadcast_plan: bool = True,
        keep_reference: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        self.transport = transport
        self.seq_len = seq_len
        self.local_batch_size = local_batch_size
        self.objective = objective
        self.min_balance_gain = min_balance_gain
        self.algorithm = _AsSampled() if keep_reference else algorithm
        self.allow_oversized = allow_oversized
        self.packing_budgets = dict(packing_budgets or {})
        self.padding_cost = None if padding_cost is None else np.asarray(padding_cost, dtype=np.float64)
        self.broadcast_plan = broadcast_plan and not keep_reference
        self.keep_reference = keep_reference
        self.announcement: DataPlaneError | Status | None = None
        """Set from another thread: what the next opening brings in place of a window: "closed", or an error."""
        self._room = Room.first(len(self.packing_budgets))
        self.stays = False
        """Whether the ranks agreed that no sample of the window given last changes rank: then there is nothing that the
        Router would have to tell of it. Equal on all ranks, also where this one failed after that.
        """
        self._loads: tuple[int, int, NDArray[np.float64]] | None = None

    def own_state(self) -> dict[str, Any] | None:
        if self._loads is None:
            return None
        epoch, step, loads = self._loads
        return {self.EPOCH_KEY: epoch, self.STEP_KEY: step, self.LOADS_KEY: loads.tolist()}

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        self.announcement = None
        self._loads = None
        if entry is not None:
            loads = np.asarray(entry[self.LOADS_KEY], dtype=np.float64)
            if len(loads) != self.transport.size:
                raise ValueError(
                    f"{self.name}: the state is from within a step on {len(loads)} ranks, not {self.transport.size}; "
                    "another number of ranks can resume at a step's boundary only"
                )
            self._loads = int(entry[self.EPOCH_KEY]), int(entry[self.STEP_KEY]), loads

    def next(self) -> Window:
        self.stays = False
        brought, window = self._bring()
        before_reading = window is not None and window.samples is None
        with self._exchanging(window):
            opened = open_window(self.transport, brought, self._room, self.name)
        if opened is None:
            raise StopIteration
        assert window is not None
        self._room = opened.room
        problem, error = self._problem(window, opened, before_reading)
        plan = self._agreed_plan(problem, error, window, opened.origins)
        self._carry(window, plan)
        self.transport.mark("planned")
        share = self._assignment(window, opened, plan, before_reading)
        report = BalanceReport(
            plan=plan.report, skipped=window.skipped, dropped=window.dropped, plan_digest=_digest(plan)
        )
        return self.give(replace(window, plan=plan, assignment=share, report=report))

    def _exchanging(self, window: Window | None) -> exchanging:
        return exchanging(self.name) if window is None else exchanging(self.name, window.epoch, window.step)

    def _bring(self) -> tuple[Opening | Status | DataPlaneError, Window | None]:
        """What this rank says in the opening, and its window when it has one."""
        if self.announcement is not None:
            return self.announcement, None
        window: Window | None = None
        try:
            window = self.pull()
            return self._opening(window), window
        except StopIteration:
            return Status.END, None
        except BaseException as error:
            if (isinstance(error, DataPlaneError) and error.agreed) or is_interruption(error):
                raise
            return own_failure(self.transport, error, self.name, window), None

    def _opening(self, window: Window) -> Opening:
        with failing_at(self.name, epoch=window.epoch, step=window.step):
            if window.metadata is None or window.tokens is None or window.costs is None or window.reference is None:
                raise ValueError("the window has no metadata; a MetadataDeriver below the Planner fills it")
            before_reading = window.samples is None
            numbers = np.zeros(len(window.keys), dtype=row_dtype(before_reading, len(self.packing_budgets)))
            positions = np.array([key.position for key in window.keys], dtype=np.int64)
            first = int(positions.min()) if len(positions) else 0
            numbers["cost"] = window.costs
            numbers["tokens"] = np.minimum(window.tokens, np.iinfo(np.int32).max)
            numbers["offset"] = positions - first
            if before_reading:
                numbers["index"] = [key.index for key in window.keys]
            else:
                numbers["reference"] = window.reference
                numbers["part"] = [key.part for key in window.keys]
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            described = zip(window.keys, window.metadata, strict=True) if self.packing_budgets else ()
            for key, metadata in described:
                place.at(key)
                missing = [name for name in self.packing_budgets if name not in metadata.packing_costs]
                if missing:
                    raise ValueError(
                        f"packing_costs lacks {missing}; every sample states each of {list(self.packing_budgets)}"
                    )
            for column, name in enumerate(self.packing_budgets):
                numbers[f"budget_{column}"] = [metadata.packing_costs[name] for metadata in window.metadata]
        return Opening(
            window.epoch,
            window.step,
            window.first_round,
            window.num_rounds,
            window.ends_step,
            window.ends_epoch,
            first,
            numbers,
        )

    def _problem(
        self, window: Window, opened: Gathered, before_reading: bool
    ) -> tuple[PackingProblem | None, DataPlaneError | None]:
        bins_of_rank = window.num_rounds * self.local_batch_size
        try:
            numbers, origins = opened.rows, opened.origins
            if before_reading:
                local, keys = np.arange(len(numbers)) - opened.starts[origins], opened.positions
            else:
                local, keys = numbers["reference"], np.stack([opened.positions, numbers["part"]], axis=1)
            if not numbers["cost"].any() and self.padding_cost is None:
                raise ValueError(
                    "all costs of the window are 0; give a cost_model, a model_config, or SampleMetadata with a cost "
                    "whose llm component is positive"
                )
            names = list(self.packing_budgets)
            budgets = np.stack([numbers[f"budget_{k}"] for k in range(len(names))], axis=1) if names else None
            carried = (
                self._loads if self._loads is not None and self._loads[:2] == (window.epoch, window.step) else None
            )
            problem = PackingProblem(
                numbers["tokens"].astype(np.int64),
                numbers["cost"],
                local + origins.astype(np.int64) * bins_of_rank,
                data_parallel_size=self.transport.size,
                num_rounds=window.num_rounds,
                local_batch_size=self.local_batch_size,
                seq_len=self.seq_len,
                keys=keys,
                key_names=("position", "part"),
                budgets=budgets,
                budget_limits=self.packing_budgets if names else None,
                initial_loads=None if carried is None else carried[2],
                allow_oversized=self.allow_oversized,
                padding_cost=self.padding_cost,
            )
        except Exception as error:
            failed = DataPlaneError.of(error, rank=None, node=self.name, epoch=window.epoch, step=window.step)
            failed.__cause__ = error
            return None, failed
        return problem, None

    def _agreed_plan(
        self, problem: PackingProblem | None, error: DataPlaneError | None, window: Window, origins: NDArray[np.int32]
    ) -> PackingPlan:
        if problem is None:
            self._raise_everywhere(error)
        if self.broadcast_plan and self.transport.size > 1:
            return self._broadcast_plan(problem, window, origins)
        planned = self._plan(problem, window)
        if isinstance(planned, DataPlaneError):
            # A user's algorithm may fail on one rank alone: the exchange of the next node tells the others.
            raise planned
        return planned

    def _raise_everywhere(self, error: DataPlaneError | None) -> NoReturn:
        """All ranks computed this from the same numbers, so all are here."""
        assert error is not None
        error.agreed = True
        raise error

    def _plan(self, problem: PackingProblem, window: Window) -> PackingPlan | DataPlaneError:
        try:
            plan = plan_packing(problem, self.objective, self.min_balance_gain, self.algorithm)
            if self.keep_reference:  # no plan is better, so what it costs is the bound
                report = replace(plan.report, objective=self.objective, lower_bound=plan.report.after)
                plan = replace(plan, report=report)
            return plan
        except BaseException as error:
            if is_interruption(error):
                raise
            rank = None if self.algorithm is None else self.transport.global_ranks[self.transport.rank]
            failed = DataPlaneError.of(error, rank=rank, node=self.name, epoch=window.epoch, step=window.step)
            failed.__cause__ = error
            return failed

    def _broadcast_plan(self, problem: PackingProblem, window: Window, origins: NDArray[np.int32]) -> PackingPlan:
        buffer = np.zeros(8 + plan_nbytes(problem), dtype=np.uint8)  # status, whether all samples stay, the plan
        planned: PackingPlan | DataPlaneError | None = None
        if self.transport.rank == 0:
            planned = self._plan(problem, window)
            if isinstance(planned, PackingPlan):
                buffer[8:] = plan_to_bytes(planned)
                buffer[1] = not _moves(planned, origins, window.num_rounds * self.local_batch_size)
            else:
                buffer[0] = Status.ERROR
        with self._exchanging(window):
            self.transport.broadcast(buffer, 0, f"{self.name}: plan")
            if buffer[0] == Status.ERROR:
                raise_common(self.transport, planned if isinstance(planned, DataPlaneError) else None, self.name)
        self.stays = bool(buffer[1])
        if isinstance(planned, PackingPlan):
            return planned
        named = self.objective if self.algorithm is None else type(self.algorithm).__name__
        return plan_from_bytes(buffer[8:], problem, named, self.min_balance_gain)

    def _carry(self, window: Window, plan: PackingPlan) -> None:
        """Loads of the step so far, for an objective that counts totals."""
        if self.objective != "makespan" or self.algorithm is not None or window.ends_step:
            self._loads = None
            return
        loads = plan.report.costs_after.sum(axis=1)
        if self._loads is not None and self._loads[:2] == (window.epoch, window.step):
            loads = loads + self._loads[2]
        self._loads = window.epoch, window.step, loads

    def _assignment(self, window: Window, opened: Gathered, plan: PackingPlan, before_reading: bool) -> Assignment:
        bins_of_rank = window.num_rounds * self.local_batch_size
        me, numbers = self.transport.rank, opened.rows
        owners = plan.bins // bins_of_rank
        mine = np.flatnonzero(owners == me)
        parts = np.zeros(len(mine), dtype=np.int32) if before_reading else numbers["part"][mine]
        order = np.lexsort((parts, opened.positions[mine], plan.bins[mine]))
        mine, start = mine[order], opened.starts[me]
        going = np.flatnonzero(owners != opened.origins)
        leaving, arriving = np.bincount(opened.origins[going]), np.bincount(owners[going])
        most = max(int(leaving.max(initial=0)), int(arriving.max(initial=0)))
        return Assignment(
            positions=opened.positions[mine],
            parts=parts[order],
            indices=numbers["index"][mine] if before_reading else None,
            bins=plan.bins[mine] - me * bins_of_rank,
            tokens=numbers["tokens"][mine].astype(np.int64),
            costs=numbers["cost"][mine].copy(),
            origins=opened.origins[mine],
            targets=owners[start : start + opened.counts[me]].astype(np.int32),
            moves=most > 0,
            peers=min(most, self.transport.size - 1),
        )


class _AsSampled:
    """In the planner's place where nothing can be gained: every sample stays where it is."""

    def assign(self, problem: PackingProblem) -> NDArray[np.int32]:
        assert problem.reference is not None
        return problem.reference

    def objective(self, loads: NDArray[np.float64]) -> float:
        return float(loads.max(axis=0).sum())


def _moves(plan: PackingPlan, origins: NDArray[np.int32], bins_of_rank: int) -> bool:
    """Whether any sample changes rank."""
    return bool((plan.bins // bins_of_rank != origins).any())


def _digest(plan: PackingPlan) -> int:
    """int64 of the bins: ranks that carry out different plans have different ones."""
    return int.from_bytes(hashlib.blake2b(plan.bins.tobytes(), digest_size=8).digest(), "little", signed=True)
