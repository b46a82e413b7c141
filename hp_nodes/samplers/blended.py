"""The batch sampler of several datasets, mixed by weight, as one concatenated dataset.

The mix is exact at every place (see :mod:`hp_nodes.samplers.interleaving`), computed place by place, and does not
depend on the number of ranks; the state is that of any sampler here, an epoch and a count, however many datasets there
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.samplers.contract import int_at_least
from hp_nodes.samplers.global_order import GlobalOrderSampler, check_order, digest
from hp_nodes.samplers.interleaving import Interleaving
from hp_nodes.samplers.permutation import KeyedPermutation

__all__ = ["BlendedBatchSampler"]

_IN_CLEAR = 16


class BlendedBatchSampler(GlobalOrderSampler):
    """Indices into the concatenation of datasets (``torch.utils.data.ConcatDataset``), each read by its weight.

    Args:
        dataset_sizes: the length of each dataset.
        weights: the share of samples from each, in any unit.
        micro_batch_size, global_batch_size, dp_rank, dp_world_size: as for :class:`DistributedBatchSampler`.
        order: "sequential" or "shuffle", within each dataset; every pass over a dataset has a permutation of its own.
        seed: of the shuffle.
        on_end: what happens when a dataset has given all its records.
            "stop": the epoch ends before the first sample that is not there; each epoch is a new pass over all of them.
            "repeat": the dataset goes on with its next permutation. An epoch is then only a number of samples: the
            next one goes on where it ended, so no record comes a second time before all of its dataset came once.
        total_samples: samples of an epoch, with "repeat" only; None: as many as the datasets have records.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dataset_sizes: Sequence[int],
        weights: Sequence[float],
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        *,
        order: str = "sequential",
        seed: int = 0,
        on_end: str = "stop",
        total_samples: int | None = None,
    ) -> None:
        sizes = [int_at_least(f"size of dataset {i}", size, 1) for i, size in enumerate(dataset_sizes)]
        if len(sizes) != len(weights):
            raise ValueError(f"{len(weights)} weights for {len(sizes)} datasets; accepted: one for each")
        if on_end not in ("stop", "repeat"):
            raise ValueError(f"on_end is {on_end!r}; accepted: 'stop' or 'repeat'")
        if on_end == "stop" and total_samples is not None:
            raise ValueError(
                f"total_samples is {total_samples!r}, but with on_end='stop' the datasets' ends decide it; accepted: "
                "None"
            )
        self.dataset_sizes = sizes
        self.order = check_order(order)
        self.seed = int_at_least("seed", seed, 0)
        self.on_end = on_end
        self._interleaving = Interleaving(weights)
        self._offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        if on_end == "stop":
            total_samples = _samples_before_an_end(self._interleaving, sizes)
        elif total_samples is None:
            total_samples = sum(sizes)
        super().__init__(total_samples, micro_batch_size, global_batch_size, dp_rank, dp_world_size)

    def locate(self, index: int) -> tuple[int, int]:
        """The dataset that ``index`` of the concatenation belongs to, and the record's index in it."""
        if not 0 <= index < self._offsets[-1]:
            raise IndexError(f"index is {index}; the datasets have {self._offsets[-1]} records together")
        dataset = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return dataset, index - int(self._offsets[dataset])

    def indices(self, places: NDArray[np.int64]) -> list[int]:
        if self.on_end == "repeat":
            places = places + self.epoch * self.epoch_samples
        datasets, counts = self._interleaving(places)
        concatenated = np.empty_like(places)
        for dataset in np.unique(datasets):
            rows = datasets == dataset
            concatenated[rows] = self._offsets[dataset] + self._records(int(dataset), counts[rows])
        found: list[int] = concatenated.tolist()
        return found

    def _records(self, dataset: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The records that this dataset gives when it gives for the ``counts``-th time, from 0."""
        size = self.dataset_sizes[dataset]
        passes, records = np.divmod(counts, size)
        if self.order == "shuffle":
            for number in np.unique(passes):
                rows = passes == number
                key = int(number) if self.on_end == "repeat" else self.epoch
                records[rows] = KeyedPermutation(size, self.seed, key, dataset)(records[rows])
        return records

    def fingerprint(self) -> dict[str, Any]:
        return {
            "type": type(self).__name__,
            "total_samples": self.total_samples,
            "global_batch_size": self.global_batch_size,
            "order": self.order,
            "seed": self.seed if self.order == "shuffle" else None,
            "on_end": self.on_end,
            "datasets": len(self.dataset_sizes),
            "dataset_sizes": _in_clear_or_digest(self.dataset_sizes),
            "weights": _in_clear_or_digest(self._interleaving.weights),
        }


def _in_clear_or_digest(numbers: Sequence[int]) -> list[int] | str:
    """A few numbers as they are, so that a person sees what changed and the order can be computed from a checkpoint."""
    return list(numbers) if len(numbers) <= _IN_CLEAR else digest(numbers)


def _samples_before_an_end(interleaving: Interleaving, sizes: Sequence[int]) -> int:
    """How many places there are before the first one whose dataset has no record left."""
    enough, too_many = 0, 1
    while _fits(interleaving, sizes, too_many):
        enough, too_many = too_many, 2 * too_many
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if _fits(interleaving, sizes, middle):
            enough = middle
        else:
            too_many = middle
    return enough


def _fits(interleaving: Interleaving, sizes: Sequence[int], places: int) -> bool:
    return all(count <= size for count, size in zip(interleaving.counts(places), sizes, strict=True))
