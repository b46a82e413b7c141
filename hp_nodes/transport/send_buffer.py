"""Where what leaves this rank is encoded: one buffer that grows, and that is used again for the next exchange.

A fresh buffer costs as much as writing it: the system hands its memory over page by page. What was sent is free again
once the exchange has returned, so the same memory serves every window.
"""

from __future__ import annotations

import sys

import numpy as np

from hp_nodes.transport.protocol import Bytes

__all__ = ["SendBuffer"]

_GENEROUS = 4  # times what recent exchanges took: memory beyond that is given back
_SMALL = 1 << 20  # bytes that are kept whatever


class SendBuffer:
    """Bytes that are written one behind the other.

    ``used`` counts them; beyond the limit they are no longer held (``overflowed``).
    """

    def __init__(self) -> None:
        self.used = 0
        self.overflowed = False
        self._limit = sys.maxsize
        self._recent = 0
        self._bytes = np.empty(0, dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are kept."""
        return self._bytes.size

    def clear(self, limit: int = sys.maxsize) -> None:
        """Begin anew, for at most ``limit`` bytes; the others have what was in it."""
        self._recent = max(self.used, self._recent // 2)
        if self._bytes.size > max(_SMALL, _GENEROUS * self._recent):
            self.drop()
        self.used = 0
        self.overflowed = False
        self._limit = limit

    def drop(self) -> None:
        """Give the memory back; what is in it has been sent."""
        self._bytes = np.empty(0, dtype=np.uint8)

    def expect(self, nbytes: int) -> None:
        """So many bytes are about to be added: make room at once rather than bit by bit."""
        if not self.overflowed and self.used + nbytes > self._bytes.size:
            grown = np.empty(min(self.used + nbytes, self._limit), dtype=np.uint8)
            grown[: self.used] = self._bytes[: self.used]
            self._bytes = grown

    def add(self, nbytes: int) -> bool:
        """Take the next bytes, to be written through :meth:`view`; False when the limit does not allow them."""
        if self.overflowed or self.used + nbytes > self._limit:
            self.overflowed = True
            return False
        if self.used + nbytes > self._bytes.size:
            self.expect(max(nbytes, self._bytes.size // 2))
            self.expect(nbytes)
        self.used += nbytes
        return True

    def view(self, start: int = 0, end: int | None = None) -> Bytes:
        """What was added, from ``start`` to ``end``; valid until more is added."""
        return self._bytes[start : self.used if end is None else end]
