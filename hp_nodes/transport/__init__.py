"""How ranks find and reach each other: topology, exchanges, wire format."""

from __future__ import annotations

from typing import Any, Literal

from hp_nodes.transport.in_process import InProcessTransport, VirtualMesh, VirtualWorld, run_ranks
from hp_nodes.transport.protocol import ConsumerClock, TensorTransport, Transport
from hp_nodes.transport.single import SingleRankTransport
from hp_nodes.transport.topology import DataTopology

__all__ = [
    "ConsumerClock",
    "DataTopology",
    "InProcessTransport",
    "SingleRankTransport",
    "TensorTransport",
    "Transport",
    "VirtualMesh",
    "VirtualWorld",
    "create_transport",
    "run_ranks",
]

Scope = Literal["data_parallel", "model_parallel", "all"]


def create_transport(
    topology: DataTopology,
    scope: Scope = "data_parallel",
    *,
    timeout_s: float = 300.0,
    backend: Literal["gloo", "nccl", "hccl"] = "gloo",
    device: Any = None,
) -> Transport:
    """The transport of one of this rank's groups. Every member of the group calls this at the same point.

    Args:
        topology: from :meth:`DataTopology.from_mesh`.
        scope: ``"data_parallel"``: the constructors, by data rank; ``"model_parallel"``: the ranks of this coordinate,
            the constructor first; ``"all"``: every rank of the mesh.
        timeout_s: limit for making the group, and for a consumer's wait in an exchange.
        backend: of real ranks. "nccl" and "hccl": buffers on ``device``, a self-test at once, and exchanges that the
            consuming thread launches; see :mod:`hp_nodes.transport.device`.
        device: of "nccl" and "hccl"; None: the current one.

    Raises:
        ValueError: an unknown scope, the data-parallel group of a rank that is not a constructor, or a backend whose
            device is not here.
        RuntimeError: a member did not come, or a backend returned wrong bytes on this rank.
    """
    members = {
        "data_parallel": topology.constructor_ranks,
        "model_parallel": topology.model_parallel_ranks,
        "all": topology.all_ranks,
    }
    if scope not in members:
        raise ValueError(f"scope is {scope!r}; accepted: {sorted(members)}")
    ranks = members[scope]
    if topology.global_rank not in ranks:
        raise ValueError(f"rank {topology.global_rank} is no constructor; the data-parallel group is {ranks}")
    if len(ranks) == 1:
        return SingleRankTransport(topology.global_rank, timeout_s)
    if topology.world is not None:
        return InProcessTransport(topology.world, ranks, ranks.index(topology.global_rank), scope, timeout_s)
    if backend != "gloo":
        from hp_nodes.transport.device import create_device_transport

        return create_device_transport(ranks, topology.global_rank, timeout_s, backend=backend, device=device)
    from hp_nodes.transport.distributed import GroupTransport

    return GroupTransport(ranks, topology.global_rank, timeout_s)
