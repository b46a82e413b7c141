"""What staging to a device costs a training loop, beside a plain DataLoader in the same run.

Figures of one device: how long it waits for data, how fast copies are, how often the host waits, how much pinned memory
is held. Takes a :class:`graphs.device_assertions.DeviceUnderTest` that nothing slows. Needs torch, numpy and torchdata.
Run on the stand-in only so far, where times say nothing.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, Dataset

from graphs.device_assertions import DeviceUnderTest, HostBatches, Mark
from hp_nodes import DevicePrefetcher
from hp_nodes.nodes.device_staging import DeviceStaging

__all__ = ["Figure", "Sizes", "figures"]

_WARM_UP = 5
_COPIES = 10
_RANGE = "batches are delivered"
_WAITS = re.compile(r"^(cuda|aclrt)\w*Synchronize")


@dataclass(frozen=True)
class Sizes:
    """``steps`` steps of ``step_s`` seconds with batches of ``batch_nbytes``; then ``many`` small batches."""

    batch_nbytes: int = 64 << 20
    steps: int = 60
    step_s: float = 0.025
    many: int = 10_000


class Figure(NamedTuple):
    """What was measured, what is wanted of it, and whether it is so; None where nothing is wanted of it."""

    what: str
    found: str
    wanted: str = ""
    good: bool | None = None


def figures(device: DeviceUnderTest, sizes: Sizes, real: bool = True) -> Iterator[Figure]:
    """One after the other, as they are measured. Times are judged on a ``real`` device only."""
    pool = [_batch(sizes.batch_nbytes, number) for number in range(4)]
    staged, plain = _prefetched(device, pool, sizes), _plain(device, pool, sizes)
    ours, theirs = _waiting(device, staged, sizes), _waiting(device, plain, sizes)
    yield Figure("device waits for data, share of the step", f"{ours:.2%}", "≤ 1 %", ours <= 0.01 if real else None)
    yield Figure("  plain DataLoader(pin_memory=True), .to(non_blocking=True)", f"{theirs:.2%}")
    bare = _bare_copy(device, sizes.batch_nbytes)
    pinned = _staged_copies(device, [{"x": device.pinned(sizes.batch_nbytes)}])
    pageable = _staged_copies(device, pool)
    yield Figure("bare pinned copy, GB/s", f"{bare / 1e9:.2f}")
    yield Figure(
        "  staged from pinned tensors, of that", f"{pinned / bare:.2f}", "≥ 0.9", pinned >= 0.9 * bare if real else None
    )
    yield Figure("  staged from pageable tensors, of that", f"{pageable / bare:.2f}")
    waits = _host_synchronizations(device, sizes)
    counted = "not counted: torch.profiler sees CUDA only" if waits is None else f"{waits:.2f}"
    yield Figure("host synchronisations per batch", counted, "0", None if waits is None else waits == 0)
    early, late = _pinned_memory(device, sizes.many)
    yield Figure(
        f"pinned memory, bytes, after 100 and {sizes.many} batches", f"{early}, {late}", "equal", early == late
    )


def _batch(nbytes: int, number: int) -> dict[str, torch.Tensor]:
    """Four large tensors and some small ones, in pageable memory."""
    rows = nbytes // 4 // 8
    large = {f"large_{place}": torch.full((rows,), number, dtype=torch.int64) for place in range(4)}
    return {**large, **{f"small_{place}": torch.arange(64) for place in range(8)}}


def _prefetched(device: DeviceUnderTest, pool: list[Any], sizes: Sizes) -> Iterator[Any]:
    source = HostBatches(_WARM_UP + sizes.steps, lambda number: pool[number % len(pool)])
    node = DevicePrefetcher(source, depth=2, accelerator=device)
    yield from (batch.data for batch in node)
    node.close()


class _Pool(Dataset[Any]):
    def __init__(self, pool: list[Any], count: int) -> None:
        self.pool = pool
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.pool[index % len(self.pool)]


def _plain(device: DeviceUnderTest, pool: list[Any], sizes: Sizes) -> Iterator[Any]:
    loader: DataLoader[Any] = DataLoader(
        _Pool(pool, _WARM_UP + sizes.steps),
        batch_size=None,
        num_workers=2,
        pin_memory=device.device.type != "cpu",
        multiprocessing_context="forkserver",  # a process with a device in use cannot be forked
    )
    for batch in loader:
        yield {name: tensor.to(device.device, non_blocking=True) for name, tensor in batch.items()}


def _waiting(device: DeviceUnderTest, batches: Iterable[Any], sizes: Sizes) -> float:
    """Time between the end of a step's work and the beginning of the next one's, as share of all time.

    The host is one step ahead of the device, as a loop is that looks at the loss of the step before.
    """
    marks: list[tuple[Mark, Mark]] = []
    running: deque[Any] = deque()
    for batch in batches:
        begins = device.mark()
        device.compute(sizes.step_s)
        marks.append((begins, device.mark()))
        running.append(device.record(device.current_stream()))
        if len(running) > 1:
            _until_done(device, running.popleft())
        del batch
    device.synchronize()
    times = [(begins(), ends()) for begins, ends in marks][_WARM_UP:]
    waited = sum(later[0] - earlier[1] for earlier, later in itertools.pairwise(times))
    return float(waited / (times[-1][0] - times[0][0]))


def _until_done(device: DeviceUnderTest, event: Any) -> None:
    """Polled: this must not count as a host synchronisation."""
    while not device.done(event):
        time.sleep(0.0002)


def _bare_copy(device: DeviceUnderTest, nbytes: int) -> float:
    """Bytes per second."""
    stream = device.current_stream()
    source, target = device.pinned(nbytes), device.empty(nbytes, stream)

    def copy() -> None:
        device.copy(target, source, stream)

    return nbytes / _seconds_each(device, copy)


def _staged_copies(device: DeviceUnderTest, pool: list[Any]) -> float:
    staging = DeviceStaging(device, 3)
    turn = iter(pool * (_COPIES + 1))

    def stage() -> None:
        staging.stage(next(turn)).deliver()

    seconds = _seconds_each(device, stage)
    staging.close()
    return float(sum(tensor.nbytes for tensor in pool[0].values()) / seconds)


def _seconds_each(device: DeviceUnderTest, work: Callable[[], None]) -> float:
    work()
    device.synchronize()
    begins = device.mark()
    for _ in range(_COPIES):
        work()
    ends = device.mark()
    device.synchronize()
    return (ends() - begins()) / _COPIES


def _host_synchronizations(device: DeviceUnderTest, sizes: Sizes) -> float | None:
    """Calls by which any thread waited for the device, per batch, while batches were delivered."""
    if device.device.type == "npu":
        return None
    node = DevicePrefetcher(HostBatches(50, lambda number: _batch(1 << 20, number)), depth=2, accelerator=device)
    for _ in range(_WARM_UP):
        next(node)
    with profile() as seen:
        with record_function(_RANGE):
            for _ in range(40):
                next(node)
                device.compute(min(sizes.step_s, 0.002))
        device.synchronize()
    node.close()
    events = list(seen.events() or [])
    (whole,) = [event.time_range for event in events if event.name == _RANGE and event.device_type.name == "CPU"]
    waits = [
        event for event in events if _WAITS.match(event.name) and whole.start <= event.time_range.start <= whole.end
    ]
    return len(waits) / 40


def _pinned_memory(device: DeviceUnderTest, many: int) -> tuple[int, int]:
    """Bytes asked for, ever, after 100 batches and after ``many`` of changing sizes."""
    staging = DeviceStaging(device, 3)
    before = device.pinned_nbytes
    early = 0
    for number in range(many):
        staging.stage({"x": torch.zeros(1_000 + number * 37 % 1_000)}).deliver()
        if number == 99:
            early = device.pinned_nbytes - before
    late = device.pinned_nbytes - before
    device.synchronize()
    staging.close()
    return early, late
