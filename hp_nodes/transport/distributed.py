"""Ranks as processes: Gloo, over the store that torch.distributed was initialised with.

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
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, PrefixStore
from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport.protocol import Bytes, ConsumerClock

__all__ = ["GlooTransport"]

_SLICE = datetime.timedelta(milliseconds=50)
_NEVER = datetime.timedelta(days=7)
_ROLL_CALL_S = 1.0
_RENDEZVOUS_POLL_S = 0.005
_made: dict[str, int] = {}
_made_lock = threading.Lock()


class GlooTransport:
    """A Gloo group made by its members only.

    Args:
        global_ranks: the members, in the order that places are numbered; all of them construct it at the same point.
        global_rank: this process.
        timeout_s: limit for making the group, and for the consumer's wait in each exchange.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a member did not come.
    """

    def __init__(self, global_ranks: tuple[int, ...], global_rank: int, timeout_s: float) -> None:
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
        self._interrupted = False
        self._pending: Any = None
        self._store = _rendezvous(global_ranks, self.rank, timeout_s)
        limit = datetime.timedelta(seconds=timeout_s)
        self._group: Any = ProcessGroupGloo(self._store, self.rank, self.size, limit)

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        out = torch.empty((self.size, len(local)), dtype=torch.uint8)
        options = _patient(AllgatherOptions())
        self._wait(where, lambda: self._group.allgather([list(out.unbind(0))], [_tensor(local)], options))
        return out.numpy()

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        options = _patient(BroadcastOptions())
        options.rootRank = root
        options.rootTensor = 0
        self._wait(where, lambda: self._group.broadcast([_tensor(buffer)], options))

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        out = torch.empty(int(sum(receive_sizes)), dtype=torch.uint8)
        incoming, outgoing = [int(size) for size in receive_sizes], [int(size) for size in send_sizes]
        options = _patient(AllToAllOptions())
        self._wait(where, lambda: self._group.alltoall_base(out, _tensor(send), incoming, outgoing, options))
        return out.numpy()

    def mark(self, name: str) -> None:
        """Nobody waits for marks here."""

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Leave the group. An exchange that is still pending is abandoned."""
        self._interrupted = True
        group, self._group = self._group, None
        if group is not None and self._pending is not None:
            # Gloo's destructor waits for what is pending (abort does not end it), which would keep the process from
            # ending: this group is never destroyed. Its sockets close with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

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
                    work.wait(_SLICE)
            work.wait()
            self._pending = None
        except (RuntimeError, ValueError) as error:
            if isinstance(error, DataPlaneError):
                raise
            # Nothing can follow. Ranks that do not wait for the one that was lost hear of it from our connections:
            # they close with the group and its last exchange.
            self._pending = self._group = work = None
            raise _agreed(f"{where}: the exchange with ranks {self.global_ranks} broke: {error}") from error

    def _check(self, where: str, start: float) -> None:
        if self._interrupted or self._group is None:
            raise _agreed(f"{where}: interrupted, because this rank's loader was closed")
        if self.clock.waited() - start > self.timeout_s:
            missing = self._roll_call()
            if missing is None:
                raise _agreed(
                    f"{where}: some of ranks {self.global_ranks} did not arrive within {self.timeout_s} s; which ones "
                    "cannot be told, because the store of torch.distributed does not answer: most likely the rank that "
                    "holds it (rank 0, unless the launcher does) is stopped or gone"
                )
            raise _agreed(
                f"{where}: ranks {missing} did not arrive within {self.timeout_s} s", missing[0] if missing else None
            )

    def _roll_call(self) -> list[int] | None:
        """Who does not wait in this exchange; None when the store that would know does not answer.

        Ranks whose limit passes at about the same time find each other here.
        """
        store, mine, key = self._store, self.rank, f"waiting/{self.exchanges}/"
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


def _rendezvous(global_ranks: tuple[int, ...], place: int, timeout_s: float) -> Any:
    """A store that only this group uses, whatever earlier attempts of the same ranks left behind, or earlier processes:
    torchrun keeps its store when it restarts a job.

    Each member brings a token of its own, and the first one answers each token with the name of the group until every
    member has come. So neither a token nor an answer of the past is taken for one of now.
    """
    store = c10d._get_default_store()
    members = (
        "-".join(map(str, global_ranks))
        if len(global_ranks) <= 16
        else uuid.uuid5(uuid.NAMESPACE_OID, str(global_ranks)).hex
    )
    with _made_lock:
        number = _made.get(members, 0)
    base = f"hp_nodes/{members}/{number}/"
    try:
        name = (
            _name_to_all(store, base, len(global_ranks), timeout_s)
            if place == 0
            else _name_from_first(store, base, place, timeout_s)
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"not all of ranks {global_ranks} came to make their group within {timeout_s} s: {error}"
        ) from error
    with _made_lock:
        _made[members] = number + 1
    return PrefixStore(f"hp_nodes/{name}", store)


def _name_to_all(store: Any, base: str, size: int, timeout_s: float) -> str:
    """The first member: names the group and tells every other, again where another token stands meanwhile."""
    name = uuid.uuid4().hex
    answered: dict[int, str] = dict.fromkeys(range(1, size), "")
    deadline = time.monotonic() + timeout_s
    while answered:
        for place, token in list(answered.items()):
            if token and store.check([f"{base}{token}/came"]):
                del answered[place]
                for key in (f"{base}{token}/came", f"{base}{token}/name", f"{base}{place}"):
                    store.delete_key(key)
            elif store.check([f"{base}{place}"]):
                found = store.get(f"{base}{place}").decode()
                if found != token:
                    store.set(f"{base}{found}/name", name)
                    answered[place] = found
        if answered and time.monotonic() > deadline:
            raise RuntimeError(f"places {sorted(answered)} of {size} are missing")
        time.sleep(_RENDEZVOUS_POLL_S if answered else 0)
    return name


def _name_from_first(store: Any, base: str, place: int, timeout_s: float) -> str:
    token = uuid.uuid4().hex
    store.set(f"{base}{place}", token)
    try:
        store.wait([f"{base}{token}/name"], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        store.delete_key(f"{base}{place}")
        raise
    name: str = store.get(f"{base}{token}/name").decode()
    store.set(f"{base}{token}/came", "")
    return name


def _patient(options: Any) -> Any:
    options.timeout = _NEVER
    return options


def _agreed(message: str, rank: int | None = None) -> DataPlaneError:
    error = DataPlaneError(message, rank=rank)
    error.agreed = True
    return error


def _tensor(array: NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
