"""The batch sampler of one dataset: in order, or shuffled anew in each epoch, with nothing stored for either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from hp_nodes.samplers.contract import int_at_least
from hp_nodes.samplers.global_order import GlobalOrderSampler, check_order, digest
from hp_nodes.samplers.permutation import KeyedPermutation

__all__ = ["DistributedBatchSampler", "IndexMapping"]

IndexMapping = Sequence[SupportsIndex] | NDArray[np.integer[Any]] | Callable[[int], SupportsIndex]

_PROBES = 64


class DistributedBatchSampler(GlobalOrderSampler):
    """Lists of ``micro_batch_size`` dataset indices for rank ``dp_rank`` of ``dp_world_size``.

    The order is a pure function of (seed, epoch, global_batch_size, total_samples): it does not depend on the number of
    ranks or the micro-batch size, so a state saved at the end of a step resumes on any of them that divide the global
    batch. A dataset of 10**12 records starts at once.

    Args:
        total_samples: samples of an epoch; the dataset's length, unless ``index_mapping`` says otherwise.
        micro_batch_size: indices in each list.
        global_batch_size: samples of a step over all ranks, a multiple of ``micro_batch_size * dp_world_size``.
        dp_rank, dp_world_size: this data-parallel rank and how many there are.
        order: "sequential", or "shuffle": a permutation keyed by seed and epoch.
        seed: of the shuffle.
        index_mapping: the dataset index of each place, as a sequence or a function, applied after the permutation. The
            fingerprint knows it by what it gives for 64 places spread over the epoch.

    Raises:
        ValueError: an argument is out of range; while iterating, the mapping gave no index.
    """

    def __init__(
        self,
        total_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        *,
        order: str = "sequential",
        seed: int = 0,
        index_mapping: IndexMapping | None = None,
    ) -> None:
        super().__init__(total_samples, micro_batch_size, global_batch_size, dp_rank, dp_world_size)
        self.order = check_order(order)
        self.seed = int_at_least("seed", seed, 0)
        self.index_mapping = index_mapping
        if index_mapping is not None and not callable(index_mapping):
            _check_mapping(index_mapping, self.total_samples)

    def indices(self, places: NDArray[np.int64]) -> list[int]:
        if self.order == "shuffle":
            places = KeyedPermutation(self.total_samples, self.seed, self.epoch)(places)
        return self._mapped(places)

    def fingerprint(self) -> dict[str, Any]:
        mapping = None
        if self.index_mapping is not None:
            probes = sorted({place * (self.total_samples - 1) // (_PROBES - 1) for place in range(_PROBES)})
            mapping = digest(self._mapped(np.array(probes, np.int64)))
        return {
            "type": type(self).__name__,
            "total_samples": self.total_samples,
            "global_batch_size": self.global_batch_size,
            "order": self.order,
            "seed": self.seed if self.order == "shuffle" else None,
            "index_mapping": mapping,
        }

    def _mapped(self, places: NDArray[np.int64]) -> list[int]:
        mapping = self.index_mapping
        unmapped: list[int] = places.tolist()
        if mapping is None:
            return unmapped
        at = mapping if callable(mapping) else mapping.__getitem__
        return [_as_index(at(place), place) for place in unmapped]


def _check_mapping(mapping: Any, total_samples: int) -> None:
    if not (hasattr(mapping, "__getitem__") and hasattr(mapping, "__len__")):
        raise ValueError(
            f"index_mapping is a {type(mapping).__name__}; accepted: a sequence or a callable, place -> dataset index"
        )
    if len(mapping) < total_samples:
        raise ValueError(f"index_mapping has {len(mapping)} entries; accepted: at least total_samples {total_samples}")


def _as_index(value: SupportsIndex, place: int) -> int:
    if hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_)):
        value = value.__index__()
    return int_at_least(f"index_mapping of place {place}", value, 0)
