"""What a rank says of its samples for planning: one row each, no wider than its numbers need.

Takes a structured array with one row a sample (:func:`row_dtype`), gives the same numbers in the fewest bytes that hold
every value exactly: whole numbers in 0, 1, 2, 4 or 8 bytes, costs in 8 unless they are whole numbers below 2³². One
format holds for all ranks of an exchange, so what arrived is read as one array, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowFormat", "row_dtype"]

_WIDTHS = (0, 1, 2, 4, 8)
_BITS = 4


def row_dtype(before_reading: bool, budgets: int) -> np.dtype[np.void]:
    """One row a sample, as planning takes it: 24 bytes, and 8 more for each packing budget.

    After reading, the index travels with the sample itself. Before reading it is needed here, and the reference need
    not be told: a rank's samples are whole records in the order of its bins.
    """
    place = (
        [("index", "<i8"), ("tokens", "<i4")]
        if before_reading
        else [("tokens", "<i4"), ("reference", "<i4"), ("part", "<i4")]
    )
    return np.dtype([("cost", "<f8"), *place, ("offset", "<i4"), *((f"budget_{k}", "<f8") for k in range(budgets))])


@dataclass(frozen=True)
class RowFormat:
    """How rows travel: of each field of their dtype, the bytes that it takes."""

    dtype: np.dtype[np.void]
    """Of the rows, from :func:`row_dtype`."""
    widths: tuple[int, ...]

    @classmethod
    def full(cls, dtype: np.dtype[np.void]) -> RowFormat:
        """Takes any values."""
        return cls(dtype, tuple(dtype[name].itemsize for name in _names(dtype)))

    @classmethod
    def least(cls, rows: NDArray[np.void]) -> RowFormat:
        """The narrowest that holds these rows."""
        return cls(rows.dtype, tuple(_needed(rows[name]) for name in _names(rows.dtype)))

    @classmethod
    def from_code(cls, dtype: np.dtype[np.void], code: int) -> RowFormat:
        """What :attr:`code` says."""
        places = range(0, _BITS * len(_names(dtype)), _BITS)
        return cls(dtype, tuple(_WIDTHS[(code >> place) % (1 << _BITS)] for place in places))

    @property
    def code(self) -> int:
        """The widths in one number."""
        return sum(_WIDTHS.index(width) << (_BITS * place) for place, width in enumerate(self.widths))

    @property
    def row_nbytes(self) -> int:
        return sum(self.widths)

    def holds(self, other: RowFormat) -> bool:
        return self.dtype == other.dtype and all(map(int.__ge__, self.widths, other.widths))

    def wider(self, other: RowFormat) -> RowFormat:
        """The narrowest that holds both."""
        return RowFormat(self.dtype, tuple(map(max, self.widths, other.widths)))

    @cached_property
    def _wire(self) -> np.dtype[np.void]:
        fields = []
        for name, width in zip(_names(self.dtype), self.widths, strict=True):
            if width:
                fields.append((name, self.dtype[name] if width == self.dtype[name].itemsize else f"<u{width}"))
        return np.dtype(fields)

    def pack(self, rows: NDArray[np.void]) -> NDArray[np.uint8]:
        """uint8[rows * row_nbytes]; the format holds them."""
        wire = np.empty(len(rows), self._wire)
        for name in self._wire.names or ():
            wire[name] = rows[name]
        return wire.view(np.uint8).reshape(-1) if self.row_nbytes else np.empty(0, np.uint8)

    def unpack(self, received: NDArray[np.uint8], counts: NDArray[np.int64]) -> NDArray[np.void]:
        """The rows of all ranks, one rank behind the other, from uint8[ranks, room * row_nbytes]."""
        rows = np.zeros(int(counts.sum()), self.dtype)
        if self.row_nbytes and len(rows):
            # As opaque rows: of structured ones numpy copies field by field.
            room = received.shape[1] // self.row_nbytes
            opaque = received[:, : room * self.row_nbytes].view(np.dtype((np.void, self.row_nbytes)))
            wire = opaque[np.arange(room) < counts[:, None]].view(self._wire)
            for name in self._wire.names or ():
                rows[name] = wire[name]
        return rows


def _names(dtype: np.dtype[np.void]) -> tuple[str, ...]:
    assert dtype.names is not None
    return dtype.names


def _needed(values: NDArray[Any]) -> int:
    """Bytes that hold each of these exactly."""
    if not len(values):
        return 0
    whole = values.dtype.kind == "i"
    high = values.view(f"<u{values.dtype.itemsize}").max() if whole else values.max()
    if not high < 1 << 32 or (not whole and (np.signbit(values) | (values != np.trunc(values))).any()):
        return values.dtype.itemsize  # also where one is negative, or not a number
    return next(width for width in _WIDTHS if high < 1 << (8 * width))
