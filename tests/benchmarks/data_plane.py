"""What the data plane costs: exchange, planning traffic, windows in which nothing moves, and failures.

    python -m tests.benchmarks.data_plane [--quick]

Two real processes over Gloo on this machine. Every figure is a ratio, or a difference, of things measured in the same
run, interleaved; a median is shown with its quartiles. How to read it: the exchange is bounded by memory, since Gloo
copies between processes through sockets; so what encoding and decoding cost shows as what is missing to 1. At 1 KiB the
Python objects that are made and looked at count, from 64 KiB on the bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
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
from hp_nodes.transport.opening_rows import row_dtype
from hp_nodes.transport.payload import Payload
from tests.distributed.ranks import RankPool
from tests.scenes import Documents, Scene

KIB = 1024
MIB = 1024 * KIB
Row = tuple[str, str, str, str]


def spread(values: list[float], digits: int = 2) -> str:
    """Median and quartiles."""
    if len(values) < 3:
        return f"{statistics.median(values):.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


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


def exchange_rows(pool: RankPool, total: int, repeats: int) -> list[Row]:
    rows = []
    for nbytes, target in ((KIB, 0.4), (64 * KIB, 0.75), (MIB, 0.75)):
        first, second = pool.run(_measure_exchange, nbytes, total, repeats, timeout_s=400)
        slower = {name: [max(pair) for pair in zip(first[name], second[name], strict=True)] for name in first}
        ratio = [bare / ours for ours, bare in zip(slower["ours"], slower["bare"], strict=True)]
        pickled = [b / a for a, b in zip(slower["ours"], slower["objects"], strict=True) if b == b]
        fastest = min(slower["bare"]) / min(slower["ours"])
        cpu = [bare / ours for ours, bare in zip(slower["cpu of ours"], slower["cpu of bare"], strict=True)]
        note = f"fastest {fastest:.2f}, {total / min(slower['ours']) / 1e9:.2f} GB/s; CPU time {spread(cpu)}"
        what = f"exchange of {total // MIB} MiB, samples of {nbytes // KIB} KiB"
        rows.append((f"{what}, against a bare all_to_all_single", spread(ratio), f"≥ {target}", note))
        rows.append((f"{what}, against all_gather_object", f"{spread(pickled, 1)} times", "≥ 4 times", ""))
    return rows


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


def memory_rows(pool: RankPool, total: int) -> list[Row]:
    rows = []
    for nbytes in (KIB, 64 * KIB, MIB):
        most = max(peak / moved for peak, moved in pool.run(_measure_memory, nbytes, total, timeout_s=120))
        what = f"peak memory, samples of {nbytes // KIB} KiB: times the moved bytes"
        rows.append((what, f"{most:.2f}", "≤ 2.3", "one send and one receive buffer"))
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
    """Exchanges of a window, usually; bytes of planning traffic a sample, all included; the most exchanges of a window
    behind the first.
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
    numbers = sum(nbytes for name, nbytes in calls if name in ("opening", "numbers"))
    return statistics.median(in_window[:windows]), numbers * dist.get_world_size() / samples, max(in_window[1:windows])


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def planning_rows(pool: RankPool, steps: int) -> list[Row]:
    exchanges, sent, most = max(pool.run(_count_planning, steps, timeout_s=120))
    row = row_dtype(False, 0).itemsize
    return [
        ("planning traffic: bytes a sample, and a rank", f"{row} and {HEAD_NBYTES}", "≤ 24 and 64", "no pickle"),
        ("the same as sent, room for larger windows included: bytes a sample", f"{sent:.1f}", "", "≤ an eighth more"),
        (
            "exchanges a window",
            f"{exchanges:.0f}",
            "≤ 5",
            f"at most {most:.0f}: opening, plan, sizes, payload, closing",
        ),
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


def _measure_still(windows: int, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of one window, on two ranks and on a single one, one after the other in each repeat."""
    from hp_nodes.transport import VirtualMesh, VirtualWorld

    alone = VirtualMesh(VirtualWorld(1), {"dp": 1}, 0)
    together, single = [], []
    for _ in range(repeats):
        dist.barrier()
        with still_loader(mesh(), windows * 16 * dist.get_world_size(), dist.get_world_size()) as loader:
            together += _window_times(loader)
        # One rank after the other: two at a time would have the machine to themselves in both cases.
        dist.barrier()
        with still_loader(alone, windows * 16, 1) as loader:
            single += _window_times(loader)
    return together, single


def _window_times(loader: DistributedDataLoader) -> list[float]:
    times, start = [], time.perf_counter()
    for _ in loader:
        if loader.last is not None and loader.last.ends_window:
            times.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
    return times[1:]


def still_rows(pool: RankPool, windows: int, repeats: int) -> list[Row]:
    found = pool.run(_measure_still, windows, repeats, timeout_s=300)
    together = [max(pair) for pair in zip(found[0][0], found[1][0], strict=True)]
    single = [max(pair) for pair in zip(found[0][1], found[1][1], strict=True)]
    more = statistics.median(together) - statistics.median(single)
    fastest = min(together) - min(single)
    return [
        (
            "a window in which nothing moves, against a single rank",
            f"{more:.2f} ms more",
            "≤ 2 ms",
            f"{spread(together)} ms, {spread(single)} ms; fastest {fastest:.2f} ms more; off the consumer's thread",
        )
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


def failure_rows(pools: dict[int, RankPool], repeats: int) -> list[Row]:
    path = f"/tmp/hp_nodes_failure_{os.getpid()}"
    rows = []
    for size, pool in pools.items():
        times = [max(pool.run(_measure_failure, path)) for _ in range(repeats)]
        what = f"a failed read to the same error on all of {size} ranks"
        rows.append((what, f"{spread(times, 3)} s", "≤ 1 s", f"slowest {max(times):.3f} s"))
    os.unlink(path)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: a minute instead of several")
    quick = parser.parse_args().quick
    total, repeats = (16 * MIB, 4) if quick else (64 * MIB, 12)
    pools = {size: RankPool(size) for size in (2, 4)}
    rows = exchange_rows(pools[2], total, repeats)
    rows += memory_rows(pools[2], 64 * MIB)
    rows += planning_rows(pools[2], 4 if quick else 20)
    rows += still_rows(pools[2], 40 if quick else 100, 2 if quick else 5)
    rows += failure_rows(pools, 3 if quick else 10)
    for pool in pools.values():
        pool.stop()
    load = os.getloadavg()[0]
    print(f"\n{multiprocessing.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}, {total // MIB} MiB\n")
    print("| what | measured: median (quartiles) | wanted | |\n| --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
