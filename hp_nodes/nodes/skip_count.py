"""How many records of an epoch could not be read, over all ranks: the same number on each, from each closing exchange.

Takes the micro-batches of a window and what each rank said of it, gives the same micro-batches with the total in their
reports. Promises one error on all ranks, at the same window, once an epoch has more of them than are allowed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError
from hp_nodes.nodes.graph import all_nodes
from hp_nodes.nodes.sample_reader import SampleReader
from hp_nodes.transport import Transport
from hp_nodes.types import MicroBatch

__all__ = ["SkipCount", "skip_limit"]

Unit = list[tuple[MicroBatch, dict[str, Any]]]


def skip_limit(source: BaseNode[Any]) -> int:
    """The ``max_skipped`` of the graph's reader; 0 where there is none that skips."""
    readers = [node for node in all_nodes(source) if isinstance(node, SampleReader) and node.on_error == "skip"]
    return readers[-1].max_skipped if readers else 0


class SkipCount:
    """Counts for one epoch at a time.

    Args:
        node: name of the node whose entry in the state the count is.
        limit: records of an epoch that may be skipped.
    """

    def __init__(self, node: str, limit: int) -> None:
        self._node = node
        self._limit = limit
        self._epoch = 0
        self._total = 0
        self._step: tuple[int, int] | None = None
        self._of_step = 0
        """Of windows of the step that do not end it: the report of the one that does speaks of the whole step."""

    def restore(self, entry: tuple[int, int]) -> None:
        """Go on from ``(epoch, skipped)``."""
        self._epoch, self._total = entry
        self._step, self._of_step = None, 0

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with the entry, when there is something to say."""
        if self._total:
            return {**state, self._node: {"epoch": self._epoch, "skipped": self._total}}
        return state

    def counted(self, unit: Unit, told: NDArray[np.int64], transport: Transport) -> Unit:
        """The window's micro-batches with the total of all ranks in their reports, and the count in their state.

        Args:
            told: int64[ranks], what the report of the window's last micro-batch says on each.

        Raises:
            DataPlaneError: these are too many; on all ranks, which have the same numbers.
        """
        first = unit[0][0]
        if first.epoch != self._epoch:
            self._epoch, self._total = first.epoch, 0
        if self._step != (first.epoch, first.step):
            self._step, self._of_step = (first.epoch, first.step), 0
        ends_step = unit[-1][0].ends_step
        of_step = int(told.sum()) + (0 if ends_step else self._of_step)
        of_window = of_step - self._of_step
        self._of_step = of_step
        if not of_window and not self._total and not of_step:
            return unit
        earlier = [(batch, self.added_to(state)) for batch, state in unit[:-1]]
        self._total += of_window
        if self._total > self._limit:
            raise self._too_many(first, told, transport)
        last, state = unit[-1]
        closed = [*earlier, (last, self.added_to(state))]
        return [(_telling(batch, of_step if batch.ends_step else of_window), state) for batch, state in closed]

    def _too_many(self, batch: MicroBatch, told: NDArray[np.int64], transport: Transport) -> DataPlaneError:
        ranks = {transport.global_ranks[place]: int(told[place]) for place in np.flatnonzero(told).tolist()}
        error = DataPlaneError(
            f"{self._total} records of epoch {batch.epoch} could not be read; accepted: max_skipped={self._limit} (the "
            f"last of them by rank: {ranks})",
            node=self._node,
            epoch=batch.epoch,
            step=batch.step,
        )
        error.agreed = True
        return error


def _telling(batch: MicroBatch, skipped: int) -> MicroBatch:
    return batch if batch.report is None else replace(batch, report=replace(batch.report, skipped=skipped))
