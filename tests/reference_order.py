"""The order by definition, in Python's own ints: which records a step holds. Uses nothing of the library.

Place p of an epoch holds record p, or the record that a Feistel network sends p to: over pairs (L, R) of Z_a × Z_b,
a the square root of the size rounded up and b the size over a rounded up, six times two rounds, L += F_a(R + k) and
R += F_b(L + k'), F the finaliser of SplitMix64 and its upper 32 bits scaled to the modulus; what lands outside goes
through again (Black and Rogaway 2002). The keys are SHAKE-128 of the text "(seed, epoch)". Step s of an epoch holds
the places from s·G on, G of them; rank r of a round takes the r-th slice.
"""

from __future__ import annotations

import hashlib
import math


def record_at(place: int, size: int, seed: int, epoch: int) -> int:
    """The record at a place of a shuffled epoch."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    stream = hashlib.shake_128(f"({seed}, {epoch})".encode()).digest(96)
    keys = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(12)]

    def scrambled(bound: int, word: int) -> int:
        word %= 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return (word ^ word >> 31) // 2**32 * bound // 2**32

    while True:
        left, right = divmod(place, b)
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            left = (left + scrambled(a, right + first)) % a
            right = (right + scrambled(b, left + second)) % b
        place = left * b + right
        if place < size:
            return place


def step_records(step: int, global_batch: int, size: int, seed: int | None, epoch: int) -> list[int]:
    """The records of a step in the order of their places; ``seed`` None: unshuffled."""
    places = range(step * global_batch, (step + 1) * global_batch)
    return [place if seed is None else record_at(place, size, seed, epoch) for place in places]


def rank_share(records: list[int], rank: int, ranks: int, micro_batch: int) -> list[int]:
    """Those of a step's records that a rank's sampler reads."""
    starts = range(rank * micro_batch, len(records), micro_batch * ranks)
    return [record for start in starts for record in records[start : start + micro_batch]]
