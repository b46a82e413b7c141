"""What device staging asks of an accelerator: streams, events, pinned memory and asynchronous copies.

One code path for CUDA and Ascend NPU: events over ``torch.Event``; streams through the device's own module, since
``torch.Stream`` can be entered only in later releases of torch than the oldest supported one.
The stand-in of the tests implements the same few methods. ``TorchAccelerator`` itself was never run so far, neither on
CUDA nor on an NPU: ``python -m graphs.device_check`` does so.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

__all__ = ["Accelerator", "TorchAccelerator", "open_accelerator"]


class Accelerator(Protocol):
    """A device, its streams and events. Streams and events are the device's own objects."""

    device: torch.device

    def set_device(self) -> None:
        """Make this the calling thread's device."""
        ...

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any:
        """The stream on which the calling thread's work is queued."""
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] of page-locked host memory."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in page-locked memory."""
        ...

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        """uint8[nbytes] on the device, belonging to ``stream``."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Queue a copy on ``stream``; does not wait."""
        ...

    def move(self, value: Any, stream: Any) -> Any:
        """``value.to(device, non_blocking=True)`` on ``stream``."""
        ...

    def record(self, stream: Any) -> Any:
        """An event behind what is queued on ``stream`` now."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let ``stream``, not the host, wait for ``event``."""
        ...

    def done(self, event: Any) -> bool:
        """Whether ``event`` has happened; does not wait."""
        ...

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        """``tensor`` is used on ``stream``: its memory is reused only behind that."""
        ...


class TorchAccelerator:
    """CUDA or NPU, through torch.

    Args:
        device: with an index, or the current one of its type.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        index = device.index if device.index is not None else self._module.current_device()
        self.device = torch.device(device.type, index)

    def set_device(self) -> None:
        self._module.set_device(self.device.index)

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        with self._module.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def move(self, value: Any, stream: Any) -> Any:
        with self._module.stream(stream):
            return value.to(self.device, non_blocking=True)

    def record(self, stream: Any) -> Any:
        event = torch.Event(self.device)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        return bool(event.query())

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


def open_accelerator(device: torch.device | str) -> TorchAccelerator:
    """The accelerator of a CUDA or NPU device.

    Raises:
        ValueError: another type of device.
        ImportError: ``torch_npu``, which is the extra ``npu``, is not installed.
        RuntimeError: no such device is there.
    """
    kind = str(device).split(":")[0]
    if kind not in ("cuda", "npu"):
        raise ValueError(f"device is {device!r}; accepted: 'cpu', 'cuda', 'npu', with or without an index")
    if kind == "npu" and not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise ImportError(f"device {device!r} needs torch_npu: pip install 'hp-nodes[npu]' ({error})") from error
    module = torch.get_device_module(kind)
    if not module.is_available():
        raise RuntimeError(f"device {device!r}: torch.{kind} finds no device here")
    return TorchAccelerator(torch.device(device))
