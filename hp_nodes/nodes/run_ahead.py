"""A background thread that builds units ahead of a consumer, and stops at an agreed place.

How far the thread may run is a pure function of what was consumed: to unit ``consumed + depth``. An orderly stop lets
it run exactly there, so ranks whose consumers took equally many units stop at the same unit, none of them alone in an
exchange. An error or the end takes its place in the order of units; after it the thread is gone and every later
``take`` raises it again.

The thread refers to the producer only, never to the node that owns this object, so a forgotten node can be collected.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from hp_nodes.errors import DataPlaneError
from hp_nodes.timing import NodeTimes
from hp_nodes.transport import ConsumerClock
from hp_nodes.transport.handed_over import HandedOverTransport

__all__ = ["RunAhead", "again", "in_background", "is_interruption"]

T = TypeVar("T")
_POLL_S = 0.1
_FORGOTTEN_S = 10.0
_LEAVE_S = 2.0


class _Thread(threading.Thread):
    """Lets code see that it runs ahead of a consumer."""


def in_background() -> bool:
    """Whether this is a thread that runs ahead: its waiting is not the consumer's."""
    return isinstance(threading.current_thread(), _Thread)


def is_interruption(error: BaseException) -> bool:
    """Whether this is Control-C in the consumer's thread: no failure of the data plane, and raised as it is."""
    return isinstance(error, KeyboardInterrupt) and not in_background()


class RunAhead(Generic[T]):
    """Units from ``produce``, built in a thread.

    Args:
        produce: gives the next unit; StopIteration ends, any other exception fails.
        depth: units built beyond the one that is consumed; at least 1.
        clock: counts the consumer's waiting.
        name: of the thread.
        wake: called to end a wait inside ``produce`` when the thread shall leave at once.
        handed_over: launches, on the consumer's thread, what the thread wants to exchange.
        times: of the node that owns this, to count in.
    """

    def __init__(
        self,
        produce: Callable[[], T],
        depth: int,
        clock: ConsumerClock,
        name: str,
        wake: Callable[[], None] | None = None,
        handed_over: HandedOverTransport | None = None,
        times: NodeTimes | None = None,
    ) -> None:
        self._core: _Core[T] = _Core(produce, depth, wake, handed_over, times or NodeTimes())
        self._clock = clock
        self._name = name
        self._finalizer = weakref.finalize(self, _forgotten, self._core)

    def take(self) -> T:
        """The next unit; waits for it.

        Raises:
            StopIteration: the end.
            BaseException: what ``produce`` raised, at its place in the order, and again at every later call.
        """
        if in_background():
            return self._core.take(self._name)
        with self._clock.waiting():
            return self._core.take(self._name)

    def ready(self) -> int:
        """Units that are built and wait to be taken."""
        return len(self._core.units)

    def finish(self, within_s: float) -> None:
        """Let the thread run to the end of what it may build, then stop it. What was built is forgotten.

        Raises:
            RuntimeError: it is still busy after ``within_s`` seconds; it was told to leave and must not be waited for.
        """
        with contextlib.nullcontext() if in_background() else self._clock.waiting():
            self._core.join(within_s)
        if self._core.running():
            self._core.leave(_LEAVE_S)
        if self._core.running():
            raise RuntimeError(
                f"the thread of {self._name} is stuck in a node below it and did not stop within {within_s} s"
            )

    def run_on(self, within_s: float) -> None:
        """Let the thread, started if need be, run until its producer ends; after ``within_s`` make it leave."""
        with self._clock.waiting():
            self._core.run_on(self._name)
            self._core.join(within_s)
            self._core.leave(_LEAVE_S)


class _Core(Generic[T]):
    """What the thread and its consumer share."""

    def __init__(
        self,
        produce: Callable[[], T],
        depth: int,
        wake: Callable[[], None] | None,
        handed_over: HandedOverTransport | None,
        times: NodeTimes,
    ) -> None:
        self.times = times
        self.handed_over = handed_over
        self.produce = produce
        self.depth = depth
        self.wake = wake
        self.condition = threading.Condition()
        self.units: deque[T] = deque()
        self.end: BaseException | None = None
        self.consumed = 0
        self.allowed = 0
        self.closing = False
        self.thread: _Thread | None = None

    def take(self, name: str) -> T:
        with self.condition:
            self.times.taken(len(self.units))
            self.consumed += 1
            self.allowed = self.consumed + self.depth
            self.start(name)
            self.condition.notify_all()
        try:
            return self._awaited(name)
        except KeyboardInterrupt:
            # The consumer got nothing. Its next call takes the same unit, so all ranks still count alike.
            with self.condition:
                self.consumed -= 1
            raise

    def _awaited(self, name: str) -> T:
        if self.handed_over is not None:
            self.handed_over.launch_until(lambda: bool(self.units) or self.end is not None)
        with self.condition:
            while not self.units and self.end is None:
                self.condition.wait(_POLL_S)
                if self.thread is None or (not self.thread.is_alive() and not self.units and self.end is None):
                    self.end = RuntimeError(f"the thread of {name} ended without a result")
            if self.units:
                return self.units.popleft()
            assert self.end is not None
            raise again(self.end)

    def start(self, name: str) -> None:
        if self.thread is None:
            self.thread = _Thread(target=self._run, name=name, daemon=True)
            if self.handed_over is not None:
                self.handed_over.serve(self.thread)
            self.thread.start()

    def run_on(self, name: str) -> None:
        with self.condition:
            self.allowed = sys.maxsize
            if self.end is None:
                self.start(name)
            self.condition.notify_all()

    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and self.thread is not threading.current_thread()

    def _run(self) -> None:
        built = 0
        while True:
            with self.condition:
                stopped = time.perf_counter()
                while built >= self.allowed and not self.closing:
                    self.condition.wait(_POLL_S)
                self.times.full += time.perf_counter() - stopped
                if built >= self.allowed:
                    return
            try:
                unit = self.times.produced(self.produce)
            except BaseException as error:
                with self.condition:
                    self.end = error
                    self.condition.notify_all()
                return
            built += 1
            with self.condition:
                self.units.append(unit)
                self.condition.notify_all()

    def join(self, within_s: float) -> None:
        """Orderly: the thread runs to ``allowed`` and returns."""
        with self.condition:
            self.closing = True
            self.condition.notify_all()
        if self.thread is not None and self.running():
            if self.handed_over is not None:
                deadline = time.monotonic() + within_s
                self.handed_over.launch_until(lambda: time.monotonic() > deadline)
            self.thread.join(within_s)

    def leave(self, within_s: float) -> None:
        """At once: whatever the thread waits for is ended."""
        with self.condition:
            self.allowed = 0
        if self.running() and self.wake is not None:
            self.wake()
        self.join(within_s)


def _forgotten(core: _Core[Any]) -> None:
    """The owner was collected, or the program ends: orderly first, since the other ranks may be doing the same."""
    core.join(_FORGOTTEN_S)
    core.leave(_LEAVE_S)


def again(error: BaseException) -> BaseException:
    """A fresh exception where that is possible: raising one object again and again would grow its traceback."""
    if isinstance(error, StopIteration):
        return StopIteration()
    if isinstance(error, DataPlaneError):
        again = error.copy()
        again.__cause__ = error.__cause__
        return again
    return error
