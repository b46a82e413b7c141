"""Ranks as processes: torch.distributed over Gloo.

Every collective is issued asynchronously and waited for in short slices, so that a stop flag and our own time limit can
end the wait; a synchronous one could not be woken. Gloo's own limit is set far away: a background exchange may rightly
wait for as long as another rank evaluates.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport.protocol import Bytes, ConsumerClock

__all__ = ["GlooTransport"]

_SLICE = datetime.timedelta(milliseconds=50)
_NEVER = datetime.timedelta(days=7)


class GlooTransport:
    """A Gloo process group of its own, made by its members only.

    Args:
        global_ranks: the members, in the order that places are numbered; all of them construct it at the same point.
        global_rank: this process.
        timeout_s: limit for making the group, and for the consumer's wait in each exchange.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a member did not come.
    """

    def __init__(self, global_ranks: tuple[int, ...], global_rank: int, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised; call init_process_group before building the loader")
        self.rank = global_ranks.index(global_rank)
        self.size = len(global_ranks)
        self.global_ranks = global_ranks
        self.clock = ConsumerClock()
        self.exchanges = 0
        self.timeout_s = timeout_s
        self._interrupted = False
        # torch numbers a group's members by ascending global rank; ours are numbered by data rank.
        self._places = np.argsort(np.asarray(global_ranks))
        self._in_order = bool((np.diff(self._places) > 0).all())
        self._group: Any = dist.new_group(
            list(global_ranks),
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout_s),
            use_local_synchronization=True,
        )
        # Made under our limit, used under none of its own.
        dist.distributed_c10d._set_pg_timeout(_NEVER, self._group)  # type: ignore[attr-defined, unused-ignore]

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        out = torch.empty((self.size, len(local)), dtype=torch.uint8)
        self._wait(where, lambda: dist.all_gather(list(out.unbind(0)), _tensor(local), group=self._group, async_op=True))
        return out.numpy() if self._in_order else out.numpy()[np.argsort(self._places)]

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        tensor = _tensor(buffer)
        source = self.global_ranks[root]
        self._wait(where, lambda: dist.broadcast(tensor, source, group=self._group, async_op=True))

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        out = torch.empty(int(sum(receive_sizes)), dtype=torch.uint8)
        outgoing = [int(send_sizes[place]) for place in self._places]
        incoming = [int(receive_sizes[place]) for place in self._places]
        tensor = _tensor(send if self._in_order else _reordered(send, send_sizes, self._places))
        self._wait(
            where,
            lambda: dist.all_to_all_single(out, tensor, incoming, outgoing, group=self._group, async_op=True),
        )
        return out.numpy() if self._in_order else _reordered(out.numpy(), incoming, np.argsort(self._places))

    def interrupt(self) -> None:
        self._interrupted = True

    def close(self) -> None:
        """Leave the group. An exchange that is still pending is abandoned."""
        self._interrupted = True
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, RuntimeError):  # the trainer may have destroyed all groups before
                dist.destroy_process_group(group)

    def _wait(self, where: str, issue: Any) -> None:
        self.exchanges += 1
        start = self.clock.waited()
        if self._interrupted:
            raise self._error(f"{where}: interrupted, because this rank's loader was closed")
        try:
            work = issue()
            while not work.is_completed():
                if self._interrupted:
                    raise self._error(f"{where}: interrupted, because this rank's loader was closed")
                if self.clock.waited() - start > self.timeout_s:
                    raise self._error(f"{where}: not all ranks of {self.global_ranks} arrived within {self.timeout_s} s")
                try:
                    work.wait(_SLICE)
                except RuntimeError:
                    if work.is_completed():
                        raise
            work.wait()
        except DataPlaneError:
            raise
        except (RuntimeError, ValueError) as error:
            raise self._error(f"{where}: the exchange with ranks {self.global_ranks} broke: {error}") from error

    def _error(self, message: str) -> DataPlaneError:
        error = DataPlaneError(message)
        error.agreed = True
        return error


def _reordered(pieces: Bytes, sizes: Sequence[int], order: NDArray[np.intp]) -> Bytes:
    cut = np.split(pieces, np.cumsum(np.asarray(sizes, dtype=np.int64))[:-1])
    return np.concatenate([cut[place] for place in order])


def _tensor(array: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
