"""What reading with workers costs a window.

    python -m tests.benchmarks.read_workers [--windows 40] [--workers 2] [--repeats 5] [--quick]

For records of two token tensors: milliseconds a window of the reader, whose one DataLoader is fed window after window,
next to those of a new DataLoader for each window; of one DataLoader fed the same way, with each tensor sent as torch
does, through shared memory of its own; and of reading here, without workers.

How to read it: the dataset itself takes next to no time, so all of it is overhead. Below the time of a training step it
costs nothing, since windows are read ahead; above, the loop waits for the difference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from hp_nodes import SampleReader, WindowSampler
from hp_nodes.samplers import DistributedBatchSampler
from tests.benchmarks.record import Row, interleaved, run_alone

RECORD_TOKENS = 64  # 1 KiB in two tensors
SAMPLES = (16, 256, 1000)
"""Records of a window."""
OURS = "fed window after window"


class Records:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((RECORD_TOKENS,), index)
        return {"input_ids": tokens, "labels": tokens.clone()}


def unchanged(batch: Any) -> Any:
    return batch


def lazily_fed(records: Records, samples: int, workers: int) -> Iterator[Any]:
    sampler = DistributedBatchSampler(len(records), samples, samples, 0, 1)
    reader = SampleReader(WindowSampler(sampler, 1), records, num_workers=workers)
    yield from reader
    reader.close()


def one_loader(records: Records, samples: int, workers: int) -> Iterator[Any]:
    yield from DataLoader(records, batch_size=samples, num_workers=workers, collate_fn=unchanged)


def loader_per_window(records: Records, samples: int, workers: int) -> Iterator[Any]:
    for first in range(0, len(records), samples):
        window = range(first, first + samples)
        chunks = [list(window[number::workers]) for number in range(workers)]
        yield list(DataLoader(records, batch_sampler=chunks, num_workers=workers, collate_fn=unchanged))


def milliseconds(windows: Iterator[Any]) -> tuple[float, float]:
    """To the first window, and of each later one."""
    start = time.perf_counter()
    next(windows)
    first = time.perf_counter()
    count = sum(1 for _ in windows)
    return 1e3 * (first - start), 1e3 * (time.perf_counter() - first) / count


WAYS: dict[str, Callable[[Records, int, int], Iterator[Any]]] = {
    OURS: lazily_fed,
    "a new DataLoader for each window": loader_per_window,
    "one DataLoader, tensors sent singly": one_loader,
    "no workers": lambda records, samples, workers: lazily_fed(records, samples, 0),
}


def measure(arguments: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="10 windows, once")
    chosen = parser.parse_args(arguments)
    windows, repeats = (10, 1) if chosen.quick else (chosen.windows, chosen.repeats)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for samples in SAMPLES for row in rows_of(samples, windows, chosen.workers, repeats)]
    finally:
        torch.set_num_threads(threads)


def rows_of(samples: int, windows: int, workers: int, repeats: int) -> list[Row]:
    """Our reader next to each other way, at so many samples a window."""
    records = Records(samples * windows)

    def taken(name: str) -> float:
        return milliseconds(iter(WAYS[name](records, samples, workers)))[1]

    figures = interleaved({name: partial(taken, name) for name in WAYS}, repeats)
    return [
        Row.of(
            f"a window of {samples} records read by {workers} workers",
            "ms",
            figures[OURS],
            baseline=name,
            baseline_values=figures[name],
            command="python -m tests.benchmarks.read_workers",
        )
        for name in WAYS
        if name != OURS
    ]


if __name__ == "__main__":
    run_alone(measure)
