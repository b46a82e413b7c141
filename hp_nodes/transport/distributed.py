"""Ranks as processes: groups of our own, over the store that torch.distributed was initialised with.

Every collective is issued asynchronously and waited for in short slices, so that a stop flag and our own time limit can
end the wait; a synchronous one could not be woken. Gloo's own limit is set far away: a background exchange may rightly
wait for as long as another rank evaluates.

The process group is made directly rather than by ``new_group``: it stays ours when the trainer destroys its groups, and
a group that is made again for the same ranks never meets the addresses of the one before (torch 2.13 reuses the name
of a destroyed group, and with it what stands in the store).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions
from torch.distributed import ProcessGroupGloo

from hp_nodes.errors import DataPlaneError, some_of
from hp_nodes.transport.protocol import Bytes, ConsumerClock
from hp_nodes.transport.rendezvous import meet

__all__ = ["GroupTransport", "HostLane", "Lane"]

_SLICE = datetime.timedelta(milliseconds=50)
_NEVER = datetime.timedelta(days=7)
_FEW_BYTES = 1 << 20  # of an exchange whose time is its latency
_ROLL_CALL_S = 1.0
_LEAVING_S = 1.0
_ABANDONED_POLL_S = 0.05
_abandoned: list[tuple[Any, Any]] = []


class Lane(Protocol):
    """Where a group's buffers are, and how its work is waited for."""

    gathers_by_all_to_all: bool

    def make_group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        """A process group of torch."""
        ...

    def entered(self) -> AbstractContextManager[Any]:
        """Context in which buffers are made and work is issued and waited for."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes]."""
        ...

    def load(self, array: Bytes) -> torch.Tensor:
        """The same bytes where the group wants them; may be ``array`` itself."""
        ...

    def unload(self, tensor: torch.Tensor) -> Bytes:
        """The same bytes on the host; may be ``tensor`` itself."""
        ...

    def rest(self, work: Any) -> None:
        """Wait a short while, or until ``work`` is complete; an exception of it may come from here or not."""
        ...


class HostLane:
    """Gloo, with buffers on the host. Its all_gather passes what is small on from neighbour to neighbour, and takes two
    to three times as long between two ranks as an all_to_all, which sends it to all at once.
    """

    gathers_by_all_to_all = True

    def make_group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        return ProcessGroupGloo(store, rank, size, limit)

    def entered(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, nbytes: int) -> torch.Tensor:
        # Not torch.empty: numpy asks the system for huge pages, which a large exchange fills a third faster.
        return torch.from_numpy(np.empty(nbytes, dtype=np.uint8))

    def load(self, array: Bytes) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def unload(self, tensor: torch.Tensor) -> Bytes:
        return tensor.numpy()

    def rest(self, work: Any) -> None:
        work.wait(_SLICE)


class GroupTransport:
    """A group made by its members only.

    Args:
        global_ranks: the members, in the order that places are numbered; all of them construct it at the same point.
        global_rank: this process.
        timeout_s: limit for making the group, and for the consumer's wait in each exchange.
        lane: of which backend it is, and where buffers are; default: Gloo, on the host.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a member did not come.
    """

    def __init__(
        self, global_ranks: tuple[int, ...], global_rank: int, timeout_s: float, lane: Lane | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group before building the loader"
            )
        self.rank = global_ranks.index(global_rank)
        self.size = len(global_ranks)
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self.clock = ConsumerClock()
        self.exchanges = 0
        _forget_abandoned()
        self.lane = lane or HostLane()
        self._interrupted = False
        self._control_c = ""
        """The exchange that Control-C ended here."""
        self._pending: Any = None
        self._store = meet(global_ranks, self.rank, timeout_s)
        limit = datetime.timedelta(seconds=timeout_s)
        self._group: Any = self.lane.make_group(self._store, self.rank, self.size, limit)

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        if self.lane.gathers_by_all_to_all and self.size * len(local) <= _FEW_BYTES:
            each = [len(local)] * self.size
            return self.all_to_all(np.tile(local, self.size), each, each, where).reshape(self.size, len(local))
        with self.lane.entered():
            out, mine = self.lane.empty(self.size * len(local)), self.lane.load(local)
            options = _patient(AllgatherOptions())
            # Not allgather, for which a tensor of each rank would be made: 4 to 6 ms of 4096 ranks.
            self._wait(where, lambda: self._group._allgather_base(out, mine, options))
            return self.lane.unload(out).reshape(self.size, len(local))

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        options = _patient(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        with self.lane.entered():
            tensor = self.lane.load(buffer)
            self._wait(where, lambda: self._group.broadcast([tensor], options))
            got = self.lane.unload(tensor)
        if self.rank != root and got.ctypes.data != buffer.ctypes.data:
            np.copyto(buffer, got)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        incoming, outgoing = [int(size) for size in receive_sizes], [int(size) for size in send_sizes]
        options = _patient(AllToAllOptions())
        with self.lane.entered():
            out, given = self.lane.empty(sum(incoming)), self.lane.load(send)
            self._wait(where, lambda: self._group.alltoall_base(out, given, incoming, outgoing, options))
            return self.lane.unload(out)

    def mark(self, name: str) -> None:
        """Nobody waits for marks here."""

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Leave the group. An exchange that is still pending is abandoned."""
        self._interrupted = True
        if self._settled():
            self._group = self._pending = None
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Leave the group with an exchange pending."""
        group, pending, self._group, self._pending = self._group, self._pending, None, None
        if group is not None:
            # Gloo's destructor waits for what is pending (abort does not end it), which would keep the process from
            # ending: this group is not destroyed before that is over, and at the end of the process not at all.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _abandoned.append((group, pending))

    def _settled(self) -> bool:
        """Whether nothing is pending. Where all ranks leave, one of them has nothing pending, and its connections close
        a moment later, which ends what is pending on the others.
        """
        pending, deadline = self._pending, time.monotonic() + _LEAVING_S
        while pending is not None and not pending.is_completed() and time.monotonic() < deadline:
            time.sleep(0.005)
        return pending is None or bool(pending.is_completed())

    def _wait(self, where: str, issue: Callable[[], Any]) -> None:
        self.exchanges += 1
        start = self.clock.waited()
        work: Any = None
        try:
            self._check(where, start)
            self._pending = work = issue()
            while not work.is_completed():
                self._check(where, start)
                # It may complete between a slice that passed and here: what it has to say is asked for below.
                with contextlib.suppress(RuntimeError):
                    self.lane.rest(work)
            work.wait()
            self._pending = None
        except KeyboardInterrupt:
            # What was issued is exchanged whenever the others come to it. After that our connections close, or they
            # would wait in their next exchange for this rank, for as long as its process lives on.
            if work is not None and not work.is_completed():
                work = None
                self._control_c = where
                self._abandon()
                threading.Thread(target=_await_abandoned, name="hp_nodes abandoned groups", daemon=True).start()
            raise
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DataPlaneError):
                work = None  # the traceback keeps this frame, and the exchange would keep the group's connections
                raise
            # Nothing can follow. Ranks that do not wait for the one that was lost hear of it from our connections:
            # they close with the group and its last exchange.
            self._pending = self._group = work = None
            raise _agreed(f"{where}: the exchange with ranks {some_of(self.global_ranks)} broke: {error}") from error

    def _check(self, where: str, start: float) -> None:
        if self._control_c:
            raise _agreed(
                f"{where}: Control-C ended an exchange of this rank ({self._control_c}), so it has left the group; "
                "build a new loader"
            )
        if self._interrupted or self._group is None:
            raise _agreed(f"{where}: interrupted, because this rank's loader was closed")
        if self.clock.waited() - start > self.timeout_s:
            missing = self._roll_call()
            if missing is None:
                raise _agreed(
                    f"{where}: some of ranks {some_of(self.global_ranks)} did not arrive within {self.timeout_s} s; "
                    "which ones cannot be told, because the store of torch.distributed does not answer: most likely "
                    "the rank that holds it (rank 0, unless the launcher does) is stopped or gone"
                )
            raise _agreed(
                f"{where}: ranks {some_of(missing)} did not arrive within {self.timeout_s} s",
                missing[0] if missing else None,
            )

    def _roll_call(self) -> list[int] | None:
        """Who waits for nobody; None when the store that would know does not answer.

        Ranks whose limit passes at about the same time find each other here, in whichever exchange they wait: a
        broadcast may be over on one rank while it keeps another waiting.
        """
        store, mine, key = self._store, self.rank, "waiting/"
        missing: list[list[int]] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                store.set(f"{key}{mine}", "here")
                time.sleep(_ROLL_CALL_S)
                missing.append(
                    [rank for place, rank in enumerate(self.global_ranks) if not store.check([f"{key}{place}"])]
                )

        # In a thread of its own: a store whose process is stopped keeps its clients waiting, for minutes.
        asking = threading.Thread(target=ask, name="hp_nodes roll call", daemon=True)
        asking.start()
        asking.join(3 * _ROLL_CALL_S)
        return missing[0] if missing else None


def _await_abandoned() -> None:
    """Give back all groups that were left, each as soon as its pending exchange has ended."""
    while _abandoned:
        _forget_abandoned()
        time.sleep(_ABANDONED_POLL_S)


def _forget_abandoned() -> None:
    """Destroy groups that were left with an exchange pending which has ended since."""
    for pair in list(_abandoned):
        group, pending = pair
        if pending is None or pending.is_completed():
            with contextlib.suppress(ValueError):  # another thread was first
                _abandoned.remove(pair)
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))
        del pair, group, pending


def _patient(options: Any) -> Any:
    options.timeout = _NEVER
    return options


def _agreed(message: str, rank: int | None = None) -> DataPlaneError:
    error = DataPlaneError(message, rank=rank)
    error.agreed = True
    return error
