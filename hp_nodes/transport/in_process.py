"""Virtual ranks: N ranks as threads of one process, for notebooks and fast tests.

``run_ranks({"dp": 4, "tp": 2}, fn)`` calls ``fn(mesh)`` on 8 threads. An exchange is a meeting of the group's threads;
one that waits for a rank which has returned, failed, or calls a different exchange ends with an error that says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hp_nodes.errors import DataPlaneError, some_of
from hp_nodes.transport.protocol import Bytes, ConsumerClock

__all__ = ["InProcessTransport", "VirtualMesh", "VirtualWorld", "run_ranks"]

R = TypeVar("R")
_POLL_S = 0.05
_INTERRUPTED_S = 2.0


class _Meeting:
    """Where the ranks of one group exchange values, one exchange after the other."""

    def __init__(self, size: int, condition: threading.Condition) -> None:
        self.size = size
        self.condition = condition
        self.sequence = [0] * size
        self.arrived: dict[int, dict[int, tuple[str, Any]]] = {}
        self.unread: dict[int, int] = {}
        self.closed: set[int] = set()


class VirtualWorld:
    """The ranks of one ``run_ranks`` call and their meetings."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.departed: dict[int, str] = {}
        self._meetings: dict[tuple[Any, ...], _Meeting] = {}
        self._made: dict[tuple[Any, ...], int] = {}

    def meeting(self, rank: int, ranks: tuple[int, ...], scope: str) -> _Meeting:
        """The group of ``ranks`` that this rank makes next; its members meet in the same one."""
        with self.condition:
            nth = self._made.get((rank, ranks, scope), 0)
            self._made[(rank, ranks, scope)] = nth + 1
            return self._meetings.setdefault((ranks, scope, nth), _Meeting(len(ranks), self.condition))

    def depart(self, rank: int, why: str) -> None:
        """``rank`` takes part in nothing any more; whoever waits for it is woken."""
        with self.condition:
            self.departed.setdefault(rank, why)
            self.condition.notify_all()


class InProcessTransport:
    """One virtual rank's place in a group."""

    def __init__(
        self, world: VirtualWorld, global_ranks: tuple[int, ...], rank: int, scope: str, timeout_s: float
    ) -> None:
        self.rank = rank
        self.size = len(global_ranks)
        self.global_ranks = global_ranks
        self.clock = ConsumerClock()
        self.exchanges = 0
        self._world = world
        self.timeout_s = timeout_s
        self._interrupted = False
        self._meeting = world.meeting(global_ranks[rank], global_ranks, scope)

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        return np.stack(self._meet(f"{where} (all_gather of {len(local)} bytes)", local.copy()))

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        mine = buffer.copy() if self.rank == root else None
        values = self._meet(f"{where} (broadcast of {len(buffer)} bytes)", mine)
        if self.rank != root:
            buffer[:] = values[root]

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        cuts = np.cumsum(np.asarray(send_sizes, dtype=np.int64))[:-1]
        # A copy: others may read it when this rank is already writing what it sends next.
        everyone = self._meet(f"{where} (all_to_all)", np.split(send.copy(), cuts))
        pieces = [pieces[self.rank] for pieces in everyone]
        sizes = [len(piece) for piece in pieces]
        if sizes != list(receive_sizes):
            raise self._error(f"{where}: pieces of {sizes} bytes arrived where {list(receive_sizes)} were agreed")
        return np.concatenate(pieces) if pieces else send[:0].copy()

    def mark(self, name: str) -> None:
        """Nobody waits for marks here."""

    def interrupt(self) -> None:
        with self._world.condition:
            self._interrupted = True
            self._world.condition.notify_all()

    def close(self) -> None:
        with self._world.condition:
            self._meeting.closed.add(self.rank)
        self.interrupt()

    def _meet(self, where: str, value: Any) -> list[Any]:
        """Give a value, get everybody's."""
        self.exchanges += 1
        meeting = self._meeting
        start = self.clock.waited()
        with meeting.condition:
            turn = meeting.sequence[self.rank]
            meeting.sequence[self.rank] += 1
            arrived = meeting.arrived.setdefault(turn, {})
            arrived[self.rank] = (where, value)
            if len(arrived) == self.size:  # sooner there is nothing to see, and waking hundreds of threads takes long
                meeting.condition.notify_all()
            while len(arrived) < self.size:
                self._check(arrived, where, start)
                meeting.condition.wait(_POLL_S)
            self._leave(turn)
        different = {self.global_ranks[place]: name for place, (name, _) in arrived.items() if name != where}
        if different:
            raise self._error(
                f"ranks are in different exchanges: rank {self.global_ranks[self.rank]} in {where}, {different}"
            )
        return [arrived[place][1] for place in range(self.size)]

    def _leave(self, turn: int) -> None:
        meeting = self._meeting
        meeting.unread[turn] = meeting.unread.get(turn, self.size) - 1
        if meeting.unread[turn] == 0:
            del meeting.unread[turn], meeting.arrived[turn]

    def _check(self, arrived: Mapping[int, Any], where: str, start: float) -> None:
        if self._interrupted:
            raise self._error(f"{where}: interrupted, because this rank's loader was closed")
        missing = [self.global_ranks[place] for place in range(self.size) if place not in arrived]
        gone = {rank: self._world.departed[rank] for rank in missing if rank in self._world.departed}
        closed = [place for place in sorted(self._meeting.closed) if place not in arrived]
        if closed and not gone:
            rank = self.global_ranks[closed[0]]
            raise self._error(f"{where}: rank {rank} has closed its end of the group", rank)
        if gone:
            reasons = "; ".join(f"rank {rank} {why}" for rank, why in gone.items())
            raise self._error(f"{where}: {reasons}", min(gone))
        if self.clock.waited() - start > self.timeout_s:
            raise self._error(f"{where}: ranks {some_of(missing)} did not arrive within {self.timeout_s} s", missing[0])

    def _error(self, message: str, rank: int | None = None) -> DataPlaneError:
        error = DataPlaneError(message, rank=rank)
        error.agreed = True
        return error


class VirtualMesh:
    """Stands for a DeviceMesh of virtual ranks, as one of them sees it."""

    device_type = "cpu"

    def __init__(self, world: VirtualWorld, shape: Mapping[str, int], rank: int) -> None:
        self.world = world
        self.mesh_dim_names = tuple(shape)
        self.mesh = np.arange(world.size).reshape(tuple(shape.values()))
        self._rank = rank

    @property
    def ndim(self) -> int:
        return int(self.mesh.ndim)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mesh.shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Ranks in the mesh, or along one dimension."""
        return int(self.mesh.size) if mesh_dim is None else int(self.mesh.shape[self._axis(mesh_dim)])

    def get_rank(self) -> int:
        return self._rank

    def get_coordinate(self) -> list[int]:
        return [int(axis[0]) for axis in np.nonzero(self.mesh == self._rank)]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate along one dimension; it may be left out when there is only one."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"the mesh has dimensions {self.mesh_dim_names}; say which one")
        return self.get_coordinate()[self._axis(mesh_dim or 0)]

    def _axis(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, int):
            return mesh_dim
        if mesh_dim not in self.mesh_dim_names:
            raise ValueError(f"the mesh has no dimension {mesh_dim!r}; it has {self.mesh_dim_names}")
        return self.mesh_dim_names.index(mesh_dim)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        return f"VirtualMesh({sizes}, rank={self._rank})"


def _interrupt(threads: Sequence[threading.Thread], ended: Sequence[threading.Event]) -> None:
    """Raise KeyboardInterrupt in each thread at its next instruction, and let them end."""
    for thread, end in zip(threads, ended, strict=True):
        if thread.ident is not None and not end.is_set():
            ident, error = ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
    deadline = time.monotonic() + _INTERRUPTED_S
    for thread, end in zip(threads, ended, strict=True):
        if end.wait(max(0.0, deadline - time.monotonic())):
            thread.join()


def run_ranks(shape: Mapping[str, int], fn: Callable[[Any], R]) -> list[R]:
    """Run ``fn(mesh)`` on virtual ranks of this process.

    Args:
        shape: sizes of the named mesh dimensions, outermost first, such as ``{"dp": 4, "tp": 2}``.
        fn: called once on a thread of its own for each rank, with that rank's mesh.

    Returns:
        What ``fn`` returned, in rank order.

    Raises:
        ValueError: a dimension is not an int >= 1.
        BaseException: the first exception that left ``fn`` on any rank. Ranks that wait for that one are ended with an
            error of their own. KeyboardInterrupt (a notebook's stop button) is raised in every rank, wherever it is.
    """
    for name, size in shape.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh dimension {name!r} has size {size!r}; accepted: an int >= 1")
    if not shape:
        raise ValueError('the mesh shape is empty; accepted: at least one named dimension, such as {"dp": 2}')
    world = VirtualWorld(int(np.prod(list(shape.values()))))
    results: dict[int, R] = {}
    failures: list[BaseException] = []
    # Not Thread.join, which takes an interrupted thread for one that has ended (Python 3.11).
    ended = [threading.Event() for _ in range(world.size)]
    interrupted = threading.Event()

    def body(rank: int) -> None:
        try:
            if interrupted.is_set():  # it had no identity yet when the others were told
                raise KeyboardInterrupt
            results[rank] = fn(VirtualMesh(world, shape, rank))
            world.depart(rank, "has finished its part of run_ranks")
        except BaseException as error:
            failures.append(error)
            world.depart(rank, f"failed: {type(error).__name__}: {error}")
        finally:
            ended[rank].set()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world.size)
    ]
    try:
        for thread in threads:
            thread.start()
        for end in ended:
            end.wait()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        interrupted.set()
        for rank in range(world.size):
            world.depart(rank, "was interrupted")
        _interrupt(threads, ended)
        raise
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world.size)]
