"""Replacement of records that cannot be read: which record comes in whose place, and how it is read.

Takes the key of a record, gives the record, or another one in its place and how many could not be read. The choice is a
pure function of (seed, epoch, occurrence position, attempt), so it is the same on any number of ranks and workers and
after a resume. The position stays: no other sample of the step changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from hp_nodes.types import SampleKey

__all__ = ["MAX_ATTEMPTS", "Replacement"]

MAX_ATTEMPTS = 3


class Replacement(NamedTuple):
    """Chooses among ``length`` records."""

    seed: int
    length: int

    def key(self, epoch: int, key: SampleKey, attempt: int) -> SampleKey:
        """What stands in for ``key`` at ``attempt`` 1, 2, ...: the same position, another index."""
        text = f"{self.seed}/{epoch}/{key.position}/{attempt}".encode()
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return key._replace(index=drawn % self.length)

    def read(self, epoch: int, key: SampleKey, read: Callable[[SampleKey], Any]) -> tuple[SampleKey, Any, int]:
        """The key that was read, its record, and how many could not be read before it.

        Raises:
            RuntimeError: neither the record nor any of its replacements can be read; it names them.
        """
        tried, first = [key], None
        for attempt in range(MAX_ATTEMPTS + 1):
            try:
                return tried[-1], read(tried[-1]), attempt
            except Exception as error:
                first = first or error
                tried.append(self.key(epoch, key, attempt + 1))
        others = [other.index for other in tried[1:-1]]
        raise RuntimeError(
            f"record {key.index} cannot be read ({type(first).__name__}: {first}), nor any of the records {others} in "
            "its place"
        ) from first
