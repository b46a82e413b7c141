"""Hand-over: exchanges that a background thread posts and the consuming thread launches.

NCCL and HCCL need one order of collectives on all ranks, the trainer's own included. So a background thread does not
launch; it posts what it wants to exchange and waits. The consuming thread launches it at fixed places of delivery, the
same on every rank, and waits for its own background thread where that is late.

``mark(name)`` is posted between exchanges ("planned", "closed"); ``launch_through(name, count)`` launches until the
mark was met that many times. An end of the background thread lets the consumer go on.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport.protocol import Bytes, ConsumerClock, Transport

__all__ = ["HandedOverTransport", "launched_by_consumer"]

_POLL_S = 0.05


class _Request:
    """One posted exchange, or a mark."""

    def __init__(self, run: Callable[[], Any] | None, mark: str = "") -> None:
        self.run = run
        self.mark = mark
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def launch(self) -> None:
        assert self.run is not None
        try:
            self.result = self.run()
        except BaseException as error:
            self.error = error
        self.done.set()


class _Queue:
    """What one background thread has posted, for its consumer; shared by all transports that it uses."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.posted: deque[_Request] = deque()
        self.marks: Counter[str] = Counter()
        self.background: threading.Thread | None = None


class HandedOverTransport:
    """A transport whose exchanges run on the consuming thread.

    Args:
        inner: does the exchanges.
        beside: of a larger group, used by the same background thread: what is posted to either is launched in the order
            in which it was posted, at the places of the larger one.
    """

    def __init__(self, inner: Transport, beside: HandedOverTransport | None = None) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.global_ranks = inner.global_ranks
        self.timeout_s = inner.timeout_s
        self._queue: _Queue = _Queue() if beside is None else beside._queue
        self._interrupted = False

    @property
    def clock(self) -> ConsumerClock:
        return self.inner.clock

    @clock.setter
    def clock(self, value: ConsumerClock) -> None:
        self.inner.clock = value

    @property
    def exchanges(self) -> int:
        return self.inner.exchanges

    @exchanges.setter
    def exchanges(self, value: int) -> None:
        self.inner.exchanges = value

    # ---- the background thread's side; any other thread's exchanges run at once

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        gathered: Bytes = self._post(lambda: self.inner.all_gather(local, where), where)
        return gathered

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        self._post(lambda: self.inner.broadcast(buffer, root, where), where)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        received: Bytes = self._post(lambda: self.inner.all_to_all(send, send_sizes, receive_sizes, where), where)
        return received

    def mark(self, name: str) -> None:
        """Everything before this place of a window's sequence has been exchanged."""
        queue = self._queue
        if threading.current_thread() is queue.background:
            with queue.condition:
                queue.marks[name] += 1
                queue.condition.notify_all()

    def _post(self, run: Callable[[], Any], where: str) -> Any:
        queue = self._queue
        if threading.current_thread() is not queue.background:
            return run()
        request = _Request(run)
        with queue.condition:
            queue.posted.append(request)
            queue.condition.notify_all()
        while not request.done.wait(_POLL_S):
            if self._interrupted:
                error = DataPlaneError(f"{where}: interrupted, because this rank's loader was closed")
                error.agreed = True
                raise error
        if request.error is not None:
            raise request.error
        return request.result

    # ---- the consuming thread's side

    def serve(self, background: threading.Thread) -> None:
        """From now on launch for this thread."""
        queue = self._queue
        with queue.condition:
            queue.background = background
            queue.posted.clear()
            queue.marks.clear()

    def launch_through(self, mark: str, count: int) -> None:
        """Launch what is posted until ``mark`` has been met ``count`` times, or the background thread has ended."""
        self.launch_until(lambda: self._queue.marks[mark] >= count)

    def launch_until(self, enough: Callable[[], bool]) -> None:
        """Launch what is posted until ``enough()``, or until the background thread has ended."""
        queue = self._queue
        while True:
            with queue.condition:
                while not enough() and not queue.posted:
                    if queue.background is None or not queue.background.is_alive():
                        return
                    queue.condition.wait(_POLL_S)
                if enough():
                    return  # what is posted behind the mark waits for its own place
                request = queue.posted.popleft()
            request.launch()

    def interrupt(self) -> None:
        with self._queue.condition:
            self._interrupted = True
            self._queue.condition.notify_all()
        self.inner.interrupt()

    def close(self) -> None:
        self.interrupt()
        self.inner.close()


def launched_by_consumer(transport: Transport) -> HandedOverTransport | None:
    """The transport whose exchanges the consuming thread must launch, where ``transport`` is one or rests on one."""
    return transport if isinstance(transport, HandedOverTransport) else getattr(transport, "handed_over", None)
