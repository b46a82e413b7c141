"""The opening exchange of a window: who has what, and the numbers that planning needs.

One all-gather of a fixed record a rank (status, place in the run, how many samples) followed by 24 bytes a sample. Its
capacity follows from earlier windows, so all ranks know it; only a window with more samples than that takes a second
exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hp_nodes.errors import DataPlaneError
from hp_nodes.transport.agreement import raise_common
from hp_nodes.transport.protocol import Transport

__all__ = ["Gathered", "Opening", "Status", "check_statuses", "open_window", "row_dtype"]


def row_dtype(before_reading: bool, budgets: int) -> np.dtype[np.void]:
    """One row a sample: 24 bytes, and 8 more for each packing budget.

    After reading, the index travels with the sample itself. Before reading it is needed here, and the reference need
    not be told: a rank's samples are whole records in the order of its bins.
    """
    place = (
        [("index", "<i8"), ("tokens", "<i4")]
        if before_reading
        else [("tokens", "<i4"), ("reference", "<i4"), ("part", "<i4")]
    )
    return np.dtype([("cost", "<f8"), *place, ("offset", "<i4"), *((f"budget_{k}", "<f8") for k in range(budgets))])


class Status(IntEnum):
    """What a rank brings to an exchange."""

    WINDOW = 0
    END = 1
    ERROR = 2
    CLOSED = 3


_FIELDS = ("status", "epoch", "step", "first_round", "num_rounds", "ends", "count", "first_position")
HEAD_NBYTES = 8 * len(_FIELDS)
"""What a rank says of its window besides its samples."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A window as this rank brings it: its place, and a structured array with one row a sample."""

    epoch: int
    step: int
    first_round: int
    num_rounds: int
    ends_step: bool
    ends_epoch: bool
    first_position: int
    numbers: NDArray[np.void]


@dataclass(frozen=True)
class Gathered:
    """What the openings of all ranks say together. One array for all of them, since there may be thousands."""

    rows: NDArray[np.void]
    """The rows of every sample, rank by rank."""
    counts: NDArray[np.int64]
    """int64[size]: how many of them are whose."""
    firsts: NDArray[np.int64]
    """int64[size]: first position of each rank; offsets count from it."""
    capacity: int
    """Of the next opening."""

    @cached_property
    def origins(self) -> NDArray[np.int32]:
        """int32[rows]: the place that holds each sample now."""
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64[size]: where the rows of each rank begin."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """int64[rows]: occurrence position of each sample."""
        return self.rows["offset"] + self.firsts[self.origins]


def open_window(
    transport: Transport,
    mine: Opening | Status | DataPlaneError,
    capacity: int,
    dtype: np.dtype[np.void],
    node: str,
) -> Gathered | None:
    """Exchange openings.

    Args:
        mine: the window, END, CLOSED, or this rank's error.
        capacity: samples a rank that fit the first exchange; the same on all ranks.
        dtype: of the rows, from :func:`row_dtype`; the same on all ranks.

    Returns:
        What all ranks brought; None when all are at their end.

    Raises:
        DataPlaneError: a rank failed, closed, ended early or is somewhere else; the same on every rank.
    """
    record = np.zeros(len(_FIELDS), dtype=np.int64)
    rows = np.empty(0, dtype=np.uint8)
    if isinstance(mine, Opening):
        ends = int(mine.ends_step) + 2 * int(mine.ends_epoch)
        record[:] = (
            Status.WINDOW,
            mine.epoch,
            mine.step,
            mine.first_round,
            mine.num_rounds,
            ends,
            len(mine.numbers),
            mine.first_position,
        )
        rows = mine.numbers.view(np.uint8).reshape(-1)
    else:
        record[0] = Status.ERROR if isinstance(mine, DataPlaneError) else mine
    row = dtype.itemsize
    head = record.view(np.uint8)
    sent = np.zeros(len(head) + capacity * row, dtype=np.uint8)
    sent[: len(head)] = head
    fitting = min(len(rows), capacity * row)
    sent[len(head) : len(head) + fitting] = rows[:fitting]
    received = transport.all_gather(sent, f"{node}: opening")
    records = np.ascontiguousarray(received[:, : len(head)]).view(np.int64)
    check_statuses(transport, records[:, 0], mine if isinstance(mine, DataPlaneError) else None, node)
    if records[0, 0] == Status.END:
        return None
    _check_places(transport, records, node)
    counts = records[:, 6]
    most = int(counts.max())
    if most > capacity:
        sent = np.zeros(most * row, dtype=np.uint8)
        sent[: len(rows)] = rows
        received = transport.all_gather(sent, f"{node}: numbers")
    else:
        received = received[:, len(head) :]
    # As opaque rows: of structured ones numpy copies field by field.
    opaque = received.view(np.dtype((np.void, row)))
    rows_of_all = opaque[np.arange(opaque.shape[1]) < counts[:, None]].view(dtype)
    return Gathered(rows_of_all, counts, records[:, 7], max(capacity, _with_room(most)))


def _with_room(samples: int) -> int:
    """At least ``samples``, rounded up by at most an eighth: windows differ a little, and few shall need more room."""
    step = max(1, 1 << max(0, samples.bit_length() - 4))
    return -(-samples // step) * step


def check_statuses(transport: Transport, statuses: NDArray[np.int64], error: DataPlaneError | None, node: str) -> None:
    """Raise the one error that follows from everybody's status; return when all bring the same."""
    if (statuses == Status.ERROR).any():
        raise_common(transport, error, node)
    ranks = np.asarray(transport.global_ranks)
    if (statuses == Status.CLOSED).any():
        closed = ranks[statuses == Status.CLOSED].tolist()
        raise _agreed(
            f"rank {closed[0]} closed its loader because of an error of its own (closed: ranks {closed})",
            closed[0],
            node,
        )
    ended = statuses == Status.END
    if ended.any() and not ended.all():
        early, others = ranks[ended].tolist(), ranks[~ended].tolist()
        raise _agreed(
            f"ranks {early} have no more data while ranks {others} have; all must have equally many", early[0], node
        )


def _check_places(transport: Transport, records: NDArray[np.int64], node: str) -> None:
    different = (records[:, 1:6] != records[0, 1:6]).any(axis=1)
    if different.any():
        rank = int(np.flatnonzero(different)[0])
        ours, theirs = (
            ", ".join(f"{name} {value}" for name, value in zip(_FIELDS[1:6], records[place, 1:6], strict=True))
            for place in (0, rank)
        )
        ranks = transport.global_ranks
        raise _agreed(f"rank {ranks[0]} is at {ours}; rank {ranks[rank]} is at {theirs}", ranks[rank], node)


def _agreed(message: str, rank: int, node: str) -> DataPlaneError:
    error = DataPlaneError(message, rank=rank, node=node)
    error.agreed = True
    return error
