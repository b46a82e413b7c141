"""What reading with workers costs a window: ``python tests/benchmarks/read_workers.py [--windows 40] [--workers 2]``.

One table, for records of two token tensors: milliseconds a window of the reader, whose one DataLoader is fed window
after window; of a new DataLoader for each window; of one DataLoader fed the same way, with each tensor sent as torch
does, through shared memory of its own; and of reading here, without workers.

How to read it: the dataset itself takes next to no time, so all of it is overhead. Below the time of a training step it
costs nothing, since windows are read ahead; above, the loop waits for the difference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hp_nodes import SampleReader, WindowSampler
from hp_nodes.samplers import DistributedBatchSampler

RECORD_TOKENS = 64  # 1 KiB in two tensors


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    ways: dict[str, Callable[[Records, int], Iterator[Any]]] = {
        "fed lazily (ours)": lambda records, samples: lazily_fed(records, samples, chosen.workers),
        "a DataLoader a window": lambda records, samples: loader_per_window(records, samples, chosen.workers),
        "one DataLoader, tensors sent singly": lambda records, samples: one_loader(records, samples, chosen.workers),
        "no workers (ours)": lambda records, samples: lazily_fed(records, samples, 0),
    }
    torch.set_num_threads(1)
    print(
        f"{chosen.workers} workers, {chosen.windows} windows, 1 KiB in two tensors a sample; ms to the first, ms each"
    )
    print(f"{'samples a window':36}" + "".join(f"{samples:>20}" for samples in (16, 256, 1000)))
    for name, read in ways.items():
        cells = []
        for samples in (16, 256, 1000):
            first, each = milliseconds(iter(read(Records(samples * chosen.windows), samples)))
            cells.append(f"{first:9.1f} {each:10.2f}")
        print(f"{name:36}" + "".join(cells))


if __name__ == "__main__":
    main()
