"""The transport of one rank: every exchange returns at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hp_nodes.transport.protocol import Bytes, ConsumerClock

__all__ = ["SingleRankTransport"]


class SingleRankTransport:
    """A group of one."""

    def __init__(self, global_rank: int = 0, timeout_s: float = 300.0) -> None:
        self.rank = 0
        self.size = 1
        self.global_ranks: tuple[int, ...] = (global_rank,)
        self.timeout_s = timeout_s
        self.clock = ConsumerClock()
        self.exchanges = 0

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        self.exchanges += 1
        return np.array(local[None])

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        self.exchanges += 1

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        self.exchanges += 1
        return np.array(send)

    def mark(self, name: str) -> None:
        """Nobody waits for marks here."""

    def interrupt(self) -> None:
        """Nothing ever runs that could be interrupted."""

    def close(self) -> None:
        """Nothing is held."""
