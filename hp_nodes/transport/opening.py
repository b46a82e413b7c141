"""The opening exchange of a window: who has what, and the numbers that planning needs.

One all-gather of a fixed record a rank (status, place in the run, how many samples) followed by one row a sample. How
many rows there is room for, and how wide they are, follows from earlier windows, so all ranks know it; only a window
with more samples or larger numbers takes a second exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from hp_nodes.errors import DataPlaneError, some_of
from hp_nodes.transport.agreement import raise_common
from hp_nodes.transport.opening_rows import RowFormat, row_dtype
from hp_nodes.transport.protocol import Transport

__all__ = ["Gathered", "Opening", "Room", "Status", "check_statuses", "open_window"]


class Status(IntEnum):
    """What a rank brings to an exchange."""

    WINDOW = 0
    END = 1
    ERROR = 2
    CLOSED = 3


_FIELDS = ("status", "epoch", "step", "first_round", "num_rounds", "ends", "count", "first_position")
_STATUS_BITS = 8
_STATUSES = (1 << _STATUS_BITS) - 1
_LARGEST_CODE = (1 << (63 - _STATUS_BITS)) - 1
"""What is left of the first field for how wide this rank's rows must be; with more budgets than fit it is full."""
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
class Room:
    """What the first exchange of an opening holds of each rank; the same on all."""

    samples: int
    rows: RowFormat

    @classmethod
    def first(cls, budgets: int) -> Room:
        """Before anything is known."""
        return cls(0, RowFormat.full(row_dtype(False, budgets)))

    @property
    def nbytes(self) -> int:
        return HEAD_NBYTES + self.samples * self.rows.row_nbytes

    def holds(self, samples: int, rows: RowFormat) -> bool:
        return samples <= self.samples and self.rows.holds(rows)

    def after(self, heads: NDArray[np.int64], dtype: np.dtype[np.void]) -> tuple[RowFormat | None, Room]:
        """What follows from the heads of all ranks: the rows of a second exchange, if it takes one, and the next room.

        Args:
            heads: int64[ranks, 8], of windows.
            dtype: of the rows of all ranks.
        """
        codes, most = np.unique(heads[:, 0] >> _STATUS_BITS).tolist(), int(heads[:, 6].max())
        full = codes[-1] == _LARGEST_CODE
        needed = (
            RowFormat.full(dtype)
            if full
            else reduce(RowFormat.wider, (RowFormat.from_code(dtype, code) for code in codes))
        )
        later = Room(max(self.samples, _with_room(most)), self.rows.wider(needed) if self.samples else needed)
        return None if self.holds(most, needed) else needed, later


@dataclass(frozen=True)
class Gathered:
    """What the openings of all ranks say together. One array for all of them, since there may be thousands."""

    rows: NDArray[np.void]
    """The rows of every sample, rank by rank."""
    counts: NDArray[np.int64]
    """int64[size]: how many of them are whose."""
    firsts: NDArray[np.int64]
    """int64[size]: first position of each rank; offsets count from it."""
    room: Room
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
    transport: Transport, mine: Opening | Status | DataPlaneError, room: Room, node: str
) -> Gathered | None:
    """Exchange openings.

    Args:
        mine: the window, END, CLOSED, or this rank's error.
        room: that of the opening before, the same on all ranks.

    Returns:
        What all ranks brought; None when all are at their end.

    Raises:
        DataPlaneError: a rank failed, closed, ended early or is somewhere else; the same on every rank.
    """
    sent = np.zeros(room.nbytes, dtype=np.uint8)
    least = RowFormat.least(mine.numbers) if isinstance(mine, Opening) else None
    sent[:HEAD_NBYTES] = _head(mine, least).view(np.uint8)
    if isinstance(mine, Opening) and least is not None and room.holds(len(mine.numbers), least):
        rows = room.rows.pack(mine.numbers)
        sent[HEAD_NBYTES : HEAD_NBYTES + len(rows)] = rows
    received = transport.all_gather(sent, f"{node}: opening")
    heads = np.ascontiguousarray(received[:, :HEAD_NBYTES]).view(np.int64)
    check_statuses(transport, heads[:, 0] & _STATUSES, mine if isinstance(mine, DataPlaneError) else None, node)
    if heads[0, 0] == Status.END:
        return None
    assert isinstance(mine, Opening)
    _check_places(transport, heads, node)
    counts, (second, later) = heads[:, 6], room.after(heads, mine.numbers.dtype)
    received = received[:, HEAD_NBYTES:]
    if second is not None:
        sent = np.zeros(int(counts.max()) * second.row_nbytes, dtype=np.uint8)
        rows = second.pack(mine.numbers)
        sent[: len(rows)] = rows
        received = transport.all_gather(sent, f"{node}: numbers")
    return Gathered((second or room.rows).unpack(received, counts), counts, heads[:, 7], later)


def _head(mine: Opening | Status | DataPlaneError, least: RowFormat | None) -> NDArray[np.int64]:
    head = np.zeros(len(_FIELDS), dtype=np.int64)
    if isinstance(mine, Opening):
        assert least is not None
        ends = int(mine.ends_step) + 2 * int(mine.ends_epoch)
        status = Status.WINDOW | min(least.code, _LARGEST_CODE) << _STATUS_BITS
        place = (mine.epoch, mine.step, mine.first_round, mine.num_rounds, ends)
        head[:] = (status, *place, len(mine.numbers), mine.first_position)
    else:
        head[0] = Status.ERROR if isinstance(mine, DataPlaneError) else mine
    return head


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
            f"rank {closed[0]} closed its loader because of an error of its own (closed: ranks {some_of(closed)})",
            closed[0],
            node,
        )
    ended = statuses == Status.END
    if ended.any() and not ended.all():
        early, others = ranks[ended].tolist(), ranks[~ended].tolist()
        raise _agreed(
            f"ranks {some_of(early)} have no more data while ranks {some_of(others)} have; all must have equally many",
            early[0],
            node,
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
