"""Who this rank is: its data-parallel coordinate, and which ranks share it.

Derived from a named device mesh alone; a virtual mesh of :func:`hp_nodes.transport.run_ranks` goes wherever a torch
DeviceMesh does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

__all__ = ["DATA_PARALLEL_NAMES", "DataTopology", "Mesh"]

DATA_PARALLEL_NAMES = ("dp_replicate", "dp_shard", "dp")
"""Mesh dimensions that are data parallel unless the caller names others."""


class Mesh(Protocol):
    """What is used of ``torch.distributed.device_mesh.DeviceMesh``."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...

    @property
    def mesh(self) -> Any: ...

    def get_coordinate(self) -> Any: ...

    def get_rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DataTopology:
    """The data-parallel view of a mesh, from one rank.

    Attributes:
        global_rank: this process.
        data_rank: this rank's data-parallel coordinate, 0 <= data_rank < data_parallel_size.
        data_parallel_size: number of data-parallel coordinates.
        is_constructor: True on the one rank of each coordinate that samples, reads, plans and packs.
        constructor_ranks: global rank of each coordinate's constructor, by data rank.
        model_parallel_ranks: global ranks that share this coordinate, the constructor first.
        all_ranks: every global rank of the mesh, ascending.
    """

    global_rank: int
    data_rank: int
    data_parallel_size: int
    is_constructor: bool
    constructor_ranks: tuple[int, ...]
    model_parallel_ranks: tuple[int, ...]
    all_ranks: tuple[int, ...]
    world: Any = field(default=None, repr=False, compare=False)
    """The virtual world of an in-process mesh; None with torch.distributed."""

    @classmethod
    def single(cls) -> DataTopology:
        """One rank alone."""
        return cls(0, 0, 1, True, (0,), (0,), (0,))

    @classmethod
    def from_mesh(cls, mesh: Mesh, dp_dim_names: Sequence[str] | None = None) -> DataTopology:
        """Read a mesh with named dimensions.

        Args:
            mesh: a DeviceMesh, or the mesh that ``run_ranks`` hands out.
            dp_dim_names: the data-parallel dimensions, outermost first. None: those of ``dp_replicate``, ``dp_shard``,
                ``dp`` that the mesh has, in mesh order.

        Raises:
            ValueError: the mesh has no names, lacks a named dimension, or does not contain this rank.
        """
        names = getattr(mesh, "mesh_dim_names", None)
        if not names:
            raise ValueError(f"the mesh has no dimension names ({mesh!r}); pass mesh_dim_names when making it")
        data_axes = _data_axes(tuple(names), dp_dim_names)
        ranks = np.asarray(mesh.mesh, dtype=np.int64)
        global_rank = int(mesh.get_rank())
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                f"rank {global_rank} is not part of the mesh, which holds ranks {sorted(ranks.ravel().tolist())}"
            )
        other_axes = tuple(axis for axis in range(ranks.ndim) if axis not in data_axes)
        by_coordinate = ranks.transpose(data_axes + other_axes)
        by_coordinate = by_coordinate.reshape(int(np.prod(by_coordinate.shape[: len(data_axes)])), -1)
        data_rank = int(np.flatnonzero((by_coordinate == global_rank).any(axis=1))[0])
        peers = tuple(int(rank) for rank in by_coordinate[data_rank])
        return cls(
            global_rank=global_rank,
            data_rank=data_rank,
            data_parallel_size=len(by_coordinate),
            is_constructor=peers[0] == global_rank,
            constructor_ranks=tuple(int(rank) for rank in by_coordinate[:, 0]),
            model_parallel_ranks=peers,
            all_ranks=tuple(sorted(int(rank) for rank in ranks.ravel())),
            world=getattr(mesh, "world", None),
        )


def _data_axes(names: tuple[str, ...], dp_dim_names: Sequence[str] | None) -> tuple[int, ...]:
    if dp_dim_names is None:
        axes = tuple(axis for axis, name in enumerate(names) if name in DATA_PARALLEL_NAMES)
        if not axes:
            raise ValueError(
                f"mesh dimensions {names} include none of {DATA_PARALLEL_NAMES}; "
                "name the data-parallel ones with dp_dim_names"
            )
        return axes
    missing = [name for name in dp_dim_names if name not in names]
    if missing:
        raise ValueError(f"dp_dim_names {tuple(dp_dim_names)}: the mesh has no {missing}; it has {names}")
    return tuple(names.index(name) for name in dp_dim_names)
