"""Host prefetch: builds whole windows ahead, and releases one only when every rank has built it.

Takes micro-batches, gives the same ones. Communicates: the closing status of each window, after every round is read,
packed and collated, and a digest of the plan that was carried out. So an error in any node on one rank, user nodes
included, is one error on every rank at the same micro-batch, and so are different plans where nothing was exchanged
that would have shown it. Above a reader of external steps the closing is the next window's opening too. Pairs each
buffered micro-batch with the state its source had right after it. Adds an entry of its own only once records of the
epoch could not be read: how many, over all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, some_of
from hp_nodes.nodes.external_step_reader import ExternalStepReader
from hp_nodes.nodes.graph import all_nodes, read_state
from hp_nodes.nodes.planner import Planner
from hp_nodes.nodes.run_ahead import RunAhead, again, is_interruption
from hp_nodes.nodes.skip_count import SkipCount, skip_limit
from hp_nodes.nodes.stage import Edge, Stage
from hp_nodes.transport import Transport
from hp_nodes.transport.agreement import own_failure
from hp_nodes.transport.handed_over import launched_by_consumer
from hp_nodes.transport.opening import Status, check_statuses
from hp_nodes.types import MicroBatch

__all__ = ["HostPrefetcher", "announce"]

_GRACE_S = 3.0
_CLOSING_FIELDS = 4  # status, who planned together, digest of the plan, records skipped
Unit = list[tuple[MicroBatch, dict[str, Any]]]


class HostPrefetcher(Stage[MicroBatch]):
    """The source's micro-batches, whole windows at a time.

    Args:
        source: gives micro-batches.
        transport: of the data-parallel group, the one the nodes below use.
        depth: windows built beyond the one being delivered, in a background thread; 0 builds on demand.

    Raises:
        ValueError: ``depth`` is no int >= 0.
        DataPlaneError: (on ``next``) something failed on any rank.
    """

    EPOCH_KEY = "epoch"
    SKIPPED_KEY = "skipped"
    communicates = True

    def __init__(
        self, source: BaseNode[MicroBatch], transport: Transport, depth: int = 1, *, name: str | None = None
    ) -> None:
        super().__init__(source, name=name)
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"{self.name}: depth is {depth!r}; accepted: an int >= 0 (windows)")
        self.transport = transport
        self.depth = depth
        self.clock = transport.clock
        self._handed_over = launched_by_consumer(transport)
        self._unit: deque[tuple[MicroBatch, dict[str, Any]]] = deque()
        self._delivered = 0
        """Windows of which a micro-batch was delivered since the last reset."""
        self._state: dict[str, Any] | None = None
        self._ahead: RunAhead[Unit] | None = None
        self._end: BaseException | None = None
        assert self.edge is not None
        self._pull = _WindowPull(
            self.edge, self.name, transport, _planned_with(source, transport), SkipCount(self.name, skip_limit(source))
        )

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        untold = _announced(self)
        if untold is not None and self.transport.size > 1:  # the others hear of it before this rank goes elsewhere
            self._announce_close(untold, self.transport.timeout_s)
        self._stop()
        super().reset(initial_state)

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        skipped = self._pull.skipped
        skipped.restore((0, 0) if entry is None else (int(entry[self.EPOCH_KEY]), int(entry[self.SKIPPED_KEY])))
        self._unit.clear()
        self._delivered = 0
        self._end = None
        self._state = skipped.added_to(super().source_state())

    def source_state(self) -> dict[str, Any]:
        assert self._state is not None
        return dict(self._state)

    @property
    def own_thread(self) -> bool:
        return self.depth > 0

    def buffered(self) -> int:
        """Windows built ahead, the one that is being delivered included."""
        return bool(self._unit) + (0 if self._ahead is None else self._ahead.ready())

    def next(self) -> MicroBatch:
        if not self._unit:
            self._unit.extend(self._next_window())
            self._delivered += 1
            self._launch_ahead("planned")
        batch, self._state = self._unit.popleft()
        if not self._unit:
            self._launch_ahead("closed")
        return self.give(batch)

    def _launch_ahead(self, mark: str) -> None:
        """With the first micro-batch of a window, the plan of one ``depth`` later; with the last, its exchange."""
        if self._ahead is not None and self._handed_over is not None:
            self._handed_over.launch_through(mark, self._delivered + self.depth)

    def close(self, error: BaseException | None = None) -> None:
        """Stop the thread: at the agreed place, or, because of an error, after telling the other ranks of it."""
        told = isinstance(self._end, (DataPlaneError, StopIteration))
        if error is not None and self.transport.size > 1 and not told:
            self._announce_close(error, _GRACE_S)
        self._stop()

    def _announce_close(self, error: BaseException, within_s: float) -> None:
        """Answer the next opening with "closed", or the error that the others do not know of yet, for some time."""
        announce(self, Status.CLOSED if not isinstance(error, DataPlaneError) else error)
        if self._ahead is None:
            self._ahead = self._run_ahead()
        self._ahead.run_on(within_s)
        announce(self, None)

    def _stop(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.finish(self.transport.timeout_s)

    def _run_ahead(self) -> RunAhead[Unit]:
        self.clock.in_background()
        wake = self.transport.interrupt
        return RunAhead(self._pull, self.depth, self.clock, self.name, wake, self._handed_over, self.times)

    def _next_window(self) -> Unit:
        if self._end is not None:
            raise again(self._end)
        try:
            if self.depth == 0:
                return self._pull()
            if self._ahead is None:
                self._ahead = self._run_ahead()
            return self._ahead.take()
        except BaseException as error:
            if not is_interruption(error):
                self._end = error
            elif self.depth == 0:
                self._end = RuntimeError(
                    f"{self.name} was interrupted while it built a window; go on with load_state_dict or set_epoch on "
                    "every rank, or build a new loader"
                )
            raise


def announce(graph: BaseNode[Any], what: DataPlaneError | Status | None) -> None:
    """Let the next opening below ``graph``, that of its lowest node which has one, bring this instead of a window."""
    for node in all_nodes(graph):
        if hasattr(node, "announcement"):
            node.announcement = what
            return


def _announced(graph: BaseNode[Any]) -> DataPlaneError | None:
    """The error that still waits for the next opening below ``graph``."""
    waiting = next((node.announcement for node in all_nodes(graph) if hasattr(node, "announcement")), None)
    return waiting if isinstance(waiting, DataPlaneError) else None


class _WindowPull:
    """Pulls one window's micro-batches and closes it with the other ranks. Knows the source, not the prefetcher."""

    def __init__(self, edge: Edge, name: str, transport: Transport, planned_with: int, skipped: SkipCount) -> None:
        self.skipped = skipped
        self._planned_with = planned_with
        self._edge = edge
        self._name = name
        self._transport = transport
        readers = (node for node in all_nodes(edge.source) if isinstance(node, ExternalStepReader))
        self._opened_ahead = next((r for r in readers if r.transport.global_ranks == transport.global_ranks), None)

    def __call__(self) -> Unit:
        unit: Unit = []
        status, error = Status.WINDOW, None
        try:
            while not unit or not unit[-1][0].ends_window:
                unit.append((self._edge.pull(), read_state(self._edge.source)))
        except StopIteration:
            status = Status.END
        except BaseException as failure:
            if (isinstance(failure, DataPlaneError) and failure.agreed) or is_interruption(failure):
                raise
            status, error = (
                Status.ERROR,
                own_failure(self._transport, failure, self._name, unit[-1][0] if unit else None),
            )
        told = self._close(status, error, unit)
        if status is Status.END:
            raise StopIteration
        self._transport.mark("closed")
        return self.skipped.counted(unit, told, self._transport)

    def _close(self, status: Status, error: DataPlaneError | None, unit: Unit) -> NDArray[np.int64]:
        """Exchange closings; returns how many records each rank has skipped, by what its last report says."""
        report = unit[-1][0].report if unit and status is Status.WINDOW else None
        digest = None if report is None else report.plan_digest
        planned_with = -1 if digest is None else self._planned_with
        mine = np.array([status, planned_with, digest or 0, 0 if report is None else report.skipped], dtype=np.int64)
        mine = np.concatenate([mine, self._next_opening(status)])
        located = exchanging(self._name, unit[0][0].epoch, unit[0][0].step) if unit else exchanging(self._name)
        with located:
            told = self._transport.all_gather(mine.view(np.uint8), f"{self._name}: closing").view(np.int64)
            check_statuses(self._transport, told[:, 0], error, self._name)
            self._check_plans(told[:, 1:3])
        if self._opened_ahead is not None and status is Status.WINDOW:
            self._opened_ahead.hear_opening(told[:, _CLOSING_FIELDS:])
        return told[:, 3]

    def _next_opening(self, status: Status) -> NDArray[np.int64]:
        """What this rank brings to the window after this one, where its source makes the ranks agree on that."""
        if self._opened_ahead is None:
            return np.zeros(0, dtype=np.int64)
        if status is not Status.WINDOW:
            return np.zeros(ExternalStepReader.OPENING_FIELDS, dtype=np.int64)
        return self._opened_ahead.next_opening()

    def _check_plans(self, told: NDArray[np.int64]) -> None:
        """Of each rank, who planned with it and the digest; a rank whose graph has lost its reports says nothing."""
        speaking = np.flatnonzero(told[:, 0] >= 0)
        _, first, group = np.unique(told[speaking, 0], return_index=True, return_inverse=True)
        leading = speaking[first][group]
        different = np.flatnonzero(told[speaking, 1] != told[leading, 1])
        if len(different):
            ranks = self._transport.global_ranks
            apart_from_them, other = [ranks[place] for place in speaking[different]], ranks[leading[different[0]]]
            apart = DataPlaneError(
                f"ranks {some_of(apart_from_them)} have another plan than rank {other}",
                rank=apart_from_them[0],
                node=self._name,
            )
            apart.agreed = True
            raise apart


def _planned_with(source: BaseNode[Any], transport: Transport) -> int:
    """The first rank of the group that plans together, which may be a part of the ranks that close together."""
    planners = [node for node in all_nodes(source) if isinstance(node, Planner)]
    group = planners[-1].transport if planners else transport
    return group.global_ranks[0]
