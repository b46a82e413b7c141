"""A training program that may be killed at any moment: ``torchrun ... -m tests.distributed.training DIRECTORY STEPS``.

What it trains is one number: the sum of all records it was given, reduced over the ranks in every step. So a record
that was lost or came twice shows in the result. Checkpoints hold it and the loader; each rank writes down what it got.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from hp_nodes.samplers import DistributedBatchSampler
from tests.saved_states import whole_records

SIZE, GLOBAL_BATCH, EVERY = 50, 8, 2
PAUSE_S = 0.02


def make_loader(mesh: Any) -> Any:
    sampler = DistributedBatchSampler(SIZE, 2, GLOBAL_BATCH, mesh.get_local_rank(), mesh.size(), order="shuffle")
    return whole_records(mesh, sampler, SIZE, balance_window_size=2)


class Training:
    """The number, the loader, and their checkpoints."""

    def __init__(self, directory: Path, mesh: Any) -> None:
        self.directory = directory
        self.loader = make_loader(mesh)
        self.total = torch.zeros(1, dtype=torch.int64)
        self.done = torch.zeros(1, dtype=torch.int64)
        newest = directory / "newest"
        if newest.exists():
            dcp.load(self.state(), checkpoint_id=directory / newest.read_text())

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "done": self.done, "loader": self.loader}

    def step(self, records: list[int]) -> None:
        update = torch.tensor([sum(records)])
        dist.all_reduce(update)
        self.total += update
        self.done += 1

    def save(self) -> None:
        name = f"step_{int(self.done)}"
        dcp.save(self.state(), checkpoint_id=self.directory / name)
        if dist.get_rank() == 0:
            (self.directory / "newest.partial").write_text(name)
            os.replace(self.directory / "newest.partial", self.directory / "newest")


def train(directory: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(directory, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}{time.time_ns()}_{rank}"
    (directory / f"pid_{attempt}").write_text(str(os.getpid()))
    loader = training.loader
    with open(directory / f"given_{attempt}.jsonl", "a", encoding="utf-8", buffering=1) as log, loader:
        records: list[int] = []
        while int(training.done) < steps:
            for batch in loader:
                records += batch
                if not loader.last.ends_step:
                    continue
                log.write(json.dumps([int(training.done), sorted(records)]) + "\n")
                training.step(records)
                records = []
                time.sleep(PAUSE_S)
                if int(training.done) % EVERY == 0:
                    training.save()
                if int(training.done) == steps:
                    break
    if rank == 0:
        (directory / "result").write_text(str(int(training.total)))
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
