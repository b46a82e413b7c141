"""Tensors from device to device, over the device's own backend: what model-parallel delivery sends.

The consuming thread launches such a broadcast at delivery, the same place on every rank, so its order against the
trainer's own collectives is the same everywhere. The host does not wait for it. That the others are there, and alive, a
header over Gloo has told a moment before; one that dies in between is found by the trainer's own collectives.

Not run on a device yet, neither CUDA nor NPU: its tests let it run over Gloo with tensors on the host.
"""

from __future__ import annotations

import datetime

import torch
from torch._C._distributed_c10d import BroadcastOptions

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport.device import DEVICE_OF, DeviceLane, backend_problem, backend_version
from hp_nodes.transport.distributed import GroupTransport, HostLane

__all__ = ["DeviceTensorTransport", "create_tensor_transport"]

_NEVER = datetime.timedelta(days=7)


class DeviceTensorTransport(GroupTransport):
    """Implements :class:`hp_nodes.transport.TensorTransport`.

    Args:
        global_ranks, global_rank, timeout_s: see :class:`hp_nodes.transport.distributed.GroupTransport`.
        backend: "nccl" or "hccl"; "gloo" on the host stands in for them.
        device: where this rank's tensors are, with its index.
    """

    def __init__(
        self, global_ranks: tuple[int, ...], global_rank: int, timeout_s: float, *, backend: str, device: torch.device
    ) -> None:
        on_host = DEVICE_OF[backend] == "cpu"
        super().__init__(global_ranks, global_rank, timeout_s, HostLane() if on_host else DeviceLane(backend, device))
        self.device = device

    def broadcast_tensor(self, tensor: torch.Tensor, root: int, where: str) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = root, 0, _NEVER
        if self.device.type == "cpu":
            self._wait(where, lambda: self._group.broadcast([tensor], options))
            return
        self.exchanges += 1
        self._check(where, self.clock.waited())
        try:
            self._group.broadcast([tensor], options).wait()  # of the stream, not of the host
        except RuntimeError as error:
            broken = DataPlaneError(f"{where}: the broadcast among ranks {self.global_ranks} broke: {error}")
            broken.agreed = True
            raise broken from error


def create_tensor_transport(
    global_ranks: tuple[int, ...], global_rank: int, timeout_s: float, *, device: torch.device | str
) -> DeviceTensorTransport:
    """A transport of the backend of ``device``, tested. Every member calls this at the same point.

    Raises:
        ValueError: the device is not here.
        RuntimeError: a member did not come, or other bytes arrived than were sent.
    """
    place = torch.device(device)
    backend = {kind: name for name, kind in DEVICE_OF.items()}.get(place.type, "none")
    problem = backend_problem(backend, place)
    if problem is not None:
        raise ValueError(problem)
    index: int | None = place.index
    if place.type != "cpu" and index is None:
        place = torch.device(place.type, torch.get_device_module(place).current_device())
    transport = DeviceTensorTransport(global_ranks, global_rank, timeout_s, backend=backend, device=place)
    try:
        _self_test(transport, backend)
    except BaseException:
        transport.close()
        raise
    return transport


def _self_test(transport: DeviceTensorTransport, backend: str) -> None:
    for nbytes in (64, 100_032):
        sent = (torch.arange(nbytes, device=transport.device) % 251 + 1).to(torch.uint8)
        tensor = sent.clone() if transport.rank == 0 else torch.zeros_like(sent)
        transport.broadcast_tensor(tensor, 0, "self-test of tensors")
        if not torch.equal(tensor, sent):
            raise RuntimeError(
                f"backend {backend!r} ({backend_version(backend)}) broadcasts wrong bytes to rank "
                f"{transport.global_ranks[transport.rank]}; without a device the loader delivers over Gloo"
            )
