"""What the data plane costs: exchange, planning traffic, windows in which nothing moves, and failures.

    python -m tests.benchmarks.data_plane [--quick] [--only exchange,memory,planning,still,failure]

Two real processes over Gloo on this machine. Every figure is a ratio, or a difference, of things measured in the same
run, interleaved; a median is shown with its quartiles. How to read it: the exchange is bounded by memory, since Gloo
copies between processes through sockets; so what encoding and decoding cost shows as what is missing to 1. At 1 KiB the
Python objects that are made and looked at count, from 64 KiB on the bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hp_nodes import DataPlaneError, DistributedDataLoader, SampleMetadata
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.transport import DataTopology, Transport, create_transport
from hp_nodes.transport.codec import Codec
from hp_nodes.transport.opening import HEAD_NBYTES
from hp_nodes.transport.payload import Payload
from tests.benchmarks.record import Row, run_alone
from tests.distributed.ranks import RankPool
from tests.scenes import Documents, Scene

KIB = 1024
MIB = 1024 * KIB


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall time of what all ranks begin together; results are dropped outside it."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def topology() -> DataTopology:
    from torch.distributed.device_mesh import init_device_mesh

    return DataTopology.from_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def samples_of(nbytes: int, total: int) -> list[Any]:
    return [{"x": torch.full((nbytes // 4,), number, dtype=torch.float32)} for number in range(total // nbytes)]


# ---- exchange


def exchange(transport: Transport, samples: list[Any]) -> Callable[[], Any]:
    """Everything moves: encode, exchange, decode, as the Router does it."""
    payload = Payload(transport, Codec())
    other = 1 - transport.rank
    keys = np.stack([np.arange(len(samples)), np.arange(len(samples)), np.zeros(len(samples), np.int64)], axis=1)
    targets = np.full(len(samples), other, dtype=np.int32)
    arrivals = [0, 0]
    arrivals[other] = len(samples)

    def call() -> Any:
        parcels = payload.pack(keys, samples, targets)
        sizes = [0, 0]
        sizes[other] = parcels[other].frame_nbytes  # both have samples of the same sizes
        return payload.carry(parcels, arrivals, sizes, parcels[other].nbytes, 1, "benchmark")

    return call


def _measure_exchange(nbytes: int, total: int, repeats: int) -> dict[str, list[float]]:
    transport = create_transport(topology(), timeout_s=120)
    samples = samples_of(nbytes, total)
    ours = exchange(transport, samples)
    send = torch.zeros(total, dtype=torch.uint8)
    sizes = [0, 0]
    sizes[1 - transport.rank] = total

    def bare() -> Any:
        out = torch.empty(total, dtype=torch.uint8)
        dist.all_to_all_single(out, send, sizes, sizes)
        return out

    def objects() -> Any:
        gathered: list[Any] = [None] * transport.size
        dist.all_gather_object(gathered, samples)
        return gathered

    found: dict[str, list[float]] = {name: [] for name in ("ours", "bare", "objects", "cpu of ours", "cpu of bare")}
    for number in range(repeats + 1):
        took = {}
        for name, call in (("ours", ours), ("bare", bare)):
            before = time.process_time()
            took[name] = seconds_of(call)
            took[f"cpu of {name}"] = time.process_time() - before
        # Twice: of many small samples it takes a hundred times as long as anything else here.
        took["objects"] = seconds_of(objects) if number in (1, repeats) else float("nan")
        if number:  # the first warms up
            for name, seconds in took.items():
                found[name].append(seconds)
    transport.close()
    return found


def exchange_rows(pool: RankPool, total: int, repeats: int, command: str) -> list[Row]:
    rows = []
    for nbytes, target in ((KIB, 0.4), (64 * KIB, 0.75), (MIB, 0.75)):
        first, second = pool.run(_measure_exchange, nbytes, total, repeats, timeout_s=400)
        slower = {name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in first}
        speed = {name: [total / seconds / 1e9 for seconds in slower[name]] for name in ("ours", "bare", "objects")}
        what = f"exchange of {total // MIB} MiB in samples of {nbytes // KIB} KiB, all moving"
        bare = "bare all_to_all_single into a fresh output"
        rows.append(_row(what, "GB/s", speed["ours"], bare, speed["bare"], f"≥ {target} times", command))
        both = [pair for pair in zip(speed["ours"], speed["objects"], strict=True) if pair[1] == pair[1]]
        ours, objects = map(list, zip(*both, strict=True))
        rows.append(_row(what, "GB/s", ours, "all_gather_object", objects, "≥ 4 times", command))
        milliseconds = {name: [1e3 * seconds for seconds in slower[f"cpu of {name}"]] for name in ("ours", "bare")}
        rows.append(
            _row(f"processor time, {what}", "ms", milliseconds["ours"], bare, milliseconds["bare"], None, command)
        )
    return rows


def _row(
    what: str, unit: str, values: list[float], baseline: str, others: list[float], wanted: str | None, command: str
) -> Row:
    return Row.of(
        what, unit, values, baseline=baseline, baseline_values=others, wanted=wanted, command=f"{command} exchange"
    )


def _measure_memory(nbytes: int, total: int) -> tuple[int, int]:
    """Bytes above what was there before, at the highest, of an exchange in which everything moves; and bytes moved."""
    transport = create_transport(topology(), timeout_s=120)
    samples = samples_of(nbytes, total)
    exchange(transport, samples[: max(1, len(samples) // 16)])()  # what is loaded once
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what the allocator kept of earlier exchanges would be taken for nothing
    before = _resident()
    _forget_peak()
    kept = exchange(transport, samples)()
    peak = _peak() - before
    assert len(kept.samples) == len(samples)
    transport.close()
    return peak, total


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * KIB for line in file if line.startswith("VmHWM"))


def memory_rows(pool: RankPool, total: int, command: str) -> list[Row]:
    rows = []
    for nbytes in (KIB, 64 * KIB, MIB):
        peaks = [peak / moved for peak, moved in pool.run(_measure_memory, nbytes, total, timeout_s=120)]
        what = f"peak memory of an exchange of {total // MIB} MiB in samples of {nbytes // KIB} KiB, in moved bytes"
        rows.append(Row.of(what, "times", [max(peaks)], wanted="≤ 2.3", command=f"{command} memory"))
    return rows


# ---- a graph


class Counting:
    """Counts what goes through a transport."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in ("all_gather", "broadcast", "all_to_all"):
            return value

        def counted(buffer: Any, *arguments: Any) -> Any:
            self.calls.append((arguments[-1].split(": ")[-1], len(buffer)))
            return value(buffer, *arguments)

        return counted


def _count_planning(steps: int) -> tuple[float, float, float]:
    """Exchanges of a window, usually; bytes of planning traffic a sample beyond what each rank says of a window, all
    else included; the most exchanges of a window behind the first.
    """
    counters: list[Counting] = []

    def wrap(transport: Transport) -> Counting:
        counters.append(Counting(transport))
        return counters[0]

    scene = Scene(dataset=Documents(steps * 64), global_batch=64, micro=4, window=8, depth=0, wrap_transport=wrap)
    samples = windows = 0
    with scene.loader(mesh()) as loader:
        for _ in loader:
            report = loader.last.report
            if loader.last.ends_window:
                windows += 1
                samples += int(report.plan.samples_after.sum()) if loader.last.ends_step else 0
    calls = counters[0].calls
    in_window: list[int] = [0]
    for name, _ in calls:
        in_window[-1] += 1
        if name == "closing":
            in_window.append(0)
    numbers = sum(
        nbytes - HEAD_NBYTES * (name == "opening") for name, nbytes in calls if name in ("opening", "numbers")
    )
    return statistics.median(in_window[:windows]), numbers * dist.get_world_size() / samples, max(in_window[1:windows])


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def planning_rows(pool: RankPool, steps: int, command: str) -> list[Row]:
    exchanges, sent, most = max(pool.run(_count_planning, steps, timeout_s=120))
    command = f"{command} planning"
    return [
        Row(
            "planning: bytes that a rank says of its window", HEAD_NBYTES, "bytes", wanted="≤ 64 bytes", command=command
        ),
        Row(
            "planning: bytes a sample besides, room for larger windows included",
            sent,
            "bytes",
            wanted="≤ 24 bytes",
            command=command,
        ),
        Row("exchanges of a window, usually", exchanges, "exchanges", wanted="≤ 5 exchanges", command=command),
        Row("exchanges of a window behind the first, at most", most, "exchanges", wanted=None, command=command),
    ]


class Still:
    """Documents of one length: every rank has the same work, so nothing moves."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": np.full(32, index), "index": index}


def count_tokens(sample: Any) -> SampleMetadata:
    return SampleMetadata(len(sample["input_ids"]))


def still_loader(the_mesh: Any, size: int, local: int) -> DistributedDataLoader:
    """16 records a rank and window; one window a step; built on demand, so that its time is seen."""
    scene = Scene(
        dataset=Still(size), micro=4, global_batch=16 * local, window=4, depth=0, split=False, metadata_fn=count_tokens
    )
    return scene.loader(the_mesh)


def _measure_still(windows: int, repeats: int) -> tuple[list[list[float]], list[list[float]]]:
    """Milliseconds of each window, on two ranks and on a single one, one after the other in each repeat."""
    from hp_nodes.transport import VirtualMesh, VirtualWorld

    alone = VirtualMesh(VirtualWorld(1), {"dp": 1}, 0)
    together, single = [], []
    for _ in range(repeats):
        dist.barrier()
        with still_loader(mesh(), windows * 16 * dist.get_world_size(), dist.get_world_size()) as loader:
            together.append(_window_times(loader))
        for turn in range(dist.get_world_size()):  # one at a time: each has the machine to itself, as a single rank has
            dist.barrier()
            if turn == dist.get_rank():
                with still_loader(alone, windows * 16, 1) as loader:
                    single.append(_window_times(loader))
    return together, single


def _window_times(loader: DistributedDataLoader) -> list[float]:
    times, start = [], time.perf_counter()
    for _ in loader:
        if loader.last is not None and loader.last.ends_window:
            times.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
    return times[2:]  # without what is made and compiled once


def still_rows(pool: RankPool, windows: int, repeats: int, command: str) -> list[Row]:
    found = pool.run(_measure_still, windows, repeats, timeout_s=300)

    def medians(kind: int) -> list[float]:
        pairs = zip(found[0][kind], found[1][kind], strict=True)
        return [statistics.median(map(max, zip(*pair, strict=True))) for pair in pairs]

    together, single = medians(0), medians(1)
    more = [two - one for two, one in zip(together, single, strict=True)]
    what, command = "a window in which nothing moves", f"{command} still"
    return [
        Row.of(f"{what}: more than on a single rank", "ms", more, wanted="≤ 2 ms", command=command),
        Row.of(what, "ms", together, baseline="a single rank", baseline_values=single, command=command),
    ]


# ---- failure


class Failing(Documents):
    """Record 21 cannot be read; when that was is kept in shared memory."""

    def __init__(self, moment: Any) -> None:
        super().__init__()
        self.moment = moment

    def __getitem__(self, index: int) -> Any:
        if index == 21:
            os.pwrite(self.moment, np.float64(time.monotonic()).tobytes(), 0)
            raise OSError("disk gone")
        return super().__getitem__(index)


def _measure_failure(path: str) -> float:
    moment = os.open(path, os.O_RDWR | os.O_CREAT)
    scene = Scene(dataset=Failing(moment), order="sequential", cost_model=CausalAttentionCostModel(), timeout_s=60.0)
    loader = scene.loader(mesh())
    try:
        for _ in loader:
            pass
        raise AssertionError("it did not fail")
    except DataPlaneError:
        seconds = time.monotonic() - float(np.frombuffer(os.pread(moment, 8, 0))[0])
    loader.close()
    os.close(moment)
    return seconds


def failure_rows(pools: dict[int, RankPool], repeats: int, command: str) -> list[Row]:
    path = f"/tmp/hp_nodes_failure_{os.getpid()}"
    rows = []
    for size, pool in pools.items():
        times = [max(pool.run(_measure_failure, path)) for _ in range(repeats)]
        what = f"from a failed read to the same error on all of {size} ranks"
        rows.append(Row.of(what, "s", times, wanted="≤ 1 s", command=f"{command} failure"))
    os.unlink(path)
    return rows


PARTS = ("exchange", "memory", "planning", "still", "failure")


def measure(arguments: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.data_plane")
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: a minute instead of several")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    given = parser.parse_args(arguments)
    only = given.only.split(",")
    if not set(only) <= set(PARTS):
        parser.error(f"--only is {given.only!r}; accepted: some of {','.join(PARTS)}")
    quick = given.quick
    total, repeats = (16 * MIB, 6) if quick else (64 * MIB, 12)
    command = f"python -m tests.benchmarks.data_plane {'--quick ' if quick else ''}--only"
    pools = {size: RankPool(size) for size in (2, 4)}
    rows: list[Row] = []
    try:
        if "exchange" in only:
            rows += exchange_rows(pools[2], total, repeats, command)
        if "memory" in only:
            rows += memory_rows(pools[2], 64 * MIB, command)
        if "planning" in only:
            rows += planning_rows(pools[2], 4 if quick else 20, command)
        if "still" in only:
            rows += still_rows(pools[2], 40 if quick else 100, 3 if quick else 7, command)
        if "failure" in only:
            rows += failure_rows(pools, 3 if quick else 10, command)
    finally:
        for pool in pools.values():
            pool.stop()
    return rows


if __name__ == "__main__":
    run_alone(measure)
