"""Collate: the packed bins of each round become one micro-batch.

Takes windows of packed bins, gives their micro-batches one by one. Until the last of a window its state is the one the
source had before that window and how many were given; only then the state after. The micro-batch that ends a step
carries the step's report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.planning import merge_reports
from hp_nodes.types import BalanceReport, MicroBatch, SampleKey, Window

__all__ = ["Collator"]


class Collator(Stage[MicroBatch]):
    """Micro-batches, round by round.

    Args:
        source: gives windows with ``packed``.
        collate_fn: the bins of a round → what the training loop gets; None gives the tuple of bins.
        local_batch_size: bins of a round.
    """

    PLACE_KEY = "window"
    GIVEN_KEY = "given"

    def __init__(
        self,
        source: BaseNode[Window],
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        *,
        local_batch_size: int,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        self.collate_fn = collate_fn
        self.local_batch_size = local_batch_size
        self._window: Window | None = None
        self._given = 0
        self._before: dict[str, Any] | None = None
        self._skip: tuple[list[int], int] | None = None
        self._reports: list[BalanceReport] = []
        self._inside: list[NDArray[np.intp]] = []
        """Places of each round's samples in the window."""

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        self._window = None
        self._before = None
        self._given = 0
        self._reports = []
        self._skip = None if entry is None else ([int(n) for n in entry[self.PLACE_KEY]], int(entry[self.GIVEN_KEY]))

    def source_state(self) -> dict[str, Any]:
        return dict(self._before) if self._before is not None else super().source_state()

    def own_state(self) -> dict[str, Any] | None:
        if self._window is not None:
            return {self.PLACE_KEY: _place(self._window), self.GIVEN_KEY: self._given}
        if self._skip is not None:
            return {self.PLACE_KEY: list(self._skip[0]), self.GIVEN_KEY: self._skip[1]}
        return None

    def buffered(self) -> int:
        """Micro-batches of the window in hand that are still to be given."""
        return 0 if self._window is None else self._window.num_rounds - self._given

    def next(self) -> MicroBatch:
        if self._window is None:
            self._take()
        window = self._window
        assert window is not None
        batch = self._collate(window, self._given)
        self._given += 1
        if self._given == window.num_rounds:
            self._window = None
            self._before = None
        return self.give(batch)

    def _take(self) -> None:
        before = super().source_state()
        window = self.pull()
        with failing_at(self.name, epoch=window.epoch, step=window.step):
            if window.packed is None:
                raise ValueError("the window has no packed bins; a Packer below the Collator fills them")
            if len(window.packed) != window.num_rounds:
                raise ValueError(
                    f"the window has packed bins for {len(window.packed)} rounds, it has {window.num_rounds}"
                )
        self._given = 0
        if self._skip is not None:
            # The state spoke of a window; after set_epoch another one comes, from its beginning.
            self._given = self._skip[1] if self._skip[0] == _place(window) else 0
            self._skip = None
        if window.report is not None:
            self._reports.append(window.report)
        self._window = window
        self._before = before
        self._inside = self._rounds(window)

    def _collate(self, window: Window, number: int) -> MicroBatch:
        assert window.packed is not None
        bins = window.packed[number]
        keys, tokens = self._contents(window, number)
        with failing_at(self.name, epoch=window.epoch, step=window.step, key=keys[0] if keys else None):
            data = tuple(bins) if self.collate_fn is None else self.collate_fn(bins)
        last = number == window.num_rounds - 1
        ends_step = last and window.ends_step
        return MicroBatch(
            data=data,
            epoch=window.epoch,
            step=window.step,
            round=window.first_round + number,
            ends_window=last,
            ends_step=ends_step,
            ends_epoch=last and window.ends_epoch,
            positions=tuple(dict.fromkeys(key.position for key in keys)),
            num_tokens=tokens,
            num_label_tokens=_label_tokens(data),
            report=self._step_report() if ends_step else window.report,
        )

    def _rounds(self, window: Window) -> list[NDArray[np.intp]]:
        """Places of each round's samples, ascending; none when it is not known where they are."""
        if window.bins is None:
            return []
        rounds = window.bins // self.local_batch_size
        order = np.argsort(rounds, kind="stable")
        return np.split(order, np.searchsorted(rounds[order], np.arange(1, window.num_rounds)))

    def _contents(self, window: Window, number: int) -> tuple[list[SampleKey], int | None]:
        """Keys of a round's samples, and their tokens when known."""
        if window.bins is None:
            return [], None
        inside = self._inside[number]
        tokens = (
            int(window.tokens[inside].sum())
            if window.tokens is not None and len(window.tokens) == len(window.bins)
            else None
        )
        return [window.keys[place] for place in inside.tolist()], tokens

    def _step_report(self) -> BalanceReport | None:
        reports, self._reports = self._reports, []
        if not reports:
            return None
        return replace(
            reports[-1],
            plan=merge_reports([report.plan for report in reports]),
            samples_sent=sum(report.samples_sent for report in reports),
            samples_received=sum(report.samples_received for report in reports),
            bytes_sent=sum(report.bytes_sent for report in reports),
            bytes_received=sum(report.bytes_received for report in reports),
            skipped=sum(report.skipped for report in reports),
        )


def _place(window: Window) -> list[int]:
    return [window.epoch, window.step, window.first_round]


def _label_tokens(data: Any) -> int | None:
    found = data.get("num_label_tokens") if isinstance(data, Mapping) else None
    return int(found) if found is not None else None
