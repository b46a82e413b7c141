"""A checksum of a frame's body, computed while it is written and when it has arrived, at the speed of memory.

Takes a body from its beginning to its end, in any portions: the sender adds each part just after writing it, when it is
still in the processor's cache. Gives a number that changes with the value and the place of every word of 8 bytes.

The words are laid out in rows of 512; the CRC of all row sums is one half, that of all column sums the other. A change
of one word changes its row's sum, an exchange of two words the sums of their columns or of their rows.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Checksum", "checksum_of"]

_ROW = 512  # words
_ROW_NBYTES = 8 * _ROW
_ROWS_AT_A_TIME = 256
# 1 MiB: read from memory once, for the rows; for the columns it is in the processor's cache.

Bytes = NDArray[np.uint8]


class Checksum:
    """Of a body that grows."""

    def __init__(self) -> None:
        self._done = 0
        self._rows = 0
        self._columns = np.zeros(_ROW, np.uint64)

    def add(self, body: Bytes, end: int) -> None:
        """The first ``end`` bytes of ``body`` are written. Whole rows of what is new are added."""
        words: NDArray[Any] = body[self._done : end // _ROW_NBYTES * _ROW_NBYTES].view(np.uint64).reshape(-1, _ROW)
        for first in range(0, len(words), _ROWS_AT_A_TIME):
            block = words[first : first + _ROWS_AT_A_TIME]
            self._rows = zlib.crc32(np.add.reduce(block, axis=1).data, self._rows)
            self._columns += np.add.reduce(block, axis=0)
        self._done += words.nbytes

    def of(self, body: Bytes) -> int:
        """The checksum; all of ``body`` is written."""
        self.add(body, body.size)
        tail = zlib.crc32(body[self._done :].data)
        return zlib.crc32(tail.to_bytes(4, "little"), self._rows) << 32 | zlib.crc32(self._columns.data, tail)


def checksum_of(body: Bytes) -> int:
    """The checksum of a whole body."""
    return Checksum().of(body)
