"""Windows without end on real ranks that fail: ``python -m tests.soak_data_plane [--windows 10000] [--restarts 20]``.

Ranks are processes over Gloo. Again and again one of them fails to read or to collate, leaves its loop with an error or
is killed; all build their loader anew from the last state and go on, after a kill (a restart) in new processes. Looked
for: a hang, a sample that a step lost or got twice, an error that differs between ranks, and growth of memory, threads
and open files over the loaders that one process has had.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from tests.distributed.ranks import RankPool

EPOCH = 4_000
GLOBAL_BATCH = 16
KINDS = ("read", "collate", "loop", "none")
MOST_GROWTH_MIB = 24.0


class Fault(NamedTuple):
    """What happens on one rank once it has done something ``after`` times. "none": it closes its loader, as all do."""

    kind: str
    rank: int
    after: int
    depth: int


class Held(NamedTuple):
    """What a process holds."""

    mib: float
    threads: int
    files: int


class Numbers:
    """Record i is 1 to 64 times i; one read may fail."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.reads = 0

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads += 1
        if self.reads == self.fails_at:
            raise OSError(f"record {index} cannot be read")
        return np.full(1 + index * 37 % 64, index)


def describe(record: Any) -> SampleMetadata:
    return SampleMetadata(len(record), cost=WorkloadCost(llm=float(len(record)) ** 2))


class Collate:
    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.calls = 0

    def __call__(self, bins: Any) -> list[int]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("cannot collate")
        return [int(record[0]) for record in bins]


def attempt(folder: Path, state: dict[str, Any] | None, fault: Fault) -> tuple[str, Held]:
    """Go on from ``state`` until the fault; each step is noted in a file of this rank's when it is complete."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = fault.after if fault.rank == rank else None
    error = ""
    config = DistributedDatasetConfig(
        64,
        2,
        balance_window_size=2,
        host_prefetch_depth=fault.depth,
        timeout_s=60.0,
        broadcast_plan=fault.after % 2 > 0,
    )
    with open(folder / f"rank{rank}", "w") as file:
        loader = build_distributed_dataloader(
            Numbers(4 * fault.after if mine and fault.kind == "read" else None),
            init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)),
            config,
            batch_sampler=DistributedBatchSampler(EPOCH, 2, GLOBAL_BATCH, rank, size, order="shuffle", seed=3),
            metadata_fn=describe,
            collate_fn=Collate(2 * fault.after if mine and fault.kind == "collate" else None),
        )
        if state is not None:
            loader.load_state_dict(state)
        try:
            with loader:
                run(loader, file, fault, mine)
        except (DataPlaneError, FloatingPointError) as failure:
            error = "" if isinstance(failure, FloatingPointError) else str(failure)
            failure.__traceback__ = None
    del loader
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    held = Held(
        pages * resource.getpagesize() / 2**20, threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    )
    return error, held


def run(loader: Any, file: Any, fault: Fault, mine: int | None) -> None:
    windows, step = 0, []
    while True:
        for batch in loader:
            step += list(loader.last.positions)
            assert len(batch) == 2
            if not loader.last.ends_window:
                continue
            windows += 1
            if loader.last.ends_step:
                note = {"place": [loader.last.epoch, loader.last.step], "positions": step, "state": loader.state_dict()}
                file.write(json.dumps(note) + "\n")
                file.flush()
                step = []
            if mine == windows and fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mine == windows and fault.kind == "loop":
                raise FloatingPointError("loss is NaN")
            if windows == fault.after and fault.kind == "none":
                return


class Soak:
    """Attempts one after the other, and what they have come to."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.ranks = ranks
        self.random = random.Random(seed)
        self.pool = RankPool(ranks)
        self.state: dict[str, Any] | None = None
        self.place = (0, 0)
        self.windows = self.restarts = self.failures = 0
        self.first: list[Held] | None = None
        self.growth = Held(0.0, 0, 0)

    def once(self, folder: Path, kind: str, after: int) -> None:
        fault = Fault(kind, self.random.randrange(self.ranks), after, self.random.randrange(4))
        lost = [fault.rank] if kind == "kill" else []
        results = self.pool.run(attempt, folder, self.state, fault, timeout_s=180.0, lost=lost)
        survivors = [result for result in results if result is not None]
        errors = {error for error, _ in survivors if error}
        if kind in ("read", "collate"):
            assert len(errors) == 1, f"ranks raised different errors: {errors}"
        self.failures += kind != "none"
        self.check_steps(folder)
        if kind == "kill":
            self.restarts += 1
            self.first = None
        else:
            self.check_growth([held for _, held in survivors])

    def check_steps(self, folder: Path) -> None:
        """Every step that all ranks completed has exactly the sampler's samples, and follows the one before."""
        told = [
            [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]
            for rank in range(self.ranks)
        ]
        for notes in zip(*told, strict=False):
            places = {tuple(note["place"]) for note in notes}
            assert places == {self.place}, f"{places} where {self.place} follows"
            epoch, step = self.place
            positions = sorted(position for note in notes for position in note["positions"])
            assert positions == list(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)), (self.place, positions)
            assert all(note["state"] == notes[0]["state"] for note in notes)
            self.state = notes[0]["state"]
            self.place = (epoch, step + 1) if step + 1 < EPOCH // GLOBAL_BATCH else (epoch + 1, 0)
            self.windows += GLOBAL_BATCH // (4 * self.ranks) or 1

    def check_growth(self, held: list[Held]) -> None:
        """Against what the same processes held after their second loader: the first one imports and fills caches."""
        if self.first is None:
            self.first = []
            return
        if not self.first:
            self.first = held
        for before, now in zip(self.first, held, strict=True):
            grown = Held(now.mib - before.mib, now.threads - before.threads, now.files - before.files)
            self.growth = Held(*map(max, self.growth, grown))
            assert grown.threads <= 0 and grown.files <= 0, f"{before} became {now}"
            assert grown.mib < MOST_GROWTH_MIB, f"{before} became {now}"


def soak(windows: int, restarts: int, ranks: int, seed: int, length: int) -> Soak:
    """Go on for this many windows and restarts; ``length`` windows an attempt, about."""
    found, start = Soak(ranks, seed), time.perf_counter()
    attempts = 0
    try:
        with tempfile.TemporaryDirectory() as name:
            while found.windows < windows or found.restarts < restarts:
                due = found.restarts < restarts * min(1.0, found.windows / windows) and attempts > 2
                kind = "kill" if due else KINDS[found.random.randrange(len(KINDS))]
                found.once(Path(name), kind, found.random.randrange(length // 2, length * 3 // 2))
                attempts = 0 if due else attempts + 1
                if due or found.windows >= windows:
                    seconds = time.perf_counter() - start
                    growth = f"at most {found.growth.mib:.1f} MiB"
                    print(
                        f"{found.windows} windows on {ranks} ranks, {found.failures} failures, {found.restarts} "
                        f"restarts: nothing lost, no hang; growth {growth}, {seconds:.0f} s",
                        flush=True,
                    )
    finally:
        found.pool.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--length", type=int, default=80, help="windows of an attempt, about")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    soak(options.windows, options.restarts, options.ranks, options.seed, options.length)


if __name__ == "__main__":
    main()
