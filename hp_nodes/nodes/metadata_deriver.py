"""Metadata derivation: what planning needs to know of each sample.

Takes windows of samples (online) or of keys (precomputed metadata), gives them with ``metadata``, ``tokens`` and
``costs``. Precomputed metadata is looked up once for a whole window, before any record is read. Cost models run here,
where the sample is: only numbers travel afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.metadata_table import MetadataTable
from hp_nodes.nodes.stage import Stage
from hp_nodes.types import SampleMetadata, Window, WorkloadCost

__all__ = ["MetadataDeriver"]


class MetadataDeriver(Stage[Window]):
    """Windows with metadata, from the samples or from a table by dataset index.

    Args:
        source: gives windows with ``samples``, or with keys when ``metadata`` is given.
        metadata_fn: sample → :class:`SampleMetadata`.
        metadata: by dataset index, see :mod:`hp_nodes.nodes.metadata_table`; exactly one of the two is given.
        cost_model: :class:`SampleMetadata` → :class:`WorkloadCost`; None takes ``metadata.cost``. One that has
            ``costs(metadata) → float64[n]`` as well (the ``llm`` cost of each) is asked once for the whole window.

    Raises:
        ValueError: both or neither of ``metadata_fn`` and ``metadata``, or ``metadata`` is no table of it.
        IndexError: (on ``next``) an index outside the table, which it names.
    """

    def __init__(
        self,
        source: BaseNode[Window],
        metadata_fn: Callable[[Any], SampleMetadata] | None = None,
        *,
        metadata: Any = None,
        cost_model: Callable[[SampleMetadata], WorkloadCost] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if (metadata_fn is None) == (metadata is None):
            given = "both" if metadata is not None else "neither"
            raise ValueError(f"MetadataDeriver got {given} of metadata_fn and metadata; accepted: exactly one")
        self.metadata_fn = metadata_fn
        self.metadata = metadata
        self.cost_model = cost_model
        self._table = None if metadata is None else MetadataTable(metadata)
        self._costs_of_many = _costs_of_many(cost_model)

    def next(self) -> Window:
        window = self.pull()
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            found = self._from_table(window, place) if self._table is not None else self._from_samples(window, place)
            costs = self._costs(window, found, place)
        tokens = np.fromiter((metadata.pack_tokens for metadata in found), dtype=np.int64, count=len(found))
        return self.give(replace(window, metadata=tuple(found), tokens=tokens, costs=costs))

    def _from_samples(self, window: Window, place: failing_at) -> list[SampleMetadata]:
        if window.samples is None:
            raise ValueError("the window has no samples; a SampleReader below the MetadataDeriver fills them")
        assert self.metadata_fn is not None
        found = []
        if len(window.samples) != len(window.keys):
            raise ValueError(
                f"the window has {len(window.samples)} samples for {len(window.keys)} keys; a node that changes one "
                "changes both (Window.take does)"
            )
        for key, sample in zip(window.keys, window.samples, strict=True):
            place.at(key)
            described = self.metadata_fn(sample)
            if not isinstance(described, SampleMetadata):
                raise TypeError(f"metadata_fn gave {described!r}; accepted: a SampleMetadata")
            found.append(described)
        place.at(None)
        return found

    def _from_table(self, window: Window, place: failing_at) -> list[SampleMetadata]:
        assert self._table is not None
        indices = np.fromiter((key.index for key in window.keys), dtype=np.int64, count=len(window.keys))
        outside = np.flatnonzero((indices < 0) | (indices >= len(self._table)))
        if len(outside):
            place.at(window.keys[outside[0]])
            raise IndexError(f"index {indices[outside[0]]} is outside the metadata of {len(self._table)} entries")
        found = []
        for key, entry in zip(window.keys, self._table.entries(indices), strict=True):
            place.at(key)
            found.append(self._table.described(entry))
        place.at(None)
        return found

    def _costs(self, window: Window, found: Sequence[SampleMetadata], place: failing_at) -> NDArray[np.float64]:
        if self._costs_of_many is not None:
            costs = self._at_once(found)
            if costs is not None:
                return costs
        costs = np.empty(len(found))
        for number, (key, metadata) in enumerate(zip(window.keys, found, strict=True)):
            place.at(key)
            cost = metadata.cost if self.cost_model is None else self.cost_model(metadata)
            if not isinstance(cost, WorkloadCost):
                raise TypeError(f"the cost model returned {cost!r}; accepted: a WorkloadCost")
            costs[number] = cost.llm
        return costs

    def _at_once(self, found: Sequence[SampleMetadata]) -> NDArray[np.float64] | None:
        """All costs by one call; None when they have to be computed one by one to say whose is wrong."""
        assert self._costs_of_many is not None
        try:
            costs = np.asarray(self._costs_of_many(found), dtype=np.float64)
        except Exception:
            return None
        if costs.shape != (len(found),):
            raise TypeError(
                f"the cost model's costs() gave shape {costs.shape} for {len(found)} samples; accepted: one cost each"
            )
        return costs if (np.isfinite(costs) & (costs >= 0)).all() else None


def _costs_of_many(cost_model: Any) -> Callable[[Sequence[SampleMetadata]], Any] | None:
    """The model's ``costs``, unless a subclass has a newer ``__call__`` that it does not know of."""
    for kind in type(cost_model).__mro__:
        if "costs" in vars(kind):
            many: Callable[[Sequence[SampleMetadata]], Any] = cost_model.costs
            return many
        if "__call__" in vars(kind):
            return None
    return None
