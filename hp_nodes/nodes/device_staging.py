"""Staging a batch to a device: one buffer, one transfer, one event, and nobody waits on the host.

Takes a batch on the host, gives the same batch on the device: containers, named tuples, dtypes and everything that is
no tensor preserved. Its tensors are written into one pinned host buffer of a ring that is reused, copied in one
transfer on a side stream, and are views of one device buffer. Tensors that are pinned and large already are copied
from where they are. The consumer's stream waits for the batch's event, the host for nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from hp_nodes.nodes.accelerator import Accelerator

__all__ = ["DeviceStaging", "StagedBatch"]

_ALIGNMENT = 256
_DIRECT_NBYTES = 1 << 20
"""A pinned tensor of at least this size is copied from where it is."""
_SLOT_WAIT_S = 0.0005


class StagedBatch:
    """A batch whose copy is queued.

    Attributes:
        data: the batch, its tensors on the device; not valid before :meth:`deliver`.
    """

    def __init__(self, data: Any, event: Any, buffers: list[torch.Tensor], accelerator: Accelerator) -> None:
        self.data = data
        self._event = event
        self._buffers = buffers
        self._accelerator = accelerator

    def deliver(self) -> Any:
        """The batch, for use on the calling thread's current stream from here on."""
        stream = self._accelerator.current_stream()
        self._accelerator.wait(stream, self._event)
        for buffer in self._buffers:
            self._accelerator.hand_over(buffer, stream)
        return self.data


class _Slot:
    """A pinned buffer, what else a batch was copied from, and the event behind its copies."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.sources: list[torch.Tensor] = []
        self.event: Any = None


class DeviceStaging:
    """Stages batches, one after the other, from one thread.

    Args:
        accelerator: the device.
        slots: pinned buffers in the ring: batches whose copy may be under way at the same time.
        cpu_fields: names of mapping entries (or fields) that stay on the host.
    """

    def __init__(self, accelerator: Accelerator, slots: int, cpu_fields: Collection[str] = ()) -> None:
        self._accelerator = accelerator
        self._cpu_fields = frozenset(cpu_fields)
        self._ring = [_Slot() for _ in range(max(1, slots))]
        self._next = 0
        self._stream: Any = None

    @property
    def pinned_nbytes(self) -> int:
        """Page-locked memory held."""
        return sum(slot.buffer.numel() for slot in self._ring if slot.buffer is not None)

    def stage(self, data: Any) -> StagedBatch:
        """Queue the copy of ``data``; returns before it is done."""
        self._accelerator.set_device()  # of the thread that stages, which may have changed
        if self._stream is None:
            self._stream = self._accelerator.new_stream()
        tensors: list[torch.Tensor] = []

        def seen(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        self._rebuilt(data, seen, lambda value: value)
        direct = [tensor for tensor in tensors if self._copied_directly(tensor)]
        large = {id(tensor) for tensor in direct}
        packed = [tensor for tensor in tensors if id(tensor) not in large]
        slot = self._free_slot() if tensors else None
        device_buffer, places = (None, []) if slot is None or not packed else self._transfer(packed, slot)
        buffers = [] if device_buffer is None else [device_buffer]
        position = iter(places)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in large:
                target = self._accelerator.empty(tensor.nbytes, self._stream).view(tensor.dtype).view(tensor.shape)
                self._accelerator.copy(target, tensor, self._stream)
                buffers.append(target)
                return target
            start = next(position)
            assert device_buffer is not None
            return device_buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        result = self._rebuilt(data, moved, lambda value: self._accelerator.move(value, self._stream))
        event = self._accelerator.record(self._stream)
        if slot is not None:
            # Pinned memory that torch did not allocate itself is not kept by torch until it has been read.
            slot.event, slot.sources = event, direct
        return StagedBatch(result, event, buffers, self._accelerator)

    def close(self) -> None:
        """Give back pinned memory and the stream, once the copies out of it are done."""
        for slot in self._ring:
            self._wait_for(slot)
            slot.buffer = None
        self._stream = None

    def _copied_directly(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= _DIRECT_NBYTES and tensor.is_contiguous() and self._accelerator.is_pinned(tensor)

    def _free_slot(self) -> _Slot:
        """The next of the ring, once nothing is copied out of it any more."""
        slot = self._ring[self._next]
        self._wait_for(slot)
        self._next = (self._next + 1) % len(self._ring)
        return slot

    def _transfer(self, tensors: list[torch.Tensor], slot: _Slot) -> tuple[torch.Tensor, list[int]]:
        """Write tensors into the slot's pinned buffer and queue its copy: the device buffer, and where each starts."""
        places, end = [], 0
        for tensor in tensors:
            places.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if slot.buffer is None or slot.buffer.numel() < end:
            slot.buffer = self._accelerator.pinned(max(end, _ALIGNMENT))
        for tensor, start in zip(tensors, places, strict=True):
            if tensor.nbytes:
                flat = slot.buffer[start : start + tensor.nbytes]
                flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        device_buffer = self._accelerator.empty(max(end, _ALIGNMENT), self._stream)
        self._accelerator.copy(device_buffer[:end], slot.buffer[:end], self._stream)
        return device_buffer, places

    def _wait_for(self, slot: _Slot) -> None:
        """Until the copy out of it is done. Polled: to wait on an event would count as a host synchronisation."""
        while slot.event is not None and not self._accelerator.done(slot.event):
            time.sleep(_SLOT_WAIT_S)
        slot.event, slot.sources = None, []

    def _rebuilt(self, value: Any, tensor_fn: Callable[[Any], Any], movable_fn: Callable[[Any], Any]) -> Any:
        """``value`` with its tensors, and what else can be moved, replaced; fields that stay are left alone.

        No function in here refers to itself: device memory must be free when its last user lets go of it, not when
        Python looks for cycles.
        """
        stays = self._cpu_fields

        def rebuilt(item: Any) -> Any:
            return self._rebuilt(item, tensor_fn, movable_fn)

        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
                return tensor_fn(value)
            return movable_fn(value)
        if isinstance(value, Mapping):
            pairs = {key: entry if key in stays else rebuilt(entry) for key, entry in value.items()}
            return pairs if type(value) is dict else _like(value, pairs)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            named = zip(value._fields, value, strict=True)
            return type(value)(*(entry if name in stays else rebuilt(entry) for name, entry in named))
        if type(value) in (list, tuple):
            return type(value)(rebuilt(entry) for entry in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            changed = {name: rebuilt(getattr(value, name)) for name in names if name not in stays}
            return dataclasses.replace(value, **changed)
        movable = callable(getattr(value, "to", None)) and not isinstance(value, type)
        return movable_fn(value) if movable else value


def _like(item: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    try:
        return type(item)(pairs)  # type: ignore[call-arg]
    except TypeError:
        return pairs
