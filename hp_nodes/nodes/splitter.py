"""Split: cuts each record into its independent sequences, which are then planned one by one.

Takes windows with one record a key, gives windows with one sequence a key (``part`` numbers them). The sequences of a
record stay together in the reference: that is where they would be without balancing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.randomness import occurrence
from hp_nodes.types import SampleKey, Window

__all__ = ["Splitter"]


class Splitter(Stage[Window]):
    """Windows of sequences.

    Args:
        source: gives windows with ``samples``, one record a key.
        split_fn: record → its independent sequences, in order; at least one.
        seed: of per-sample randomness in ``split_fn``.
    """

    def __init__(
        self,
        source: BaseNode[Window],
        split_fn: Callable[[Any], Sequence[Any]],
        *,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        self.split_fn = split_fn
        self.seed = seed

    def next(self) -> Window:
        window = self.pull()
        records, reference = window.samples, window.reference
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            if records is None or reference is None:
                raise ValueError("the window has no samples; a SampleReader below the Splitter fills them")
            if len(records) != len(window.keys):
                raise ValueError(
                    f"the window has {len(records)} samples for {len(window.keys)} keys; a node that changes one "
                    "changes both (Window.take does)"
                )
            keys: list[SampleKey] = []
            samples: list[Any] = []
            bins: list[int] = []
            for key, record, home in zip(window.keys, records, reference.tolist(), strict=True):
                place.at(key)
                with occurrence(self.seed, window.epoch, key.position):
                    parts = list(self.split_fn(record))
                if not parts:
                    raise ValueError("split_fn gave no sequence; accepted: at least one for each record")
                keys.extend([SampleKey(key.position, key.index, part) for part in range(len(parts))])
                samples.extend(parts)
                bins.extend([home] * len(parts))
        reference = np.array(bins, dtype=np.int32)
        return self.give(replace(window, keys=tuple(keys), samples=tuple(samples), reference=reference))
