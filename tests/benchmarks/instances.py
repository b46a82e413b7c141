"""Problems for benchmarks: real and generated length distributions, packed into reference bins as a loader would.

* *Wide*: a full bin holds about 8 average samples; longer samples than a bin are left out. *Tight*: about 3.5, longer
  samples clipped to ``seq_len``. *No-short*: wide without samples under ``seq_len / 8``.
* *Square*: a sample of L tokens costs L². *Dense*: 24576 L + L².
* Fill: the part of each reference bin that is filled; 1.0 fills every bin to its last token.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hp_nodes.planning import PackingProblem

SOURCES = ("azure", "python", "lognormal", "chat")
SHAPES = ("wide", "tight", "no-short")
COSTS = ("dense", "square")
LENGTHS = Path(__file__).parent / "lengths"
LOOKAHEAD = 32
"""Samples among which a reference bin looks for one that still fits."""


def costs_of(tokens: NDArray[np.int64], cost: str) -> NDArray[np.float64]:
    length = tokens.astype(np.float64)
    return length * length if cost == "square" else 24576 * length + length * length


def problem(
    source: str, shape: str, fill: float, ranks: int, rounds: int, slots: int = 1, *, cost: str = "dense", seed: int = 0
) -> PackingProblem:
    tokens, reference, seq_len = _packed(source, shape, fill, ranks * rounds * slots, seed)
    return PackingProblem(
        tokens,
        costs_of(tokens, cost),
        reference,
        data_parallel_size=ranks,
        num_rounds=rounds,
        local_batch_size=slots,
        seq_len=seq_len,
    )


@functools.cache
def _lengths(source: str) -> NDArray[np.int64]:
    rng = np.random.default_rng(1)
    if source == "azure":
        return np.loadtxt(LENGTHS / "azure_code.csv", skiprows=1).astype(np.int64)
    if source == "python":
        return np.loadtxt(LENGTHS / "python_source_bytes.csv", skiprows=1).astype(np.int64)
    if source == "lognormal":
        return rng.lognormal(7, 1, 20_000).astype(np.int64) + 1
    return np.minimum(200 * rng.pareto(0.9, 20_000) + 20, 126_000).astype(np.int64)


def _seq_len(lengths: NDArray[np.int64], per_bin: float, clip: bool) -> tuple[int, NDArray[np.int64]]:
    """``per_bin`` average samples, and the samples without those above it, or with those clipped to it."""
    seq_len = int(per_bin * lengths.mean())
    for _ in range(30):
        within = np.minimum(lengths, seq_len) if clip else lengths[lengths <= seq_len]
        seq_len = int(per_bin * within.mean())
    return seq_len, np.minimum(lengths, seq_len) if clip else lengths[lengths <= seq_len]


@functools.lru_cache(maxsize=8)
def _packed(
    source: str, shape: str, fill: float, num_bins: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    rng = np.random.default_rng(seed)
    lengths = _lengths(source)
    seq_len, lengths = _seq_len(lengths, *((3.5, True) if shape == "tight" else (8, False)))
    if shape == "no-short":
        lengths = lengths[lengths >= seq_len / 8]
    limit = max(int(seq_len * fill), 1)
    stream = iter(())
    pool: list[int] = []
    tokens: list[int] = []
    reference: list[int] = []
    for number in range(num_bins):
        used = 0
        while used < limit:
            while len(pool) < LOOKAHEAD:
                length = next(stream, None)
                if length is None:
                    stream = iter(rng.choice(lengths, 4 * num_bins + 1000).tolist())
                    continue
                pool.append(length)
            place = next((k for k, length in enumerate(pool) if used + length <= limit or not used), None)
            if place is None:
                break
            tokens.append(pool.pop(place))
            reference.append(number)
            used += tokens[-1]
        if fill == 1.0:
            tokens[-1] += seq_len - used
    return np.array(tokens), np.array(reference, np.int32), seq_len
