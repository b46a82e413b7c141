"""Where the time of a window goes, node by node, and what of a training step the loop spends in ``next``.

    python -m tests.benchmarks.overhead [--quick]

Two real processes over Gloo, packed text records that are split, balanced and packed anew, windows of 256 and of about
1,000 samples over both ranks, one window a step, one window built ahead. Each step the loop waits 200 ms in place of
training, a part of it after each micro-batch. How to read it: a node's row is its own work for one window, in the
background thread but for those above the HostPrefetcher; with exchanges, waiting for the other rank included. Numbers
of a busy machine contain the work of others.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader
from hp_nodes.samplers import DistributedBatchSampler
from tests.benchmarks.record import Row, run_alone
from tests.distributed.ranks import RankPool

SEQ_LEN = 1024
DOCUMENTS = 8
STEP_S = 0.2
SIZES = {256: (4, 4), 1024: (8, 8)}
"""Samples of a window over two ranks: bins of a micro-batch, and rounds."""
WARM_UP = 4


class PackedText:
    """Records of 1,024 tokens in 8 documents of different lengths, made where they are read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens = torch.arange(SEQ_LEN)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        cuts = np.random.default_rng(index).choice(SEQ_LEN - 1, DOCUMENTS - 1, replace=False) + 1
        bounds = torch.from_numpy(np.concatenate([[0], np.sort(cuts), [SEQ_LEN]]).astype(np.int32))
        return {"input_ids": self.tokens, "labels": self.tokens, "cu_seq_lens": bounds}


def loader_of(samples: int, windows: int) -> DistributedDataLoader:
    from torch.distributed.device_mesh import init_device_mesh

    ranks, (micro, rounds) = dist.get_world_size(), SIZES[samples]
    batch = micro * rounds * ranks
    config = DistributedDatasetConfig(SEQ_LEN, micro, balance_window_size=rounds, repack_sequences=True)
    sampler = DistributedBatchSampler(windows * batch, micro, batch, dist.get_rank(), ranks, order="shuffle")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    return build_distributed_dataloader(PackedText(windows * batch), mesh, config, batch_sampler=sampler)


def _measure(samples: int, windows: int) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Of each step the share that the loop spent in ``next``; of each node milliseconds a window of its own work, and
    in exchanges.
    """
    rounds = SIZES[samples][1]
    shares: list[float] = []
    with loader_of(samples, windows + WARM_UP) as loader:
        batches = iter(loader)
        for _ in range(WARM_UP * rounds):
            next(batches)
            time.sleep(STEP_S / rounds)
        before = loader.stats()
        for _ in range(windows):
            waited = 0.0
            for _ in range(rounds):
                start = time.perf_counter()
                next(batches)
                waited += time.perf_counter() - start
                time.sleep(STEP_S / rounds)
            shares.append(100 * waited / STEP_S)
        nodes = loader.stats().since(before).nodes
    spent = {node.name: (1e3 * node.busy / windows, 1e3 * node.exchanging / windows) for node in nodes}
    return shares, spent


def rows_of(pool: RankPool, samples: int, windows: int, repeats: int, command: str) -> list[Row]:
    runs = [pool.run(_measure, samples, windows, timeout_s=120) for _ in range(repeats)]
    window = f"windows of {samples} samples"
    shares = [max(statistics.mean(shares) for shares, _ in ranks) for ranks in runs]
    rows = [
        Row.of(f"share of a 200 ms step in next(), {window}", "%", shares, wanted="≤ 1 %", command=command),
    ]
    for kind, label in enumerate(("own work", "in exchanges")):
        for name in runs[0][0][1]:
            spent = [max(times[name][kind] for _, times in ranks) for ranks in runs]
            if max(spent) >= 0.001:
                rows.append(Row.of(f"{name}, {label}, {window}", "ms", spent, command=command))
    return rows


def measure(arguments: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.overhead")
    parser.add_argument("--quick", action="store_true", help="fewer windows and repeats: 20 seconds instead of 90")
    quick = parser.parse_args(arguments).quick
    windows, repeats = (12, 2) if quick else (40, 5)
    command = "python -m tests.benchmarks.overhead" + (" --quick" if quick else "")
    pool = RankPool(2)
    try:
        return [row for samples in SIZES for row in rows_of(pool, samples, windows, repeats, command)]
    finally:
        pool.stop()


if __name__ == "__main__":
    run_alone(measure)
