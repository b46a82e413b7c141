"""A real CUDA or NPU device whose copies, or whose consumer, are slowed, to see that nobody relies on luck.

Work is products of matrices, which run on either kind of device. Implements
:class:`graphs.device_assertions.DeviceUnderTest` beside :class:`graphs.stand_in_device.StandInDevice`. Never run on
hardware so far: neither on a CUDA nor on an NPU device.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from graphs.device_assertions import Mark
from hp_nodes.nodes.accelerator import TorchAccelerator, open_accelerator

__all__ = ["SlowedDevice"]

_SIDE = 4096  # a product takes some milliseconds: few launches make a long delay


class SlowedDevice(TorchAccelerator):
    """A device through torch.

    Args:
        device: "cuda" or "npu", with or without an index.
        copy_delay_s, compute_delay_s: work that is queued before each copy and before each read.

    Raises:
        ImportError, RuntimeError: the device's package, or the device, is not here.
    """

    def __init__(self, device: str, copy_delay_s: float = 0.0, compute_delay_s: float = 0.0) -> None:
        super().__init__(open_accelerator(device).device)
        self.copy_delay_s = copy_delay_s
        self.compute_delay_s = compute_delay_s
        self.streams: list[Any] = []
        self.copies = 0
        self.pinned_nbytes = 0
        self.threads_with_device: set[int] = set()
        self._work = _work_of(self.device)
        self._zero = self._timed_event()

    def set_device(self) -> None:
        self.threads_with_device.add(threading.get_ident())
        super().set_device()

    def new_stream(self) -> Any:
        self.streams.append(super().new_stream())
        return self.streams[-1]

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_nbytes += nbytes
        return super().pinned(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.copies += 1
        with self._module.stream(stream):
            self._work(self.copy_delay_s)
        super().copy(target, source, stream)

    def read(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        self._work(self.compute_delay_s)
        kept = tensor.detach().clone()
        return lambda: kept.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if kept.nbytes else b""

    def compute(self, seconds: float) -> None:
        self._work(seconds)

    def mark(self) -> Mark:
        event, zero = self._timed_event(), self._zero
        return lambda: float(zero.elapsed_time(event)) / 1e3

    def overwrite_freed(self, nbytes: int) -> None:
        for stream in (*self.streams, self.current_stream()):
            with self._module.stream(stream):
                torch.empty(nbytes, dtype=torch.uint8, device=self.device).fill_(0xEE)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def _timed_event(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self.current_stream())
        return event


@functools.cache
def _work_of(device: torch.device) -> Callable[[float], None]:
    """Queues work of about so many seconds on the current stream; measured once for a device."""
    module = torch.get_device_module(device)
    left, right, product = (torch.ones(_SIDE, _SIDE, device=device) for _ in range(3))

    def queue(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)

    queue(3)
    module.synchronize(device)
    before = time.monotonic()
    queue(10)
    module.synchronize(device)
    seconds = (time.monotonic() - before) / 10
    return lambda wanted: queue(math.ceil(wanted / seconds))
