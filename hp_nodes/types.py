"""What flows along the edges of a graph.

Two envelopes travel from node to node. Both are frozen: a node takes one, fills in what it knows and hands on a copy,
so a person can stop behind any node and look.

* :class:`Window`: this data-parallel rank's part of up to ``balance_window_size`` rounds that are planned together.
* :class:`MicroBatch`: what one forward/backward consumes on one rank.

The values inside them (:class:`SampleKey`, :class:`SampleMetadata`, :class:`WorkloadCost`, :class:`PackingPlan`,
:class:`PlanReport`, :class:`BalanceReport`) are plain data. This module imports neither torch.distributed nor
torchdata.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Assignment",
    "BalanceReport",
    "MicroBatch",
    "PackingPlan",
    "PlanReport",
    "SampleKey",
    "SampleMetadata",
    "TensorFieldSpec",
    "Window",
    "WorkloadCost",
]


class SampleKey(NamedTuple):
    """Which sample this is. Keys are unique within an epoch and ordered as the sampler chose the samples.

    ``position`` is the occurrence position: the record's place in the epoch's global order, unique even when an index
    repeats. ``index`` is the record's dataset index. ``part`` numbers the sequences of a split record; 0 for a whole
    one.
    """

    position: int
    index: int  # type: ignore[assignment]  # tuple.index is not needed here
    part: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadCost:
    """What one sample costs, by where the time is spent. Any unit, the same for all samples; ``llm`` is what is
    balanced.

    Raises:
        ValueError: a component is negative, infinite or NaN.
    """

    io: float = 0.0
    transform: float = 0.0
    encoder: float = 0.0
    llm: float = 0.0
    memory: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            try:
                fine = math.isfinite(value) and value >= 0
            except TypeError:  # no number
                fine = False
            if not fine:
                raise ValueError(f"cost component {name!r} is {value!r}; accepted: a finite number >= 0")


_NO_COST = WorkloadCost()


@dataclass(frozen=True, slots=True)
class SampleMetadata:
    """What planning needs to know of a sample.

    Args:
        pack_tokens: tokens the packer will place, special tokens included; at least 1.
        cost: what the sample costs, when no cost model computes it.
        features: named numbers that a cost model or a balancing algorithm may read.
        packing_costs: what the sample takes of each named packing budget; finite, at least 0.
        sample_id: anything that helps a person find the sample; it does not leave the rank.

    Raises:
        ValueError: ``pack_tokens`` or a packing cost is out of range.
    """

    pack_tokens: int
    cost: WorkloadCost = _NO_COST
    features: Mapping[str, float] = field(default_factory=dict)
    packing_costs: Mapping[str, float] = field(default_factory=dict)
    sample_id: Any = None

    def __post_init__(self) -> None:
        tokens = self.pack_tokens
        if type(tokens) is not int and (isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer))):
            raise ValueError(f"pack_tokens is {tokens!r}; accepted: an int >= 1")
        if tokens < 1:
            raise ValueError(f"pack_tokens is {tokens!r}; accepted: an int >= 1")
        for name, value in self.packing_costs.items():
            try:
                fine = math.isfinite(value) and value >= 0
            except TypeError:  # no number
                fine = False
            if not fine:
                raise ValueError(f"packing cost {name!r} is {value!r}; accepted: a finite number >= 0")


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan did to one window, or (summed) to a step. Arrays have one row a data-parallel rank, one column a
    round.

    ``before``, ``after`` and ``lower_bound`` are values of the objective, in the unit of the costs and computed from
    the same quantised costs. ``gain`` is ``1 - after / before`` of the plan that was found, even when it was not used.
    Without a reference ``before``, ``gain`` and the ``*_before`` arrays are None.
    """

    objective: str
    before: float | None
    after: float
    lower_bound: float
    gain: float | None
    threshold: float
    accepted: bool
    seconds: float
    costs_before: NDArray[np.float64] | None
    costs_after: NDArray[np.float64]
    tokens_before: NDArray[np.int64] | None
    tokens_after: NDArray[np.int64]
    samples_before: NDArray[np.int64] | None
    samples_after: NDArray[np.int64]
    padding: int
    """Tokens of padding over all bins; with the same bins and tokens it is the same before and after."""
    work: float = 0.0
    """Cost that any plan must carry, over all ranks, without initial loads."""
    largest_sample: float = 0.0
    """The cost of the most expensive sample."""
    note: str = ""
    """What limits the plan, when that can be told: for example one sample that outweighs a rank's fair share."""

    def _repr_html_(self) -> str:
        from hp_nodes.display import plan_report_html

        return plan_report_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from hp_nodes.display import one_line

        printer.text(one_line(self))


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Which bin each sample of a window goes to, over all ranks.

    ``bins`` is int32[N], ``bin = (rank * num_rounds + round) * local_batch_size + slot``; ``oversized`` is
    bool[ranks * rounds * slots], True where a bin holds one sample longer than ``seq_len``.
    """

    bins: NDArray[np.int32]
    oversized: NDArray[np.bool_]
    report: PlanReport

    def _repr_html_(self) -> str:
        from hp_nodes.display import plan_html

        return plan_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from hp_nodes.display import one_line

        printer.text(one_line(self))


@dataclass(frozen=True, slots=True)
class BalanceReport:
    """The plan of a window and what carrying it out took; the one on a micro-batch that ends a step is the step's.

    ``samples_sent``/``samples_received`` and ``bytes_sent``/``bytes_received`` are this rank's. ``skipped`` counts the
    records replaced because they could not be read, ``dropped`` the samples at the epoch's end that fill no step.
    """

    plan: PlanReport
    samples_sent: int = 0
    samples_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    skipped: int = 0
    dropped: int = 0
    plan_digest: int | None = None
    """Of the bins of the window planned last: equal on all ranks that carry out the same plan."""

    def _repr_html_(self) -> str:
        from hp_nodes.display import report_html

        return report_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from hp_nodes.display import one_line

        printer.text(one_line(self))


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the plan of a window means for one rank: the samples it is given, in packing order, and where its own go."""

    positions: NDArray[np.int64]
    """int64[m]: occurrence position of each sample given to this rank."""
    parts: NDArray[np.int32]
    """int32[m]: which sequence of its record."""
    indices: NDArray[np.int64] | None
    """int64[m]: dataset index; None where samples were read before planning (it then travels with them)."""
    bins: NDArray[np.int32]
    """int32[m]: local bin, ``round * local_batch_size + slot``; ascending."""
    tokens: NDArray[np.int64]
    costs: NDArray[np.float64]
    origins: NDArray[np.int32]
    """int32[m]: data rank that holds each sample now."""
    targets: NDArray[np.int32]
    """int32[n]: data rank that each sample of this rank's own window goes to."""
    moves: bool
    """Whether any sample of any rank changes rank; the same on all."""
    peers: int
    """No rank sends samples to more ranks than this, nor receives from more; the same on all."""


@dataclass(frozen=True, slots=True)
class Window:
    """This rank's part of the rounds that are planned together. Nodes fill the fields below the line as it passes.

    Until the plan is carried out, ``keys`` and the fields of the same length describe the samples that this rank's
    sampler chose; after the Router (or a SampleReader behind the Planner) those that the plan gave it, in packing
    order.
    """

    epoch: int
    step: int
    first_round: int
    num_rounds: int
    ends_step: bool
    ends_epoch: bool
    keys: tuple[SampleKey, ...]
    # ---- filled on the way
    reference: NDArray[np.int32] | None = None
    """int32[n]: local bin (``round * local_batch_size + slot``) of each sample unbalanced. By WindowSampler."""
    samples: tuple[Any, ...] | None = None
    """One record, or one sequence of a split record, for each key. By SampleReader; Splitter; Router."""
    metadata: tuple[SampleMetadata, ...] | None = None
    """For the samples this rank's sampler chose. By MetadataDeriver."""
    tokens: NDArray[np.int64] | None = None
    """int64[n]: ``pack_tokens`` of each. By MetadataDeriver."""
    costs: NDArray[np.float64] | None = None
    """float64[n]: the ``llm`` cost of each. By MetadataDeriver."""
    plan: PackingPlan | None = None
    """Over all ranks. By Planner."""
    assignment: Assignment | None = None
    """The plan, as seen from this rank. By Planner."""
    bins: NDArray[np.int32] | None = None
    """int32[n]: the planned local bin of each sample, ascending. By Router, or SampleReader behind the Planner."""
    packed: tuple[tuple[Any, ...], ...] | None = None
    """``packed[round][slot]`` is one packed bin. By Packer."""
    report: BalanceReport | None = None
    """By Planner; Router adds what moved."""
    dropped: int = 0
    """Samples at the epoch's end that fill no step; on the epoch's last window. By WindowSampler."""
    skipped: int = 0
    """Records of this rank that could not be read and were replaced. By SampleReader before the Planner."""

    def carried_out(
        self, keys: tuple[SampleKey, ...], samples: tuple[Any, ...], report: BalanceReport | None
    ) -> Window:
        """The window behind its plan: the samples that the assignment gives this rank, in packing order."""
        assert self.assignment is not None
        share = self.assignment
        return replace(
            self,
            keys=keys,
            samples=samples,
            bins=share.bins,
            tokens=share.tokens,
            costs=share.costs,
            metadata=None,
            reference=None,
            report=report,
        )

    def take(self, places: Sequence[int]) -> Window:
        """The window with only the samples at ``places``, in that order: for nodes that filter or reorder."""
        chosen = np.asarray(places, dtype=np.intp)
        changed: dict[str, Any] = {}
        for name in ("keys", "samples", "metadata"):
            values = getattr(self, name)
            if values is not None:
                changed[name] = tuple(values[place] for place in chosen.tolist())
        for name in ("reference", "tokens", "costs", "bins"):
            values = getattr(self, name)
            if values is not None:
                changed[name] = values[chosen]
        return replace(self, **changed)

    def _repr_html_(self) -> str:
        from hp_nodes.display import window_html

        return window_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from hp_nodes.display import one_line

        printer.text(one_line(self))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of this rank and where it stands. ``data`` is what the training loop gets.

    ``num_tokens`` counts tokens without padding and ``num_label_tokens`` those with a label, when the batch tells.
    ``positions`` (occurrence positions of the records inside) and ``report`` are None on model peers.
    """

    data: Any
    epoch: int
    step: int
    round: int
    ends_window: bool
    ends_step: bool
    ends_epoch: bool
    positions: tuple[int, ...] | None = None
    num_tokens: int | None = None
    num_label_tokens: int | None = None
    report: BalanceReport | None = None

    def _repr_html_(self) -> str:
        from hp_nodes.display import micro_batch_html

        return micro_batch_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from hp_nodes.display import one_line

        printer.text(one_line(self))


@dataclass(frozen=True, slots=True)
class TensorFieldSpec:
    """What one tensor of a micro-batch looks like, so that neither its name nor its layout has to be sent.

    Args:
        shape: its sizes, outermost first; None is a size that may change from one micro-batch to the next.
        dtype: a ``torch.dtype``.
        device: ``"cpu"``: it stays on the host; None: it is where the micro-batch is.

    Raises:
        ValueError: a size is neither None nor an int >= 0, or ``device`` is something else.
    """

    shape: tuple[int | None, ...]
    dtype: Any
    device: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shape, (tuple, list)) or not all(_is_size(size) for size in self.shape):
            raise ValueError(
                f"shape is {self.shape!r}; accepted: a tuple of ints >= 0, None for a size that may change"
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.device not in (None, "cpu"):
            raise ValueError(f"device is {self.device!r}; accepted: None (where the micro-batch is) or 'cpu'")


def _is_size(size: Any) -> bool:
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
