"""Device prefetch: holds future micro-batches ready, in a thread of its own.

Takes micro-batches, gives the same ones. On the CPU they stay where they are. Pairs each staged micro-batch with the
state its source had right after it; adds no entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import all_nodes, read_state
from hp_nodes.nodes.run_ahead import RunAhead, again, is_interruption
from hp_nodes.nodes.stage import Edge, Stage
from hp_nodes.transport import ConsumerClock
from hp_nodes.types import MicroBatch

__all__ = ["DevicePrefetcher"]

_FINISH_S = 300.0
Staged = tuple[MicroBatch, dict[str, Any]]


class DevicePrefetcher(Stage[MicroBatch]):
    """The source's micro-batches, ``depth`` of them staged ahead.

    Args:
        source: gives micro-batches.
        device: where they are wanted. TODO(device-copy): only the CPU so far.
        depth: micro-batches staged beyond the one delivered last; 0 stages on demand.

    Raises:
        ValueError: ``depth`` is no int >= 0, or the device is not the CPU.
    """

    def __init__(
        self,
        source: BaseNode[MicroBatch],
        device: torch.device | str = "cpu",
        depth: int = 1,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"{self.name}: depth is {depth!r}; accepted: an int >= 0 (micro-batches)")
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise ValueError(
                f"{self.name}: device is {device!r}; staging to a device comes later, accepted so far: 'cpu'"
            )
        self.depth = depth
        clocks = [
            clock for node in all_nodes(source) if isinstance(clock := getattr(node, "clock", None), ConsumerClock)
        ]
        self.clock = clocks[-1] if clocks else ConsumerClock()
        self._ahead: RunAhead[Staged] | None = None
        self._state: dict[str, Any] | None = None
        self._end: BaseException | None = None
        assert self.edge is not None
        self._stage = _Staging(self.edge)

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        self.close()
        super().reset(initial_state)

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        super().restore_own(entry)
        self._end = None
        self._state = super().source_state()

    def source_state(self) -> dict[str, Any]:
        assert self._state is not None
        return dict(self._state)

    @property
    def own_thread(self) -> bool:
        return self.depth > 0

    def buffered(self) -> int:
        return 0 if self._ahead is None else self._ahead.ready()

    def next(self) -> MicroBatch:
        if self._end is not None:
            raise again(self._end)
        try:
            if self.depth == 0:
                batch, self._state = self._stage()
            else:
                if self._ahead is None:
                    self.clock.in_background()
                    self._ahead = RunAhead(self._stage, self.depth, self.clock, self.name, times=self.times)
                batch, self._state = self._ahead.take()
        except BaseException as error:
            if not is_interruption(error):
                self._end = error
            raise
        return self.give(batch)

    def close(self, error: BaseException | None = None) -> None:
        """Stop the thread at the place that follows from what was delivered."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.finish(_FINISH_S)


class _Staging:
    """Stages the next micro-batch. Knows the source, not the prefetcher."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def __call__(self) -> Staged:
        return self._edge.pull(), read_state(self._edge.source)
