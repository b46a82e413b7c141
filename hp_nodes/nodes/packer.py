"""Pack: the planned samples of each bin become one packed sequence.

Takes windows whose samples are in packing order, gives them with ``packed[round][slot]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.types import Window

__all__ = ["Packer"]


class Packer(Stage[Window]):
    """Windows of packed bins.

    Args:
        source: gives windows with ``samples`` and ``bins``.
        pack_fn: ``(samples, seq_len) → packed``; None gives the tuple of samples.
        seq_len: tokens of a bin.
        local_batch_size: bins of a round.

    Raises:
        ValueError: (on ``next``) a bin got no sample.
    """

    def __init__(
        self,
        source: BaseNode[Window],
        pack_fn: Callable[[Sequence[Any], int], Any] | None = None,
        *,
        seq_len: int,
        local_batch_size: int,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        self.pack_fn = pack_fn
        self.seq_len = seq_len
        self.local_batch_size = local_batch_size

    def next(self) -> Window:
        window = self.pull()
        num_bins = window.num_rounds * self.local_batch_size
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            if window.samples is None or window.bins is None:
                raise ValueError(
                    "the window's samples are not where the plan wants them; a Router below the Packer brings them"
                )
            if len(window.samples) != len(window.bins) or len(window.keys) != len(window.bins):
                raise ValueError(
                    f"the window has {len(window.keys)} keys, {len(window.samples)} samples, {len(window.bins)} bins; "
                    "a node that changes samples after the plan keeps the three equally long (Window.take does)"
                )
            counts = np.bincount(window.bins, minlength=num_bins)
            empty = np.flatnonzero(counts == 0)
            if len(empty):
                raise ValueError(
                    f"{len(window.samples)} samples are left for {num_bins} bins and {len(empty)} bins have none: at "
                    f"least {len(empty)} more samples are needed on this rank"
                )
            self._check_capacity(window, counts)
            order = np.argsort(window.bins, kind="stable").tolist()
            packed, end = [], 0
            for count in counts.tolist():
                chosen = order[end : end + count]
                place.at(window.keys[chosen[0]])
                packed.append(self._pack([window.samples[number] for number in chosen]))
                end += count
        size = self.local_batch_size
        rounds = tuple(tuple(packed[first : first + size]) for first in range(0, num_bins, size))
        return self.give(replace(window, packed=rounds))

    def _check_capacity(self, window: Window, counts: NDArray[np.intp]) -> None:
        """A node behind the plan may have put too much into a bin; a single sample was allowed to be longer."""
        if window.tokens is None or window.bins is None or len(window.tokens) != len(window.bins):
            return
        used = np.bincount(window.bins, weights=window.tokens, minlength=len(counts))
        full = np.flatnonzero((used > self.seq_len) & (counts > 1))
        if len(full):
            first = int(full[0])
            inside = np.flatnonzero(window.bins == first).tolist()
            positions = [window.keys[place].position for place in inside]
            raise ValueError(
                f"bin {first} of this rank got {int(used[first])} tokens, seq_len is {self.seq_len}: samples at "
                f"positions {positions}; a node behind the plan keeps each bin within it"
            )

    def _pack(self, samples: list[Any]) -> Any:
        return tuple(samples) if self.pack_fn is None else self.pack_fn(samples, self.seq_len)
