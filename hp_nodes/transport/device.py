"""NCCL and HCCL: exchanges over a device's own backend, in buffers on the device, on a stream of their own.

Such exchanges need one order on all ranks, the trainer's own collectives included, so they are launched by the
consuming thread (:class:`hp_nodes.transport.handed_over.HandedOverTransport`). Before anything is exchanged, a
self-test sends known bytes of uneven and of zero sizes: some releases of HCCL returned zeros instead.

No code here has run on a device yet: its tests let it run over Gloo with buffers on the host.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hp_nodes.transport.distributed import GroupTransport, HostLane, Lane
from hp_nodes.transport.handed_over import HandedOverTransport
from hp_nodes.transport.protocol import Bytes, Transport

__all__ = [
    "DEVICE_OF",
    "DeviceLane",
    "backend_problem",
    "backend_version",
    "create_beside",
    "create_device_transport",
    "self_test",
]

DEVICE_OF = {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"}
"""The type of device that each backend works on. Gloo stands in for the others in tests."""
_REST_S = 50e-6


def backend_problem(backend: str, device: torch.device | str | None = None) -> str | None:
    """Why a backend cannot be used here; None when it can.

    Args:
        device: where its buffers shall be; None: the current device of its type.
    """
    if backend not in DEVICE_OF:
        return f"backend is {backend!r}; accepted: {sorted(DEVICE_OF)}"
    kind = DEVICE_OF[backend]
    if device is not None and torch.device(device).type != kind:
        return f"backend {backend!r} with device {str(device)!r}; accepted with it: a {kind.upper()} device"
    if kind == "cpu":
        return None
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return f"backend {backend!r} needs a {kind.upper()} device, and there is none here; accepted here: 'gloo'"
    return None


def backend_version(backend: str) -> str:
    """What a person who reports a fault of a backend has to say."""
    found = [f"torch {torch.__version__}"]
    if backend == "nccl":
        with contextlib.suppress(Exception):
            found.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    if backend == "hccl":
        with contextlib.suppress(Exception):
            import torch_npu

            found.append(f"torch_npu {torch_npu.__version__}")
        with contextlib.suppress(Exception):
            found.append(f"CANN {torch.version.cann}")  # type: ignore[attr-defined]
    return ", ".join(found)


class DeviceLane:
    """Buffers on a device, and a stream on which they are filled, sent and read.

    Args:
        backend: "nccl" or "hccl".
        device: of that backend's type.
    """

    gathers_by_all_to_all = False

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend = backend
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    def make_group(self, store: Any, rank: int, size: int, limit: datetime.timedelta) -> Any:
        """Directly, as for Gloo: ``new_group`` names a group by how many this process has, which members that have made
        unequally many do not agree on.

        The backend's own limit is set far away: an exchange may rightly wait for as long as another rank evaluates.
        """
        never = datetime.timedelta(days=7)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = never
            return dist.ProcessGroupNCCL(store, rank, size, options)
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options._timeout = never
        return ProcessGroupHCCL(store, rank, size, options)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._module.device(self.device), self._module.stream(self._stream):
            yield

    def entered(self) -> AbstractContextManager[Any]:
        return self._entered()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def load(self, array: Bytes) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def unload(self, tensor: torch.Tensor) -> Bytes:
        """Waits for the copy, which is queued on this lane's stream behind the exchange."""
        return tensor.cpu().numpy()

    def rest(self, work: Any) -> None:
        # Not work.wait with a limit: NCCL gives the whole communicator up when that passes.
        time.sleep(_REST_S)


def create_device_transport(
    global_ranks: tuple[int, ...],
    global_rank: int,
    timeout_s: float,
    *,
    backend: str,
    device: torch.device | str | None = None,
) -> HandedOverTransport:
    """A transport over a device's backend, tested, whose exchanges the consuming thread launches.

    Args:
        global_ranks, global_rank, timeout_s: see :class:`hp_nodes.transport.distributed.GroupTransport`.
        backend: "nccl", "hccl"; "gloo" on the host stands in for them.
        device: where buffers are; None: the current device of the backend's type.

    Raises:
        ValueError: the backend's device is not here.
        RuntimeError: a member did not come, or the self-test failed on this rank.
    """
    problem = backend_problem(backend, device)
    if problem is not None:
        raise ValueError(problem)
    lane: Lane = HostLane()
    if DEVICE_OF[backend] != "cpu":
        module = getattr(torch, DEVICE_OF[backend])
        index = torch.device(device).index if device is not None else None
        place = torch.device(DEVICE_OF[backend], module.current_device() if index is None else index)
        lane = DeviceLane(backend, place)
    transport = GroupTransport(global_ranks, global_rank, timeout_s, lane)
    try:
        self_test(transport, backend)
        transport.exchanges = 0
    except BaseException:
        transport.close()
        raise
    return HandedOverTransport(transport)


def create_beside(data: HandedOverTransport, global_ranks: tuple[int, ...], global_rank: int) -> HandedOverTransport:
    """A transport of some of the ranks of ``data``, over the same backend and device, tested; launched where those of
    ``data`` are, by the same thread.

    Raises:
        RuntimeError: a member did not come, or the self-test failed on this rank.
    """
    lane = data.inner.lane if isinstance(data.inner, GroupTransport) else None
    backend, device = (lane.backend, lane.device) if isinstance(lane, DeviceLane) else ("gloo", None)
    made = create_device_transport(global_ranks, global_rank, data.timeout_s, backend=backend, device=device)
    return HandedOverTransport(made.inner, beside=data)


def self_test(transport: Transport, backend: str) -> None:
    """Exchange bytes that every rank can compute. Takes part in every exchange before it judges any.

    Raises:
        RuntimeError: other bytes arrived; it names the backend, its version and the exchange.
    """
    me, ranks = transport.rank, range(transport.size)
    wrong = []
    for nbytes in (1, 1000):
        got = transport.all_gather(_bytes(me, 0, nbytes), "self-test")
        if not all(np.array_equal(got[rank], _bytes(rank, 0, nbytes)) for rank in ranks):
            wrong.append(f"all_gather of {nbytes} bytes")
    for root in ranks:
        buffer = _bytes(root, 1, 777) if root == me else np.zeros(777, dtype=np.uint8)
        transport.broadcast(buffer, root, "self-test")
        if not np.array_equal(buffer, _bytes(root, 1, 777)):
            wrong.append(f"broadcast from place {root}")
    for name, size_of in (("uneven", _uneven), ("lonely", _lonely), ("empty", lambda *_: 0)):
        outgoing, incoming = [size_of(me, rank) for rank in ranks], [size_of(rank, me) for rank in ranks]
        send = np.concatenate([_bytes(me, rank + 2, size) for rank, size in zip(ranks, outgoing, strict=True)])
        got = transport.all_to_all(send, outgoing, incoming, "self-test")
        right = np.concatenate([_bytes(rank, me + 2, size) for rank, size in zip(ranks, incoming, strict=True)])
        if not np.array_equal(got, right):
            wrong.append(f"all_to_all of {name} sizes {incoming}")
    if wrong:
        raise RuntimeError(
            f"backend {backend!r} ({backend_version(backend)}) returns wrong bytes on rank "
            f"{transport.global_ranks[me]}: {'; '.join(wrong)}. Use communication_backend='gloo' with this version"
        )


def _bytes(sender: int, receiver: int, nbytes: int) -> Bytes:
    """Never all zero, and different for each pair."""
    return ((np.arange(nbytes) * 7 + sender * 31 + receiver * 13) % 255 + 1).astype(np.uint8)


def _uneven(sender: int, receiver: int) -> int:
    """No two alike, some zero."""
    return 0 if (sender + 2 * receiver) % 3 == 0 else 64 * (5 * sender + 3 * receiver + 1) + sender


def _lonely(sender: int, receiver: int) -> int:
    """Only the first sends, only to the last."""
    return 4096 if sender == 0 and receiver > 0 else 0
