"""A batch sampler over a global order that is computed place by place.

Every step takes the next ``global_batch_size`` places of the epoch's order; each round of a step takes the next
``global_micro_batch_size`` of them, and rank r the r-th contiguous slice of a round. So the order, and what each step
holds, does not depend on the number of ranks. What stands at a place is for the subclass to say.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.samplers.contract import int_at_least, layouts_that_divide

__all__ = ["ORDERS", "GlobalOrderSampler", "check_order", "digest"]

ORDERS = ("sequential", "shuffle")
EPOCH_KEY = "epoch"
CONSUMED_KEY = "consumed_samples"


class GlobalOrderSampler(ABC):
    """Keeps the cursor: an epoch and how many of its samples all ranks together have consumed.

    Iterating goes on from the cursor and ends with the last whole step, after ``floor(total_samples /
    global_batch_size)`` of them; ``consumed_samples`` counts a micro-batch from the moment it is yielded. ``len()`` is
    the number of micro-batches in a whole epoch.

    Raises:
        ValueError: a number is out of range, or the global batch is no whole number of rounds.
    """

    drop_last = True

    def __init__(
        self, total_samples: int, micro_batch_size: int, global_batch_size: int, dp_rank: int, dp_world_size: int
    ) -> None:
        self.total_samples = int_at_least("total_samples", total_samples, 1)
        self.micro_batch_size = int_at_least("micro_batch_size", micro_batch_size, 1)
        self.global_batch_size = int_at_least("global_batch_size", global_batch_size, 1)
        self.dp_world_size = int_at_least("dp_world_size", dp_world_size, 1)
        self.dp_rank = int_at_least("dp_rank", dp_rank, 0)
        if self.dp_rank >= self.dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank}; accepted: an int from 0 to {self.dp_world_size - 1}")
        self.global_micro_batch_size = self.micro_batch_size * self.dp_world_size
        if self.global_batch_size % self.global_micro_batch_size:
            raise ValueError(
                f"global_batch_size is {global_batch_size}; accepted: a multiple of {self.global_micro_batch_size}, "
                f"micro_batch_size {micro_batch_size} on each of {dp_world_size} ranks; "
                f"{layouts_that_divide(self.global_batch_size, self.micro_batch_size, self.dp_world_size)}"
            )
        self.epoch_samples = self.total_samples // self.global_batch_size * self.global_batch_size
        """Samples of an epoch over all ranks, without those at its end that fill no step."""
        self._epoch = 0
        self._consumed = 0

    @abstractmethod
    def indices(self, places: NDArray[np.int64]) -> list[int]:
        """The dataset index at each of these places, int64[n] in range(total_samples), of the current epoch's order."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What the order depends on besides the epoch, as plain values; the same for any number of ranks."""

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def consumed_samples(self) -> int:
        """Samples of this epoch that all ranks together have consumed; may be set, to start elsewhere."""
        return self._consumed

    @consumed_samples.setter
    def consumed_samples(self, value: int) -> None:
        consumed = int_at_least(CONSUMED_KEY, value, 0)
        if consumed > self.epoch_samples or consumed % self.global_micro_batch_size:
            raise ValueError(
                f"{CONSUMED_KEY} is {value}; accepted: a multiple of global_micro_batch_size "
                f"{self.global_micro_batch_size}, up to the epoch's {self.epoch_samples}"
            )
        self._consumed = consumed

    def __len__(self) -> int:
        return self.epoch_samples // self.global_micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # The cursor alone decides what comes next, so a load_state_dict in the middle holds from the next yield on; the
        # rest of the step is computed at once because one vectorised call is much cheaper than one for each round.
        ahead: dict[int, list[int]] = {}
        epoch = self._epoch
        while (start := self._consumed) < self.epoch_samples:
            if epoch != self._epoch or start not in ahead:
                epoch, ahead = self._epoch, self._rest_of_step(start)
            self._consumed = start + self.global_micro_batch_size
            yield ahead.pop(start)

    def _rest_of_step(self, start: int) -> dict[int, list[int]]:
        """This rank's micro-batches from the place ``start`` to the end of its step, each under its first place."""
        end = start - start % self.global_batch_size + self.global_batch_size
        starts = range(start, end, self.global_micro_batch_size)
        micro = self.micro_batch_size
        own = np.arange(micro, dtype=np.int64) + self.dp_rank * micro
        indices = self.indices((np.array(starts, np.int64)[:, None] + own).ravel())
        return {first: indices[i * micro : (i + 1) * micro] for i, first in enumerate(starts)}

    def set_epoch(self, epoch: int) -> None:
        """Another epoch starts at its beginning; the current one keeps its cursor."""
        if int_at_least(EPOCH_KEY, epoch, 0) != self._epoch:
            self._epoch, self._consumed = int(epoch), 0

    def state_dict(self) -> dict[str, int]:
        return {EPOCH_KEY: self._epoch, CONSUMED_KEY: self._consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {EPOCH_KEY, CONSUMED_KEY}:
            raise ValueError(f"a sampler's state has {sorted(state)}; accepted: exactly {EPOCH_KEY} and {CONSUMED_KEY}")
        epoch = int_at_least(EPOCH_KEY, state[EPOCH_KEY], 0)
        self.consumed_samples = state[CONSUMED_KEY]
        self._epoch = epoch


def check_order(order: str) -> str:
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; accepted: {' or '.join(map(repr, ORDERS))}")
    return order


def digest(values: Iterable[int]) -> str:
    """16 hexadecimal digits that stand for these numbers in a fingerprint."""
    return hashlib.sha256(repr(list(map(int, values))).encode()).hexdigest()[:16]
