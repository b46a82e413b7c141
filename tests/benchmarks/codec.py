"""What encoding and decoding cost, against pickle and against a bare copy of the same bytes.

    python -m tests.benchmarks.codec [--quick]

Samples of 1 KiB, 64 KiB and 1 MiB, encoded into a send buffer that is there and decoded as views; processor time of one
process with one torch thread. How to read it: at 1 KiB the microseconds a sample count (they are Python objects made
and looked at); from 64 KiB on the ratio to a bare copy counts. Of encoding 1 is the copy and the rest the checksum,
which reads the payload once more; decoding copies nothing.
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
from hp_nodes.transport.send_buffer import SendBuffer
from tests.benchmarks.record import Row, interleaved, run_alone

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


Figures = dict[str, list[float]]


def _microseconds(samples: list[Any], repeats: int) -> Figures:
    """Processor time a sample of each way, in each repeat; the first, which warms up, is dropped."""
    codec, outbox = Codec(), SendBuffer()
    buffer = codec.frame(samples).to_array()
    target = np.zeros_like(buffer)
    text = pickle.dumps(samples, pickle.HIGHEST_PROTOCOL)

    def encode() -> Any:
        outbox.clear()
        return codec.encode(samples, outbox)

    ways: dict[str, Callable[[], Any]] = {
        "encode": encode,
        "decode": lambda: codec.decode(buffer),
        "copy": lambda: np.copyto(target, buffer),
        "pickle": lambda: pickle.dumps(samples, pickle.HIGHEST_PROTOCOL),
        "unpickle": lambda: pickle.loads(text),
    }
    figures = interleaved({name: _timed(way, len(samples)) for name, way in ways.items()}, repeats + 1)
    return {name: values[1:] for name, values in figures.items()}


def _timed(call: Callable[[], Any], samples: int) -> Callable[[], float]:
    def timed() -> float:
        start = time.process_time()
        result = call()
        seconds = time.process_time() - start
        del result  # outside the measured time
        return 1e6 * seconds / samples

    return timed


def measure(arguments: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.codec")
    parser.add_argument("--quick", action="store_true", help="8 MiB instead of 64: 5 seconds instead of a minute")
    quick = parser.parse_args(arguments).quick
    total, repeats = (8 * KIB * KIB, 3) if quick else (64 * KIB * KIB, 5)
    command = "python -m tests.benchmarks.codec" + (" --quick" if quick else "")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator, rows = np.random.default_rng(0), []
    for nbytes in (KIB, 64 * KIB, KIB * KIB):
        for make in (two_fields, one_tensor, one_array):
            found = _microseconds(make(nbytes, total // nbytes, generator), repeats)
            what = f"{nbytes // KIB} KiB, {make.__name__.replace('_', ' ')}"
            pairs = [("encode", "pickle"), ("decode", "unpickle")]
            pairs += [] if nbytes == KIB else [("encode", "copy"), ("decode", "copy")]
            for way, other in pairs:
                rows.append(
                    Row.of(
                        f"{way} a sample of {what}",
                        "µs",
                        found[way],
                        baseline=other,
                        baseline_values=found[other],
                        command=command,
                    )
                )
    torch.set_num_threads(threads)
    return rows


if __name__ == "__main__":
    run_alone(measure)
