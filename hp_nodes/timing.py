"""Where the time of a graph goes: what each node counts while items pass through it.

A *frame* is opened around each ``next`` of a node. Frames inside it are time spent waiting for the source, exchanges
inside it are time spent with other ranks, and what is left is the node's own work. Frames of one thread nest, so nodes
that are not ours need not know of them. A frame costs about a microsecond; items are windows and micro-batches, never
single samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

__all__ = ["NodeTimes", "exchange_begins", "exchange_ended"]

T = TypeVar("T")


class _Here(threading.local):
    """What happened so far inside this thread's innermost frame."""

    inside = 0.0
    exchanging = 0.0
    exchanges = 0


_here = _Here()


class NodeTimes:
    """What one node counted since it was made. Seconds; written by the one thread that asks the node at a time."""

    __slots__ = ("consumer", "exchanges", "exchanging", "full", "items", "open", "ready", "source", "takes", "thread")

    def __init__(self) -> None:
        self.items = 0
        """Given so far."""
        self.consumer = 0.0
        """Spent by the node above inside this node's ``next``."""
        self.source = 0.0
        """Of the node's time, spent inside the nodes below."""
        self.exchanging = 0.0
        """Of the node's time, spent in exchanges with other ranks, waiting for them included."""
        self.exchanges = 0
        self.thread: float | None = None
        """Spent producing in a thread of the node's own; None where there is none."""
        self.full = 0.0
        """For which that thread stood still because it had built all that it may."""
        self.takes = 0
        """How often an item was taken from the thread."""
        self.ready = 0
        """Items that were ready then, summed over the takes."""
        self.open = False
        """A frame is open: a ``next`` that calls its base class's is one frame."""

    @property
    def busy(self) -> float:
        """The node's own work."""
        worked = self.consumer if self.thread is None else self.thread
        return max(0.0, worked - self.source - self.exchanging)

    def frame(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)``, the node's ``next``, counted; an exception is no item."""
        if self.open:
            return function(*arguments)
        self.open = True
        outer, start = self._enter(), perf_counter()
        try:
            item = function(*arguments)
            self.items += 1
            return item
        finally:
            seconds = perf_counter() - start
            self.open = False
            self.consumer += seconds
            self._leave(outer, seconds)

    def produced(self, function: Callable[[], T]) -> T:
        """``function()``, which builds ahead in the node's own thread, counted."""
        outer, start = self._enter(), perf_counter()
        try:
            return function()
        finally:
            seconds = perf_counter() - start
            self.thread = (self.thread or 0.0) + seconds
            self._leave(outer, seconds)

    def taken(self, ready: int) -> None:
        """The consumer asks, and ``ready`` items are."""
        self.takes += 1
        self.ready += ready

    def _enter(self) -> tuple[float, float, int]:
        here = _here
        outer = here.inside, here.exchanging, here.exchanges
        here.inside, here.exchanging, here.exchanges = 0.0, 0.0, 0
        return outer

    def _leave(self, outer: tuple[float, float, int], seconds: float) -> None:
        here = _here
        self.source += here.inside
        self.exchanging += here.exchanging
        self.exchanges += here.exchanges
        here.inside, here.exchanging, here.exchanges = outer[0] + seconds, outer[1], outer[2]


def exchange_begins() -> tuple[float, float]:
    """Now, and how long nodes below have worked; for :func:`exchange_ended`."""
    return perf_counter(), _here.inside


def exchange_ended(began: tuple[float, float]) -> None:
    """Count an exchange towards the innermost frame, without what nodes below worked meanwhile."""
    start, inside = began
    _here.exchanging += perf_counter() - start - (_here.inside - inside)
    _here.exchanges += 1
