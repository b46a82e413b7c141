"""What encoding and decoding cost: ``python tests/benchmarks/codec.py [--mebibytes 64] [--repeats 5]``.

One table: for samples of 1 KiB, 64 KiB and 1 MiB, the best of several runs of encoding (``frame`` and
``write_into`` into a buffer that is there) and of decoding, in microseconds a sample and bytes per second, as
shares of a bare copy of the same bytes and as multiples of what pickle takes for the same samples. All in one
process and one run, with one torch thread.

How to read it: at 1 KiB the microseconds a sample count (they are Python objects made and looked at); from 64 KiB
on the share of a bare copy counts. It cannot reach 1 while the checksum is computed: that reads the payload once
more.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hp_nodes.transport.codec import Codec

KIB = 1024


def two_fields(nbytes: int, count: int, generator: np.random.Generator) -> list[Any]:
    """Token records of about ``nbytes``, their lengths varying by a quarter."""
    tokens = nbytes // 16
    lengths = generator.integers(tokens * 3 // 4, tokens * 5 // 4 + 1, count).tolist()
    return [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in lengths]


def one_tensor(nbytes: int, count: int, generator: np.random.Generator) -> list[Any]:
    """Records of one tensor of exactly ``nbytes``."""
    return [{"x": torch.full((nbytes // 4,), i, dtype=torch.float32)} for i in range(count)]


def one_array(nbytes: int, count: int, generator: np.random.Generator) -> list[Any]:
    """Records of one numpy array of exactly ``nbytes``."""
    return [{"x": np.full(nbytes // 4, i, np.float32)} for i in range(count)]


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The shortest of several runs; results are dropped outside the measured time."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
        del result
    return best


def measure(samples: list[Any], repeats: int) -> tuple[float, float, float, float, float, int]:
    """Seconds of encoding, decoding, a bare copy, pickling and unpickling, and the frame's bytes."""
    codec = Codec()
    buffer = codec.frame(samples).to_array()
    target = np.empty_like(buffer)
    target[:] = 0
    copied = best_seconds(lambda: np.copyto(target, buffer), repeats)
    encoded = best_seconds(lambda: codec.frame(samples).write_into(target), repeats)
    decoded = best_seconds(lambda: codec.decode(target), repeats)
    pickled = best_seconds(lambda: pickle.dumps(samples, pickle.HIGHEST_PROTOCOL), min(repeats, 2))
    text = pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)
    unpickled = best_seconds(lambda: pickle.loads(text), min(repeats, 2))
    return encoded, decoded, copied, pickled, unpickled, buffer.size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    total = arguments.mebibytes * KIB * KIB
    print(f"{arguments.mebibytes} MiB; copy: share of a bare copy's speed; pickle: times faster than pickle")
    print(f"{'samples':24} {'':6} {'µs/sample':>10} {'GB/s':>7} {'copy':>6} {'pickle':>7}")
    for nbytes in (KIB, 64 * KIB, KIB * KIB):
        for make in (two_fields, one_tensor, one_array):
            samples = make(nbytes, total // nbytes, generator)
            encoded, decoded, copied, pickled, unpickled, size = measure(samples, arguments.repeats)
            for name, seconds, other in (("encode", encoded, pickled), ("decode", decoded, unpickled)):
                label = f"{nbytes // KIB} KiB {make.__name__}"
                each = seconds / len(samples) * 1e6
                share = f"{copied / seconds:6.2f} {other / seconds:7.1f}"
                print(f"{label:24} {name:6} {each:10.3f} {size / seconds / 1e9:7.2f} {share}")


if __name__ == "__main__":
    main()
