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

__all__ = ["HandedOverTransport"]

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


class HandedOverTransport:
    """A transport whose exchanges run on the consuming thread.

    Args:
        inner: does the exchanges.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.global_ranks = inner.global_ranks
        self.timeout_s = inner.timeout_s
        self.clock: ConsumerClock = inner.clock
        self._condition = threading.Condition()
        self._posted: deque[_Request] = deque()
        self._marks: Counter[str] = Counter()
        self._background: threading.Thread | None = None
        self._interrupted = False

    @property
    def exchanges(self) -> int:
        return self._inner.exchanges

    @exchanges.setter
    def exchanges(self, value: int) -> None:
        self._inner.exchanges = value

    # ---- the background thread's side; any other thread's exchanges run at once

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        gathered: Bytes = self._post(lambda: self._inner.all_gather(local, where), where)
        return gathered

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        self._post(lambda: self._inner.broadcast(buffer, root, where), where)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        received: Bytes = self._post(lambda: self._inner.all_to_all(send, send_sizes, receive_sizes, where), where)
        return received

    def mark(self, name: str) -> None:
        """Everything before this place of a window's sequence has been exchanged."""
        if threading.current_thread() is self._background:
            with self._condition:
                self._marks[name] += 1
                self._condition.notify_all()

    def _post(self, run: Callable[[], Any], where: str) -> Any:
        if threading.current_thread() is not self._background:
            return run()
        request = _Request(run)
        with self._condition:
            self._posted.append(request)
            self._condition.notify_all()
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
        with self._condition:
            self._background = background
            self._posted.clear()
            self._marks.clear()

    def launch_through(self, mark: str, count: int) -> None:
        """Launch what is posted until ``mark`` has been met ``count`` times, or the background thread has ended."""
        self.launch_until(lambda: self._marks[mark] >= count)

    def launch_until(self, enough: Callable[[], bool]) -> None:
        """Launch what is posted until ``enough()``, or until the background thread has ended."""
        while True:
            with self._condition:
                while not enough() and not self._posted:
                    background = self._background
                    if background is None or not background.is_alive():
                        return
                    self._condition.wait(_POLL_S)
                if enough():
                    return  # what is posted behind the mark waits for its own place
                request = self._posted.popleft()
            request.launch()

    def interrupt(self) -> None:
        with self._condition:
            self._interrupted = True
            self._condition.notify_all()
        self._inner.interrupt()

    def close(self) -> None:
        self.interrupt()
        self._inner.close()
