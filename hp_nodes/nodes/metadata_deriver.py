"""Metadata derivation: what planning needs to know of each sample.

Takes windows of samples (online) or of keys (precomputed metadata), gives them with ``metadata``, ``tokens`` and
``costs``. Cost models run here, where the sample is: only numbers travel afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.types import SampleMetadata, Window, WorkloadCost

__all__ = ["MetadataDeriver"]


class MetadataDeriver(Stage[Window]):
    """Windows with metadata, from the samples or from a table by dataset index.

    Args:
        source: gives windows with ``samples``, or with keys when ``metadata`` is given.
        metadata_fn: sample → :class:`SampleMetadata`.
        metadata: dataset index → :class:`SampleMetadata`; exactly one of the two is given.
        cost_model: :class:`SampleMetadata` → :class:`WorkloadCost`; None takes ``metadata.cost``.

    Raises:
        ValueError: both or neither of ``metadata_fn`` and ``metadata``.
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

    def next(self) -> Window:
        window = self.pull()
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            found, costs = [], np.empty(len(window.keys))
            for number, (key, item) in enumerate(zip(window.keys, self._items(window), strict=True)):
                place.at(key)
                metadata = self._describe(item)
                cost = metadata.cost if self.cost_model is None else self.cost_model(metadata)
                if not isinstance(cost, WorkloadCost):
                    raise TypeError(f"the cost model returned {cost!r}; accepted: a WorkloadCost")
                costs[number] = cost.llm
                found.append(metadata)
        tokens = np.fromiter((metadata.pack_tokens for metadata in found), dtype=np.int64, count=len(found))
        return self.give(replace(window, metadata=tuple(found), tokens=tokens, costs=costs))

    def _items(self, window: Window) -> Iterable[Any]:
        if self.metadata is not None:
            return (key.index for key in window.keys)
        if window.samples is None:
            raise ValueError("the window has no samples; a SampleReader below the MetadataDeriver fills them")
        return window.samples

    def _describe(self, item: Any) -> SampleMetadata:
        described = self.metadata[item] if self.metadata_fn is None else self.metadata_fn(item)
        if not isinstance(described, SampleMetadata):
            source = "metadata[index]" if self.metadata_fn is None else "metadata_fn"
            raise TypeError(f"{source} gave {described!r}; accepted: a SampleMetadata")
        return described
