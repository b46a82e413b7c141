"""Builds a packing from nothing: samples in descending size, in waves, to the micro-batches that need them most.

A micro-batch has a *need* (cost still missing to its level) and a *share* (tokens still missing). Each wave takes the
micro-batches with the densest need per token of share, among those with room for the next sample and a need of at least
its cost, and gives one sample to each: the largest sample to the densest need. A sample that would overshoot everywhere
goes to the largest need, as in longest-processing-time scheduling (Graham 1969). Inside a micro-batch the fullest bin
that still fits takes it.

Large samples decide how good a packing is: a wave that runs from long samples to much shorter ones passes by the
micro-batches whose room is in between. So a wave of several samples has samples of about one size only, and but for
that, is a part of the samples placed before it: few waves are small, their number grows with log N, and the cost is
O(N log N).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning.compiled import kernel, place_waves
from hp_nodes.planning.instance import Instance
from hp_nodes.planning.levels import Levels

__all__ = ["construct"]

GROWTH = 24
"""A wave may have 1/24 of the samples placed before it, whatever their size; more makes finer waves, and slower."""
LEAST_WAVE = 8
SIMILAR = 0.98
"""A larger wave ends at samples of this part of its first one's tokens."""
ALIKE = 0.9
"""A wave reaches down to this part of the densest need."""
LEAST_SHARE = 50
"""A micro-batch without tokens left to its share counts as if 1/50 of a bin were left."""


def construct(instance: Instance, levels: Levels) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """The bin of each sample (int32[n], -1: none) and the samples that found no bin, largest first."""
    return _Construction(instance, levels).run()


class _Construction:
    def __init__(self, instance: Instance, levels: Levels) -> None:
        self.instance = instance
        self.bins = np.full(len(instance.tokens), -1, np.int32)
        self.tokens = instance.tokens.copy()  # writable: read-only arrays would be compiled for once more
        self.room = np.full((instance.units, instance.slots), instance.capacity)
        self.most_room = self.room[:, 0] if instance.slots == 1 else np.full(instance.units, instance.capacity)
        self.left = np.tile(instance.limits, (instance.units, instance.slots, 1))
        self.first_slot = np.zeros(instance.units, np.intp)
        self.empty = np.ones((instance.units, instance.slots), np.bool_)
        self.num_empty = instance.num_bins
        self.need = levels.cost.copy()
        self.share = levels.tokens.copy()
        self.least_share = max(instance.capacity // LEAST_SHARE, 1)
        self.nowhere: list[NDArray[np.intp]] = []

    def run(self) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
        instance = self.instance
        order = instance.by_size
        oversized = instance.tokens[order] > instance.capacity
        if oversized.any():
            self._place_alone(order[oversized])
            order = order[~oversized]
        descending = np.maximum.accumulate(-instance.tokens[order])
        place, waiting = 0, order[:0]
        while place < len(order) or len(waiting):
            if not len(waiting):
                place = self._place_waves(order, descending, place)
                if place == len(order):
                    break
            remaining = len(order) - place + len(waiting)
            if remaining <= self.num_empty:
                self._fill_empty(np.concatenate([waiting, order[place:]]))
                break
            first = int(waiting[0] if len(waiting) else order[place])
            similar = int(descending.searchsorted(-SIMILAR * instance.tokens[first], side="right"))
            wave = min(max(place // GROWTH, min(LEAST_WAVE, instance.units // 16), 1), instance.units)
            chosen = self._neediest(first, wave, similar - place + len(waiting))
            if not len(chosen):
                self.nowhere.append(np.array([first]))
                waiting, place = (waiting[1:], place) if len(waiting) else (waiting, place + 1)
                continue
            chosen = chosen[: remaining - self.num_empty]
            taken = max(min(len(chosen) - len(waiting), len(order) - place), 0)
            batch = (
                np.concatenate([waiting[: len(chosen)], order[place : place + taken]])
                if len(waiting)
                else order[place : place + taken]
            )
            waiting, place = waiting[len(chosen) :], place + taken
            failed = self._place(batch, chosen[: len(batch)])
            waiting = np.concatenate([failed, waiting]) if len(failed) else waiting
        nowhere = np.concatenate(self.nowhere) if self.nowhere else order[:0]
        return self.bins, nowhere[np.argsort(-instance.tokens[nowhere], kind="stable")]

    def _place_waves(self, order: NDArray[np.intp], descending: NDArray[np.int64], place: int) -> int:
        """The waves in which every sample fits, if they are compiled; returns the place that they reach."""
        compiled = None if self.left.shape[2] else kernel(place_waves)
        if compiled is None:
            return place
        instance = self.instance
        samples = order, descending, self.tokens, instance.costs
        units = self.room, self.most_room, self.share, self.need, self.empty, self.bins
        least_wave = min(LEAST_WAVE, instance.units // 16)
        place, self.num_empty = compiled(
            *samples, *units, place, self.num_empty, self.least_share, GROWTH, least_wave, SIMILAR, ALIKE
        )
        return place

    def _neediest(self, sample: int, wave: int, similar: int) -> NDArray[np.intp]:
        """Micro-batches for a wave that starts with ``sample``, one of ``similar`` ones, the densest need first."""
        fits = self.most_room >= self.instance.tokens[sample]
        enough = fits & (self.need >= self.instance.costs[sample])
        units = enough.nonzero()[0]
        if not len(units):
            units = fits.nonzero()[0]
            return np.asarray(units[(-self.need[units]).argsort(kind="stable")[:wave]])
        sparse = self.need[units] / -np.maximum(self.share[units], self.least_share)
        near = (sparse <= ALIKE * sparse.min()).nonzero()[0]
        # Where these are enough, only they can be chosen, and sorting them is quicker.
        order = near[sparse[near].argsort(kind="stable")] if len(near) >= wave else sparse.argsort(kind="stable")
        return np.asarray(units[order[: max(min(len(near), similar), wave)]])

    def _place(self, batch: NDArray[np.intp], units: NDArray[np.intp]) -> NDArray[np.intp]:
        """One sample to each unit; returns those that must wait."""
        slots, fits = self._best_fit(batch, units)
        if np.count_nonzero(fits) == len(fits):
            self._put(batch, units, slots)
            return batch[:0]
        self._put(batch[fits], units[fits], slots[fits])
        return self._place_roomiest(batch[~fits], progress=bool(fits.any()))

    def _best_fit(self, batch: NDArray[np.intp], units: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        tokens = self.instance.tokens[batch]
        fits: NDArray[np.bool_]
        if self.instance.slots == 1 and not self.left.shape[2]:
            return self.first_slot[: len(batch)], self.most_room[units] >= tokens
        fits = self.room[units] >= tokens[:, None]
        if self.left.shape[2]:
            fits &= (self.left[units] >= self.instance.needs[batch][:, None, :]).all(axis=2)
        room = np.where(fits, self.room[units], np.iinfo(np.int64).max)
        return room.argmin(axis=1), np.asarray(fits.any(axis=1))

    def _place_roomiest(self, failed: NDArray[np.intp], progress: bool) -> NDArray[np.intp]:
        """The longest sample to the micro-batch with most room, and so on; returns those that may fit later."""
        failed = failed[np.argsort(-self.instance.tokens[failed], kind="stable")]
        units = np.argsort(-self.most_room, kind="stable")[: len(failed)]
        batch = failed[: len(units)]
        slots, fits = self._best_fit(batch, units)
        self._put(batch[fits], units[fits], slots[fits])
        rest = np.concatenate([batch[~fits], failed[len(units) :]])
        hopeless = self.instance.tokens[rest] > self.most_room.max()
        if not (progress or fits.any()):
            hopeless[:1] = True
        self.nowhere.append(rest[hopeless])
        return np.asarray(rest[~hopeless])

    def _put(self, batch: NDArray[np.intp], units: NDArray[np.intp], slots: NDArray[np.intp]) -> None:
        instance = self.instance
        tokens = instance.tokens[batch]
        self.share[units] -= tokens
        self.need[units] -= instance.costs[batch]
        if instance.slots == 1:
            self.bins[batch] = units
            self.most_room[units] -= tokens  # which is the room
        else:
            self.bins[batch] = units * instance.slots + slots
            self.room[units, slots] -= tokens
            self.most_room[units] = self.room[units].max(axis=1)
        if self.left.shape[2]:
            self.left[units, slots] -= instance.needs[batch]
        if self.num_empty:
            self.num_empty -= int(np.count_nonzero(self.empty[units, slots]))
            self.empty[units, slots] = False

    def _fill_empty(self, rest: NDArray[np.intp]) -> None:
        """As many samples as bins are empty, or fewer: in turns, one each, the largest to the largest need."""
        while len(rest):
            units = np.flatnonzero(self.empty.any(axis=1))
            units = units[np.argsort(-self.need[units], kind="stable")][: len(rest)]
            batch, rest = rest[: len(units)], rest[len(units) :]
            self._put(batch, units, self.empty[units].argmax(axis=1))

    def _place_alone(self, oversized: NDArray[np.intp]) -> None:
        """Each in a bin of its own that nothing else enters, the bins of different micro-batches first."""
        for start in range(0, len(oversized), self.instance.units):
            batch = oversized[start : start + self.instance.units]
            units = np.argsort(-self.need, kind="stable")[: len(batch)]
            slots = self.empty[units].argmax(axis=1)
            self._put(batch, units, slots)
            self.room[units, slots] = -1
            self.most_room[units] = self.room[units].max(axis=1)
