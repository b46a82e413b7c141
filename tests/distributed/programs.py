"""Programs of two ranks that end in every way a training program ends. Run as a script, it prints how each ended.

Each rank is forked from a process that has imported torch, runs one of the programs below with a loader that reads
ahead in a thread and in worker processes, and then ends as any Python program does: at the end of its text, by an
exception, by ``sys.exit``. Nothing here calls ``os._exit``.

    python -m tests.distributed.programs NAME...     ->   JSON: {NAME: {"codes": [0, 0], "seconds": 1.2, "left": 0}}
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler

SIZE = 64
LIMIT_S = 45.0
TOGETHER = 4


class Numbers:
    """Record i is 16 times i; ``slow`` seconds pass for each."""

    def __init__(self, slow: float = 0.0) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self.slow)
        return np.full(16, index)


def describe(record: Any) -> SampleMetadata:
    return SampleMetadata(16, cost=WorkloadCost(llm=1.0 + record[0] % 7))


def build(dataset: Any = None, workers: int = 2, depth: int = 2) -> DistributedDataLoader:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return build_distributed_dataloader(
        dataset or Numbers(),
        mesh,
        DistributedDatasetConfig(32, 2, balance_window_size=2, host_prefetch_depth=depth, timeout_s=60.0),
        batch_sampler=DistributedBatchSampler(SIZE, 2, 8, mesh.get_local_rank("dp"), mesh.size(0)),
        metadata_fn=describe,
        dataloader_kwargs={"num_workers": workers},
    )


def never_closed() -> None:
    """To the end of the epoch, and the loader is never closed."""
    global kept
    kept = build()
    assert len(list(kept)) == SIZE // 4


def broken_off() -> None:
    """A break in the loop, the loader still there at the end of the program."""
    global kept
    kept = build()
    for _ in kept:
        break


def in_a_cycle() -> None:
    """What only the cycle collector, or nobody, frees."""
    gc.disable()
    loader = build()
    next(loader)
    cycle: list[Any] = [loader]
    cycle.append(cycle)


def raising() -> None:
    for _ in build():
        raise FloatingPointError("loss is NaN")


def one_rank_raises() -> None:
    """The other hears of it, or of its end, and ends too."""
    with build() as loader:
        for count, _ in enumerate(loader):
            if dist.get_rank() == 1 and count == 1:
                raise FloatingPointError("loss is NaN")


def exiting() -> None:
    for _ in build():
        sys.exit(7)


def group_destroyed_before() -> None:
    """While the loader reads ahead."""
    global kept
    kept = build()
    next(kept)
    dist.destroy_process_group()


def group_destroyed_after() -> None:
    loader = build()
    next(loader)
    loader.close()
    dist.destroy_process_group()


def group_destroyed_in_the_middle() -> None:
    """The loader goes on: its groups are its own."""
    global kept
    kept = build()
    next(kept)
    dist.destroy_process_group()
    assert len(list(kept)) == SIZE // 4 - 1


def unequal() -> None:
    """Rank 0 ends after its first micro-batch, rank 1 wants the whole epoch."""
    global kept
    kept = build(workers=0)
    next(kept)
    if dist.get_rank() == 1:
        list(kept)


def stuck_dataset() -> None:
    """A read that blocks for minutes in the background thread."""
    global kept
    kept = build(Stuck(), workers=0)
    next(kept)


def interrupted() -> None:
    """Control-C while the consumer waits."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    for _ in build(Numbers(slow=0.05)):
        pass


class Stuck(Numbers):
    def __getitem__(self, index: int) -> np.ndarray:
        if index >= 12:
            time.sleep(300)
        return super().__getitem__(index)


kept: DistributedDataLoader | None = None
PROGRAMS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        never_closed,
        broken_off,
        in_a_cycle,
        raising,
        one_rank_raises,
        exiting,
        group_destroyed_before,
        group_destroyed_after,
        group_destroyed_in_the_middle,
        unequal,
        stuck_dataset,
        interrupted,
    )
}


def start(name: str) -> list[int] | None:
    """Run a program on two ranks, each the leader of a process group; None in a rank, which then comes to its end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
            os.setpgid(0, 0)
            torch.set_num_threads(1)
            dist.init_process_group("gloo")
            PROGRAMS[name]()
            return None
        ranks.append(child)
    return ranks


def wait_for(programs: dict[str, list[int]]) -> dict[str, Any]:
    """Exit codes, a signal as its negative, None where a rank did not end; seconds; ranks that left processes."""
    started = time.monotonic()
    running = {child for ranks in programs.values() for child in ranks}
    codes: dict[int, int] = {}
    seconds: dict[int, float] = {}
    while running and time.monotonic() - started < LIMIT_S:
        for child in list(running):
            if (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(ended[1])
                seconds[child] = round(time.monotonic() - started, 2)
                running.remove(child)
        time.sleep(0.02)
    time.sleep(0.2)
    left = {child for ranks in programs.values() for child in ranks if kill_group(child)}
    for child in running:
        os.waitpid(child, 0)
    return {
        name: {
            "codes": [codes.get(child) for child in ranks],
            "seconds": max(seconds.get(child, LIMIT_S) for child in ranks),
            "left": sum(child in left for child in ranks),
        }
        for name, ranks in programs.items()
    }


def kill_group(leader: int) -> bool:
    """Whether there was anything left to kill."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main(names: list[str]) -> None:
    found: dict[str, Any] = {}
    for first in range(0, len(names), TOGETHER):
        programs: dict[str, list[int]] = {}
        for name in names[first : first + TOGETHER]:
            ranks = start(name)
            if ranks is None:
                return  # a rank, at the end of its program
            programs[name] = ranks
        found |= wait_for(programs)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROGRAMS))
