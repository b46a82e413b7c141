"""Device prefetch: holds future micro-batches ready on the device, staged by a thread of its own.

Takes micro-batches, gives the same ones with their tensors on the device; on the CPU they stay where they are. Pairs
each staged micro-batch with the state its source had right after it; adds no entry of its own. A copy that fails raises
when its micro-batch is delivered.

Where the exchanges below must be launched by the consuming thread, nothing runs in a thread of its own: the consumer
stages ahead itself, which costs it the queueing of a copy and no wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.accelerator import Accelerator, open_accelerator
from hp_nodes.nodes.device_staging import DeviceStaging, StagedBatch
from hp_nodes.nodes.graph import all_nodes, read_state
from hp_nodes.nodes.run_ahead import RunAhead, again, is_interruption
from hp_nodes.nodes.stage import Edge, Stage
from hp_nodes.transport import ConsumerClock
from hp_nodes.transport.handed_over import launched_by_consumer
from hp_nodes.types import MicroBatch

__all__ = ["DevicePrefetcher"]

_FINISH_S = 300.0
_SPARE_SLOTS = 2
Staged = tuple[MicroBatch, dict[str, Any]]


class DevicePrefetcher(Stage[MicroBatch]):
    """The source's micro-batches, ``depth`` of them staged ahead.

    Args:
        source: gives micro-batches.
        device: where they are wanted: "cpu", "cuda", "npu", with or without an index.
        depth: micro-batches staged beyond the one delivered last; 0 stages on demand.
        cpu_fields: names of mapping entries and fields of a batch that stay on the host.
        accelerator: stands for ``device``; default: torch's.

    Raises:
        ValueError: ``depth`` is no int >= 0, or the device is of another type.
        ImportError, RuntimeError: the device's package, or the device, is not here.
    """

    def __init__(
        self,
        source: BaseNode[MicroBatch],
        device: torch.device | str = "cpu",
        depth: int = 1,
        *,
        cpu_fields: Collection[str] = (),
        accelerator: Accelerator | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise ValueError(f"{self.name}: depth is {depth!r}; accepted: an int >= 0 (micro-batches)")
        if accelerator is None and torch.device(device).type != "cpu":
            accelerator = open_accelerator(device)
        self.device = torch.device(device) if accelerator is None else accelerator.device
        self.depth = depth
        self.cpu_fields = tuple(cpu_fields)
        clocks = [
            clock for node in all_nodes(source) if isinstance(clock := getattr(node, "clock", None), ConsumerClock)
        ]
        self.clock = clocks[-1] if clocks else ConsumerClock()
        self._ahead: RunAhead[Staged] | None = None
        self._state: dict[str, Any] | None = None
        self._end: BaseException | None = None
        self._source_end: BaseException | None = None
        self._staged: deque[Staged] = deque()
        self._inline = any(
            launched_by_consumer(node.transport) is not None for node in all_nodes(source) if hasattr(node, "transport")
        )
        assert self.edge is not None
        staging = None if accelerator is None else DeviceStaging(accelerator, depth + _SPARE_SLOTS, cpu_fields)
        self._stage = _Staging(self.edge, staging, self.name)

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
        return self.depth > 0 and not self._inline

    def buffered(self) -> int:
        return len(self._staged) if self._ahead is None else self._ahead.ready()

    def next(self) -> MicroBatch:
        if self._end is not None:
            raise again(self._end)
        try:
            if self.depth == 0:
                batch, self._state = self._stage()
            elif self._inline:
                batch, self._state = self._stage_ahead()
            else:
                if self._ahead is None:
                    self.clock.in_background()
                    self._ahead = RunAhead(self._stage, self.depth, self.clock, self.name, times=self.times)
                batch, self._state = self._ahead.take()
        except BaseException as error:
            if not is_interruption(error):
                self._end = error
            raise
        if isinstance(batch.data, StagedBatch):
            batch = replace(batch, data=batch.data.deliver())
        return self.give(batch)

    def _stage_ahead(self) -> Staged:
        """The next micro-batch, with ``depth`` further ones staged behind it; an end waits for its place."""
        while self._source_end is None and len(self._staged) <= self.depth:
            try:
                self._staged.append(self._stage())
            except BaseException as error:
                if is_interruption(error):
                    raise
                self._source_end = error
        if self._staged:
            return self._staged.popleft()
        assert self._source_end is not None
        raise self._source_end

    def close(self, error: BaseException | None = None) -> None:
        """Stop the thread at the place that follows from what was delivered; give back pinned memory."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.finish(_FINISH_S)
        self._staged.clear()
        self._source_end = None
        self._stage.close()


class _Staging:
    """Stages the next micro-batch. Knows the source, not the prefetcher."""

    def __init__(self, edge: Edge, staging: DeviceStaging | None, name: str) -> None:
        self._name = name
        self._edge = edge
        self._staging = staging

    def __call__(self) -> Staged:
        batch: MicroBatch = self._edge.pull()
        state = read_state(self._edge.source)
        if self._staging is not None:
            with failing_at(self._name, epoch=batch.epoch, step=batch.step):
                batch = replace(batch, data=self._staging.stage(batch.data))
        return batch, state

    def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
