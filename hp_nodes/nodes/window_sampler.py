"""Sampler windowing: the first stage. Takes a batch sampler, gives a Window of keys for each window of rounds.

Keeps the cursor (epoch and samples consumed), which is the state of the whole graph. Promises that a window never
crosses a step or an epoch, that an epoch has floor(total_samples / global_batch_size) steps, and that each occurrence
has a position of its own. The sampler's own cursor runs ahead of training; only this node's counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hp_nodes.errors import failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.samplers import BatchSampler, sampler_fingerprint
from hp_nodes.samplers.contract import layouts_that_divide
from hp_nodes.types import SampleKey, Window

__all__ = ["WindowSampler", "begin_epoch", "find_cursor", "next_epoch"]


class WindowSampler(Stage[Window]):
    """Windows of up to ``window_size`` rounds, from a batch sampler.

    Args:
        batch_sampler: see :class:`hp_nodes.samplers.BatchSampler`; its ``epoch`` and ``consumed_samples`` when the
            graph starts are where it starts.
        window_size: rounds planned together, at least 1.

    Raises:
        ValueError: the window size is no int >= 1, the sampler lacks something, or its data fill no step.
    """

    EPOCH_KEY = "epoch"
    CONSUMED_KEY = "consumed_samples"
    FINISHED_KEY = "finished"
    requires_entry = True

    def __init__(self, batch_sampler: BatchSampler, window_size: int = 1, *, name: str | None = None) -> None:
        super().__init__(None, name=name)
        if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
            raise ValueError(f"window_size is {window_size!r}; accepted: an int >= 1")
        micro, global_micro = batch_sampler.micro_batch_size, batch_sampler.global_micro_batch_size
        if batch_sampler.global_batch_size % global_micro:
            layouts = layouts_that_divide(batch_sampler.global_batch_size, micro, batch_sampler.dp_world_size)
            raise ValueError(
                f"the sampler's global_batch_size {batch_sampler.global_batch_size} is no multiple of its "
                f"global_micro_batch_size {global_micro}; {layouts}"
            )
        self.steps_per_epoch = batch_sampler.total_samples // batch_sampler.global_batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"an epoch has no step: {batch_sampler.total_samples} samples are fewer than one global batch of "
                f"{batch_sampler.global_batch_size}; accepted: at least that many"
            )
        self.batch_sampler = batch_sampler
        self.window_size = window_size
        self.micro_batches_per_epoch = self.steps_per_epoch * (batch_sampler.global_batch_size // global_micro)
        self._micro = micro
        self._global_micro = global_micro
        self._epoch_samples = self.steps_per_epoch * batch_sampler.global_batch_size
        self._epoch = 0
        self._consumed = 0
        self._running: Iterator[list[int]] | None = None
        self._started = False
        self._delivered = False
        self._next_epoch_first = False

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with, besides the dataset."""
        sampler = self.batch_sampler
        return {"global_batch_size": int(sampler.global_batch_size), "sampler": sampler_fingerprint(sampler)}

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        self._running = None
        if entry is not None:
            self._epoch = int(entry[self.EPOCH_KEY])
            self._consumed = int(entry[self.CONSUMED_KEY])
            if not 0 <= self._consumed <= self._epoch_samples:
                raise ValueError(
                    f"{self.name}: the state has consumed {self._consumed} of {self._epoch_samples} samples"
                )
            # Restored at its end, an epoch has nothing left, and what is asked for next is the next epoch.
            self._next_epoch_first = self._finished
        elif not self._started:
            self._epoch = int(self.batch_sampler.epoch)
            self._consumed = int(self.batch_sampler.consumed_samples)
            self._next_epoch_first = self._finished
        elif self._delivered:
            self._begin_epoch(self._epoch + 1)
        self._started = True
        self._delivered = False

    def own_state(self) -> dict[str, Any]:
        return {self.EPOCH_KEY: self._epoch, self.CONSUMED_KEY: self._consumed, self.FINISHED_KEY: self._finished}

    def next(self) -> Window:
        if self._next_epoch_first:
            self._begin_epoch(self._epoch + 1)
        if self._finished:
            raise StopIteration
        sampler = self.batch_sampler
        step, within = divmod(self._consumed, sampler.global_batch_size)
        first_round, rest = divmod(within, self._global_micro)
        with failing_at(self.name, epoch=self._epoch, step=step):
            if rest:
                raise ValueError(
                    f"{self._consumed} samples consumed end no round of {self._global_micro} samples; a state from "
                    "within a step resumes only with the same micro-batch and number of ranks"
                )
            rounds_left = (sampler.global_batch_size - within) // self._global_micro
            num_rounds = min(self.window_size, rounds_left)
            keys = tuple(key for _ in range(num_rounds) for key in self._draw())
        self._delivered = True
        return self.give(
            Window(
                epoch=self._epoch,
                step=step,
                first_round=first_round,
                num_rounds=num_rounds,
                ends_step=num_rounds == rounds_left,
                ends_epoch=self._finished,
                keys=keys,
                reference=np.arange(num_rounds * self._micro, dtype=np.int32),
                dropped=sampler.total_samples - self._epoch_samples if self._finished else 0,
            )
        )

    @property
    def _finished(self) -> bool:
        return self._consumed >= self._epoch_samples

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._consumed = 0
        self._running = None
        self._next_epoch_first = False

    def _draw(self) -> list[SampleKey]:
        """The keys of one round, from the sampler's next yield."""
        sampler = self.batch_sampler
        if self._running is None:
            sampler.load_state_dict({self.EPOCH_KEY: self._epoch, self.CONSUMED_KEY: self._consumed})
            self._running = iter(sampler)
        indices = next(self._running, None)
        if indices is None:
            raise RuntimeError(
                f"the batch sampler ended after {self._consumed} samples of an epoch of {self._epoch_samples}; it must "
                "yield every micro-batch that total_samples and global_batch_size promise"
            )
        if len(indices) != self._micro:
            raise ValueError(
                f"the batch sampler yielded {len(indices)} indices, {indices!r}; accepted: exactly {self._micro}"
            )
        first = self._consumed + sampler.dp_rank * self._micro
        self._consumed += self._global_micro
        if sampler.consumed_samples not in (
            self._consumed,
            self._consumed - self._global_micro,
        ):  # it may count on resuming
            raise ValueError(
                f"the batch sampler's consumed_samples is {sampler.consumed_samples} after a yield; it must advance by "
                f"global_micro_batch_size, to {self._consumed}"
            )
        return [SampleKey(first + place, operator.index(index)) for place, index in enumerate(indices)]


def begin_epoch(entries: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """The state in which ``epoch`` has not begun: the sampler's entry replaced, counts of the epoch before left out."""
    fresh = {WindowSampler.EPOCH_KEY: epoch, WindowSampler.CONSUMED_KEY: 0, WindowSampler.FINISHED_KEY: False}
    kept = {name: entry for name, entry in entries.items() if not _is_count(entry)}
    return {name: dict(fresh) if _is_cursor(entry) else entry for name, entry in kept.items()}


def next_epoch(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The state in which the epoch after the one that ``entries`` speak of has not begun."""
    cursor = find_cursor(entries)
    return dict(entries) if cursor is None else begin_epoch(entries, cursor[WindowSampler.EPOCH_KEY] + 1)


def find_cursor(entries: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry that says where in which epoch a graph stands, if one does."""
    return next((entry for entry in entries.values() if _is_cursor(entry)), None)


def _is_cursor(entry: Any) -> bool:
    keys = {WindowSampler.EPOCH_KEY, WindowSampler.CONSUMED_KEY, WindowSampler.FINISHED_KEY}
    return isinstance(entry, Mapping) and set(entry) == keys


def _is_count(entry: Any) -> bool:
    """What a HostPrefetcher says of records that could not be read."""
    return isinstance(entry, Mapping) and set(entry) == {WindowSampler.EPOCH_KEY, "skipped"}
