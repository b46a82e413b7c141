"""Randomness that survives a resume: one seed for each occurrence of a record.

A dataset that calls :func:`sample_rng` draws the same numbers for the same (seed, epoch, occurrence position), whatever
the number of ranks or workers and wherever a run was resumed. Generators are made on first use. In reader worker
processes the global generators are reseeded for each sample as well; in the trainer's process they are never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch

__all__ = ["SampleRng", "occurrence", "reseed_global_generators", "sample_rng"]

_current = threading.local()


class SampleRng:
    """The generators of one occurrence: ``python``, ``numpy``, ``torch``; ``seed`` is the 64-bit seed they share."""

    def __init__(self, seed: int, epoch: int, position: int) -> None:
        text = f"{seed}/{epoch}/{position}".encode()
        self.seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @cached_property
    def python(self) -> random.Random:
        return random.Random(self.seed)

    @cached_property
    def numpy(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self.seed))

    @cached_property
    def torch(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def sample_rng() -> SampleRng:
    """The generators of the occurrence that is being read on this thread.

    Raises:
        RuntimeError: nothing is being read here; the dataset was called outside a graph.
    """
    rng: SampleRng | None = getattr(_current, "rng", None)
    if rng is None:
        raise RuntimeError("sample_rng() works while a graph reads or splits a record; here nothing is being read")
    return rng


@contextlib.contextmanager
def occurrence(seed: int, epoch: int, position: int) -> Iterator[SampleRng]:
    """Make :func:`sample_rng` speak of this occurrence."""
    before = getattr(_current, "rng", None)
    _current.rng = rng = SampleRng(seed, epoch, position)
    try:
        yield rng
    finally:
        _current.rng = before


def reseed_global_generators(seed: int) -> None:
    """For a reader worker process only: code that draws from the global generators becomes exact there."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
