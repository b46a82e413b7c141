"""A device that is not there: streams that run late, events, and memory that is reused as soon as it may be.

Device memory is one arena. Work is queued on streams, each a thread that runs its queue in order and sleeps before each
piece; a reader of memory, of the host's that is pinned too, keeps an address, not a reference. So a consumer that does
not wait for the copy, and memory that is reused before its last reader ran, both show as wrong values. What is asserted
of it is asserted of real devices too (:mod:`graphs.device_assertions`).
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.device_assertions import Mark

__all__ = ["StandInDevice"]


class StandInEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def await_it(self) -> None:
        self.happened.wait(20)


class StandInStream:
    """Runs what is queued, in order, each piece ``delay_s`` late."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def queue(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def drain(self) -> None:
        event = StandInEvent()
        self.queue(event.happened.set)
        assert event.happened.wait(20)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self.delay_s)
            work()


class StandInDevice:
    """Implements :class:`graphs.device_assertions.DeviceUnderTest`.

    Args:
        copy_delay_s, compute_delay_s: how late copies and the consumer's work run.
        arena_nbytes: device memory.
    """

    def __init__(self, copy_delay_s: float = 0.0, compute_delay_s: float = 0.0, arena_nbytes: int = 1 << 24) -> None:
        self.device = torch.device("cpu")
        self.arena = np.zeros(arena_nbytes, dtype=np.uint8)
        self.copy_delay_s = copy_delay_s
        self.consumer = StandInStream(compute_delay_s)
        self.streams: list[StandInStream] = []
        self.copies = 0
        self.pinned_nbytes = 0
        self.threads_with_device: set[int] = set()
        self._host: list[NDArray[np.uint8]] = []
        self._free: list[tuple[int, int]] = [(0, arena_nbytes)]
        self._recorded: dict[int, list[StandInStream]] = {}
        self._lock = threading.RLock()

    # ---- what staging uses

    def set_device(self) -> None:
        self.threads_with_device.add(threading.get_ident())

    def new_stream(self) -> StandInStream:
        self.streams.append(StandInStream(self.copy_delay_s))
        return self.streams[-1]

    def current_stream(self) -> StandInStream:
        return self.consumer

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_nbytes += nbytes
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._host.append(memory)
        block = memory[:]
        weakref.finalize(block, memory.fill, 0xEE)
        return torch.from_numpy(block)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._pinned_source(tensor) is not None

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        start = self._allocate(nbytes)
        block = self.arena[start : start + nbytes]
        tensor = torch.from_numpy(block)
        weakref.finalize(block, self._freed, start, nbytes)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: StandInStream) -> None:
        self.copies += 1
        start, size = self._address(target)
        memory = self._pinned_source(source)
        assert memory is not None and source.is_contiguous(), "only pinned memory is copied without a wait"

        def run() -> None:
            self.arena[start : start + size] = memory

        stream.queue(run)

    def move(self, value: Any, stream: Any) -> Any:
        return value.to(self.device, non_blocking=True)

    def record(self, stream: StandInStream) -> StandInEvent:
        event = StandInEvent()
        stream.queue(event.happened.set)
        return event

    def wait(self, stream: StandInStream, event: StandInEvent) -> None:
        stream.queue(event.await_it)

    def done(self, event: StandInEvent) -> bool:
        return event.happened.is_set()

    def hand_over(self, tensor: torch.Tensor, stream: StandInStream) -> None:
        """Like record_stream: when the tensor is freed, its memory waits for what is queued on ``stream`` then."""
        with self._lock:
            self._recorded.setdefault(self._address(tensor)[0], []).append(stream)

    # ---- what a consumer does

    def read(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        """Queue a read of the tensor's memory on the consumer's stream; its result is there after ``synchronize``."""
        if tensor.nbytes == 0:
            return lambda: b""
        start, size = self._address(tensor)
        found: list[bytes] = []
        self.consumer.queue(lambda: found.append(self.arena[start : start + size].tobytes()))
        return lambda: found[0]

    def compute(self, seconds: float) -> None:
        self.consumer.queue(lambda: time.sleep(seconds))

    def mark(self) -> Mark:
        when: list[float] = []
        self.consumer.queue(lambda: when.append(time.monotonic()))
        return lambda: when[0]

    def overwrite_freed(self, nbytes: int) -> None:
        """Nothing to do: what is freed is overwritten at once."""

    def synchronize(self) -> None:
        self.consumer.drain()

    # ---- memory

    def _pinned_source(self, tensor: torch.Tensor) -> NDArray[np.uint8] | None:
        """The bytes at a tensor's address, which does not keep them from being freed."""
        for memory in self._host:
            start = tensor.data_ptr() - memory.ctypes.data
            if start >= 0 and start + tensor.nbytes <= len(memory):
                return memory[start : start + tensor.nbytes]
        return None

    def _address(self, tensor: torch.Tensor) -> tuple[int, int]:
        start = tensor.data_ptr() - self.arena.ctypes.data
        assert 0 <= start <= len(self.arena), "not device memory"
        return start, tensor.nbytes

    def _allocate(self, nbytes: int) -> int:
        """First fit; while all is in use, wait for what runs to give some back, as a device that is full would."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with self._lock:
                for place, (start, size) in enumerate(self._free):
                    if size >= nbytes:
                        self._free[place] = (start + nbytes, size - nbytes)
                        return start
            time.sleep(0.001)
        raise MemoryError(f"{nbytes} bytes of device memory")

    def _freed(self, start: int, nbytes: int) -> None:
        with self._lock:
            streams = self._recorded.pop(start, [])

        def reuse() -> None:
            with self._lock:
                self.arena[start : start + nbytes] = 0xEE
                self._free.insert(0, (start, nbytes))

        if streams:
            streams[0].queue(reuse)
        else:
            reuse()
