"""Checkpoint: lets the graph's state move only at optimizer-step boundaries.

Takes micro-batches, gives the same ones. Its state is the one its source had right after the last micro-batch of a
step; between boundaries it stays there, so an unfinished step is replayed in full. Adds no entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.nodes.stage import Stage
from hp_nodes.types import MicroBatch

__all__ = ["StepCheckpointer"]


class StepCheckpointer(Stage[MicroBatch]):
    """The source's micro-batches, with state that moves step by step.

    Args:
        source: gives micro-batches.
    """

    def __init__(self, source: BaseNode[MicroBatch], *, name: str | None = None) -> None:
        super().__init__(source, name=name)
        self._boundary: dict[str, Any] | None = None

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        super().restore_own(entry)
        self._boundary = super().source_state()

    def source_state(self) -> dict[str, Any]:
        assert self._boundary is not None
        return dict(self._boundary)

    def next(self) -> MicroBatch:
        batch: MicroBatch = self.pull()
        if batch.ends_step:
            self._boundary = super().source_state()
        return self.give(batch)
