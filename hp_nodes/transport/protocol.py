"""What a node may ask of the ranks it works with.

One small protocol, three implementations: a single rank, virtual ranks of one process, torch.distributed. Buffers are
numpy uint8 arrays; what they mean is the caller's business. A transport is used by exactly one thread at a time.

Every exchange can be interrupted from another thread, and gives up when the consumer has waited longer than the time
limit. Failures are :class:`~hp_nodes.errors.DataPlaneError`, already ``agreed``: after one, no exchange can follow.

A transport over a device's own backend may carry tensors that are on the device too (:class:`TensorTransport`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device

__all__ = ["Bytes", "ConsumerClock", "TensorTransport", "Transport"]

Bytes = NDArray[np.uint8]


class ConsumerClock:
    """Counts the seconds for which this rank's consumer has been waiting: only they count towards a time limit.

    A background exchange that waits for a rank which evaluates for ten minutes is not late as long as nobody here needs
    its result. A clock that was never given to a background thread counts all the time.
    """

    def __init__(self, always: bool = True) -> None:
        self._lock = Lock()
        self._always = always
        self._total = 0.0
        self._since: float | None = None
        self._depth = 0

    def in_background(self) -> None:
        """From now on count only while somebody is inside :meth:`waiting`."""
        with self._lock:
            self._always = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._since = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._since is not None:
                    self._total += time.monotonic() - self._since
                    self._since = None

    def waited(self) -> float:
        """Seconds of waiting so far; grows only while it counts."""
        if self._always:
            return time.monotonic()
        with self._lock:
            return self._total + (time.monotonic() - self._since if self._since is not None else 0.0)


@runtime_checkable
class Transport(Protocol):
    """A group of ranks that exchange bytes.

    ``rank`` and ``size`` are this rank's place in the group and the group's size; ``global_ranks[i]`` is the global
    rank of place i. ``where`` says what an exchange is for; it is part of error messages and must be equal on all
    ranks.
    """

    rank: int
    size: int
    global_ranks: tuple[int, ...]
    timeout_s: float
    """How long the consumer waits for other ranks in one exchange before it is an error."""
    clock: ConsumerClock
    exchanges: int
    """Exchanges so far, for tests and statistics."""

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        """uint8[n], the same n on all ranks → uint8[size, n]."""
        ...

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        """Fill ``buffer``, of equal length on all ranks, with what the rank at place ``root`` has in its own."""
        ...

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        """Piece i of ``send`` goes to place i; returns the pieces meant for this rank, in the order of their senders.

        The sizes were agreed before: what place i receives from j is what j sends to i. Afterwards ``send`` is the
        caller's again; what is returned is nobody else's.
        """
        ...

    def mark(self, name: str) -> None:
        """A place in a window's sequence: "planned", "closed". Only one whose exchanges are handed over cares."""
        ...

    def interrupt(self) -> None:
        """End a running exchange and refuse later ones. May be called from any thread."""
        ...

    def close(self) -> None:
        """Give back what the transport holds. The group is not usable afterwards."""
        ...


@runtime_checkable
class TensorTransport(Transport, Protocol):
    """A transport that carries tensors from device to device, over the device's own backend.

    ``device`` is where this rank's tensors are, with its index.
    """

    device: device

    def broadcast_tensor(self, tensor: Tensor, root: int, where: str) -> None:
        """Fill ``tensor``, uint8[n] on ``device`` with equal n on all ranks, with what place ``root`` has in its own.

        What is queued on the calling thread's current stream afterwards runs behind it; the host does not wait.
        """
        ...
