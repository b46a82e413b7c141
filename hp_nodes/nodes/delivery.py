"""The wire of model-parallel delivery: a micro-batch as a header, what does not fit it, and one buffer of tensors.

The header has a fixed size, so that a peer can wait for it without knowing what comes. Behind its fields there is room
for the layout, a text (boundary state, or an error), the numbers and the tensors that stay on the host; when they need
more, they follow as a second broadcast. All other tensors are one buffer over a transport of their own: one on the
device, packed there, where that transport carries tensors from device to device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_nodes.nodes.batch_layout import BatchLayout, tensor_bytes, tensor_nbytes, tensor_of
from hp_nodes.transport import TensorTransport, Transport
from hp_nodes.transport.opening import Status
from hp_nodes.types import MicroBatch, TensorFieldSpec

__all__ = ["Arrival", "Delivery", "Message", "header_of"]

_ALIGNMENT = 64
_HEADER_NBYTES = 1024  # an exchange of 1 KiB takes as long as one of 64 bytes, and a state and some sizes fit
_FIELDS_NBYTES = 128
_PLACE = 7  # status, epoch, step, round, flags, tokens, label tokens; then lengths of layout, text, numbers, details
_UNKNOWN = -1

Bytes = NDArray[np.uint8]


def header_of(status: Status, batch: MicroBatch | None = None) -> list[int]:
    """The fields of a header that describe a micro-batch, without its sizes."""
    if batch is None:
        return [status] + [0] * (_PLACE - 1)
    flags = int(batch.ends_window) + 2 * int(batch.ends_step) + 4 * int(batch.ends_epoch)
    counts = [_UNKNOWN if count is None else count for count in (batch.num_tokens, batch.num_label_tokens)]
    return [status, batch.epoch, batch.step, batch.round, flags, *counts]


class Message:
    """What a constructor sends: laid out when it is made, so that nothing fails once peers have heard of it.

    Args:
        place: from :func:`header_of`.
        layout, text: bytes; empty when there is nothing to say.
        tensors, numbers: of the micro-batch.
        fields: of the tensors.
        device: where the tensors are packed that do not stay on the host; None: on the host too.
    """

    def __init__(
        self,
        place: Sequence[int],
        layout: bytes = b"",
        text: bytes = b"",
        tensors: Sequence[Tensor] = (),
        numbers: Sequence[int] = (),
        fields: Sequence[TensorFieldSpec] = (),
        device: torch.device | None = None,
    ) -> None:
        on_host = [tensor for tensor, field in zip(tensors, fields, strict=True) if field.device == "cpu"]
        others = [tensor for tensor, field in zip(tensors, fields, strict=True) if field.device != "cpu"]
        parts = [
            np.frombuffer(layout, dtype=np.uint8),
            np.frombuffer(text, dtype=np.uint8),
            np.array(numbers, dtype=np.int64).view(np.uint8),
            *(tensor_bytes(tensor) for tensor in on_host),
        ]
        details = _joined(parts)
        self.header = np.zeros(_HEADER_NBYTES, dtype=np.uint8)
        sizes = [len(layout), len(text), len(numbers), len(details)]
        fixed = np.array([*place, *sizes], dtype=np.int64).view(np.uint8)
        self.header[: len(fixed)] = fixed
        self.details: Bytes | None = details
        if len(details) <= _HEADER_NBYTES - _FIELDS_NBYTES:
            self.header[_FIELDS_NBYTES : _FIELDS_NBYTES + len(details)] = details
            self.details = None
        self.tensors: Bytes | Tensor = (
            _joined([tensor_bytes(tensor) for tensor in others]) if device is None else _packed(others, device)
        )


@dataclass(slots=True)
class Arrival:
    """What a peer got so far: everything but the tensors, whose sizes follow from it."""

    place: list[int]
    layout: Bytes
    text: Bytes
    numbers: list[int]
    host: Bytes = field(repr=False)
    """Where the tensors that stay on the host are."""

    @property
    def status(self) -> int:
        return self.place[0]

    def micro_batch(self, data: Any) -> MicroBatch:
        _, epoch, step, number, flags, tokens, labels = self.place
        return MicroBatch(
            data=data,
            epoch=epoch,
            step=step,
            round=number,
            ends_window=bool(flags & 1),
            ends_step=bool(flags & 2),
            ends_epoch=bool(flags & 4),
            num_tokens=None if tokens == _UNKNOWN else tokens,
            num_label_tokens=None if labels == _UNKNOWN else labels,
        )


class Delivery:
    """Sends messages from place 0 of a group to all others.

    Args:
        transport: for headers and what follows them.
        tensors: for tensors; may be the same.
        name: of the node, for errors.
    """

    def __init__(self, transport: Transport, tensors: Transport, name: str) -> None:
        self._transport = transport
        self._tensors = tensors
        self.device = tensors.device if isinstance(tensors, TensorTransport) else None
        """Where tensors travel that do not stay on the host; None: on the host too."""
        self._name = name

    def send(self, message: Message) -> None:
        self._transport.broadcast(message.header, 0, f"{self._name}: header")
        if message.details is not None:
            self._transport.broadcast(message.details, 0, f"{self._name}: details")
        self._broadcast_tensors(message.tensors)

    def receive(self) -> Arrival:
        """The next message's header and what follows it."""
        header = np.zeros(_HEADER_NBYTES, dtype=np.uint8)
        self._transport.broadcast(header, 0, f"{self._name}: header")
        fixed = header[: 8 * (_PLACE + 4)].view(np.int64).tolist()
        layout, text, numbers, total = fixed[_PLACE:]
        details = header[_FIELDS_NBYTES : _FIELDS_NBYTES + total]
        if total > _HEADER_NBYTES - _FIELDS_NBYTES:
            details = np.empty(total, dtype=np.uint8)
            self._transport.broadcast(details, 0, f"{self._name}: details")
        starts = _starts([layout, text, 8 * numbers])
        return Arrival(
            place=fixed[:_PLACE],
            layout=details[:layout],
            text=details[starts[1] : starts[1] + text],
            numbers=details[starts[2] : starts[2] + 8 * numbers].view(np.int64).tolist(),
            host=details[starts[3] :],
        )

    def receive_tensors(self, arrival: Arrival, layout: BatchLayout) -> list[Tensor]:
        """The tensors of the micro-batch, in the order of the layout's fields; views of what was received."""
        shapes = layout.shapes(arrival.numbers)
        sizes = [tensor_nbytes(*pair) for pair in zip(layout.fields, shapes, strict=True)]
        others = _starts([size for size, field in zip(sizes, layout.fields, strict=True) if field.device != "cpu"])[-1]
        if self.device is None:
            array = np.empty(others, dtype=np.uint8)
            self._broadcast_tensors(array)
            received = torch.from_numpy(array)
        else:
            received = torch.empty(others, dtype=torch.uint8, device=self.device)
            self._broadcast_tensors(received)
        host = torch.from_numpy(arrival.host)
        used = {"host": 0, "others": 0}
        found = []
        for spec, shape, size in zip(layout.fields, shapes, sizes, strict=True):
            source, kind = (host, "host") if spec.device == "cpu" else (received, "others")
            found.append(tensor_of(source[used[kind] : used[kind] + size], spec, shape))
            used[kind] += _padded(size)
        return found

    def _broadcast_tensors(self, buffer: Bytes | Tensor) -> None:
        where = f"{self._name}: tensors"
        if not len(buffer):
            return
        if isinstance(buffer, Tensor):
            assert isinstance(self._tensors, TensorTransport)
            self._tensors.broadcast_tensor(buffer, 0, where)
        else:
            self._tensors.broadcast(buffer, 0, where)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each part begins in one buffer, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + _padded(size))
    return starts


def _joined(parts: Sequence[Bytes]) -> Bytes:
    """The parts in one buffer, each on a multiple of the alignment."""
    starts = _starts([len(part) for part in parts])
    buffer = np.empty(starts[-1], dtype=np.uint8)
    for start, part in zip(starts, parts, strict=False):
        buffer[start : start + len(part)] = part
    return buffer


def _packed(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The same of tensors on a device: queued on the current stream, waited for by nobody."""
    starts = _starts([tensor.nbytes for tensor in tensors])
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    for start, tensor in zip(starts, tensors, strict=False):
        if tensor.nbytes:
            place = buffer[start : start + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return buffer
