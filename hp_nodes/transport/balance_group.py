"""Balancing groups: parts of the data-parallel ranks among which external steps are planned and samples move.

Takes the transport of all data-parallel ranks, gives that of this rank's group: the ranks of its node, or a chunk of
consecutive ones. Both share a clock, and ending a wait in one ends it in the other, since one thread uses both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport import DataTopology, Transport, create_transport
from hp_nodes.transport.handed_over import HandedOverTransport, launched_by_consumer
from hp_nodes.transport.protocol import Bytes

__all__ = ["CoupledTransport", "create_balance_group"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def create_balance_group(topology: DataTopology, data: Transport, group_size: int | None = None) -> Transport:
    """The transport of this rank's balancing group. Every data-parallel rank calls this at the same point.

    Args:
        topology: of this rank, which is a constructor.
        data: the transport of all data-parallel ranks.
        group_size: consecutive data ranks of a group; it divides their number. None: one group per node, where a node
            is what has one host name and one boot (as NCCL tells nodes apart); virtual ranks are one node.

    Returns:
        ``data`` itself where the group is everybody, else a :class:`CoupledTransport`.

    Raises:
        ValueError: ``group_size`` is no int >= 1 that divides the ranks.
    """
    if group_size is not None:
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1 or data.size % group_size:
            raise ValueError(
                f"balance_group_size is {group_size!r}; accepted: an int >= 1 that divides the {data.size} data ranks"
            )
        first = data.rank // group_size * group_size
        places = list(range(first, first + group_size))
    else:
        places = _places_on_this_node(data) if topology.world is None else list(range(data.size))
    if len(places) == data.size:
        return data
    members = tuple(data.global_ranks[place] for place in places)
    group = _group_of(topology, data, members)
    group.clock = data.clock
    return CoupledTransport(group, data)


def _group_of(topology: DataTopology, data: Transport, members: tuple[int, ...]) -> Transport:
    """Over the backend of ``data``. One that the consuming thread launches is launched with ``data``: one background
    thread uses both, and its consumer launches in one order.
    """
    if isinstance(data, HandedOverTransport) and topology.world is None and len(members) > 1:
        from hp_nodes.transport.device import create_beside

        return create_beside(data, members, topology.global_rank)
    own = dataclasses.replace(topology, constructor_ranks=members)
    group = create_transport(own, timeout_s=data.timeout_s)
    return HandedOverTransport(group, beside=data) if isinstance(data, HandedOverTransport) else group


def _places_on_this_node(data: Transport) -> list[int]:
    boot = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
    digest = hashlib.blake2b(f"{socket.gethostname()} {boot}".encode(), digest_size=16).digest()
    told = data.all_gather(np.frombuffer(digest, dtype=np.uint8), "balancing groups: nodes")
    return [int(place) for place in np.flatnonzero((told == told[data.rank]).all(axis=1))]


class CoupledTransport:
    """``transport``, used by the same thread as ``other``: interrupting it interrupts both.

    ``lost`` is True once an exchange of it failed, after which none can follow.
    """

    def __init__(self, transport: Transport, other: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.global_ranks = transport.global_ranks
        self.timeout_s = transport.timeout_s
        self.clock = transport.clock
        self.lost = False
        self.handed_over = launched_by_consumer(transport)
        self._transport = transport
        self._other = other

    @property
    def exchanges(self) -> int:
        return self._transport.exchanges

    @exchanges.setter
    def exchanges(self, value: int) -> None:
        self._transport.exchanges = value

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        with self._noting_loss():
            return self._transport.all_gather(local, where)

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        with self._noting_loss():
            self._transport.broadcast(buffer, root, where)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        with self._noting_loss():
            return self._transport.all_to_all(send, send_sizes, receive_sizes, where)

    def mark(self, name: str) -> None:
        self._transport.mark(name)

    def interrupt(self) -> None:
        self._transport.interrupt()
        self._other.interrupt()

    def close(self) -> None:
        """Give back this transport; the other has an owner of its own."""
        self._transport.close()

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except DataPlaneError:
            self.lost = True
            raise
