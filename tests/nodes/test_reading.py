"""CONTRACT 4: reading with and without workers: the same samples in order, exact run-ahead, nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from hp_nodes import (
    Collator,
    DataPlaneError,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Packer,
    Planner,
    SampleMetadata,
    SampleReader,
    WindowSampler,
    WorkloadCost,
    sample_rng,
)
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.scenes import Documents, Scene, content, rest


class Counting(BaseNode[Any]):
    """Counts the windows that were taken from its source."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source = source
        self.taken = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self) -> Any:
        window = next(self.source)
        self.taken += 1
        return window

    def get_state(self) -> dict[str, Any]:
        return self.source.state_dict()


def windows(total: int = 24, global_batch: int = 4, window: int = 2) -> WindowSampler:
    return WindowSampler(DistributedBatchSampler(total, 2, global_batch, 0, 1, order="shuffle", seed=3), window)


def read_all(reader: SampleReader) -> list[Any]:
    found = []
    try:
        while True:
            found.append([content(sample) for sample in next(reader).samples])
    except StopIteration:
        return found


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def nothing_is_left(before: set[int]) -> None:
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        gc.collect()
        threads = [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
        if not threads and children() <= before and not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")):
            return
        time.sleep(0.05)
    raise AssertionError(f"left: threads {threads}, processes {children() - before}")


# ---- the same samples


class Drawing(Documents):
    """Every kind of randomness that a dataset may use in a worker."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "drawn": [sample_rng().python.random(), random.random()]}


@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 1}, {"prefetch_factor": 5, "in_order": False}])
def test_samples_and_order_do_not_depend_on_workers(options: dict[str, Any]) -> None:
    found = []
    for workers in (1, 3):
        reader = SampleReader(windows(), Drawing(), num_workers=workers, seed=5, worker_options=options)
        found.append([*read_all(reader), *read_again(reader)])
        reader.close()
    assert found[0] == found[1]
    here = SampleReader(windows(), Documents())
    indices = [[sample["index"] for sample in window] for window in [*read_all(here), *read_again(here)]]
    assert [[sample["index"] for sample in window] for window in found[0]] == indices


def read_again(reader: SampleReader) -> list[Any]:
    """The next epoch."""
    reader.reset(None)
    return read_all(reader)


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_how_far_reading_runs_ahead_follows_from_what_was_consumed(workers: int, factor: int) -> None:
    counter = Counting(windows(total=48))
    reader = SampleReader(counter, Documents(), num_workers=workers, worker_options={"prefetch_factor": factor})
    for consumed in range(1, 6):
        next(reader)
        assert counter.taken == consumed + factor
    reader.close()


def test_workers_are_busy_over_a_windows_end() -> None:
    """While one window is consumed the next ones are read: the loop waits for the first only."""

    class Slow(Documents):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.02)
            return super().__getitem__(index)

    reader = SampleReader(windows(total=48), Slow(), num_workers=2)
    next(reader)
    waited = 0.0
    for _ in range(6):
        time.sleep(0.12)
        start = time.monotonic()
        next(reader)
        waited += time.monotonic() - start
    reader.close()
    assert waited < 6 * 0.04  # a window takes two workers 40 ms


# ---- batched reads


class Batched(Documents):
    """Counts its single reads."""

    singles = 0
    short = False

    def __getitem__(self, index: int) -> Any:
        self.singles += 1
        return {**super().__getitem__(index), "singles": self.singles}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        records = [{**Documents.__getitem__(self, index), "singles": self.singles} for index in indices]
        return records[1:] if self.short else records


@pytest.mark.parametrize("workers", [0, 2])
def test_batched_reads_use_getitems_and_others_do_not(workers: int) -> None:
    expected = read_all(SampleReader(windows(), Documents()))
    for batched in (True, False):
        reader = SampleReader(windows(), Batched(), num_workers=workers, batched_reads=batched)
        found = read_all(reader)
        reader.close()
        assert all((sample.pop("singles") == 0) == batched for window in found for sample in window)
        assert found == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_batched_reads_that_give_another_number_are_an_error(workers: int) -> None:
    dataset = Batched()
    dataset.short = True
    reader = SampleReader(windows(), dataset, num_workers=workers, batched_reads=True)
    with pytest.raises(ValueError, match="gave 3 records for 4 indices"):
        next(reader)
    reader.close()


def test_batched_reads_need_getitems() -> None:
    with pytest.raises(ValueError, match="__getitems__"):
        SampleReader(windows(), Documents(), batched_reads=True)


# ---- what goes wrong


@pytest.mark.parametrize("workers", [0, 1])
def test_an_index_outside_the_dataset_is_named(workers: int) -> None:
    reader = SampleReader(windows(total=24), Documents(size=20), num_workers=workers)
    with pytest.raises(IndexError, match=r"index 2[0-3] is outside the dataset of 20 records"):
        read_all(reader)
    reader.close()


class Killed(Documents):
    """Record 3 takes its reader along."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_is_one_error_on_every_rank() -> None:
    """CASES 16."""
    before = children()
    scene = Scene(dataset=Killed(), workers=2, order="sequential", split=False, window=1, timeout_s=30.0)

    def run(mesh: Any) -> str:
        loader = scene.loader(mesh)
        with pytest.raises(DataPlaneError) as first:
            rest(loader)
        with pytest.raises(DataPlaneError) as second:
            next(loader)
        assert str(second.value) == str(first.value)
        loader.close()
        return str(first.value)

    start = time.monotonic()
    texts = run_ranks({"dp": 2}, run)
    assert time.monotonic() - start < 25
    assert texts[0] == texts[1]
    assert "rank 1, node SampleReader" in texts[0]
    assert "reader worker 1 (pid " in texts[0]
    assert "was killed by SIGKILL" in texts[0]
    nothing_is_left(before)


class Sleepy(Documents):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.6)
        return super().__getitem__(index)


def test_a_worker_that_takes_too_long_is_an_error_that_comes_again() -> None:
    reader = SampleReader(windows(), Sleepy(), num_workers=1, worker_options={"timeout": 1})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
            next(reader)
    reader.close()


class Stuck(Documents):
    """The storage stops answering at record 32."""

    def __getitem__(self, index: int) -> Any:
        if index >= 32:
            time.sleep(600)
        return super().__getitem__(index)


def test_an_error_in_the_loop_does_not_wait_for_a_read_that_hangs() -> None:
    before = children()
    scene = Scene(dataset=Stuck(), workers=1, order="sequential", split=False)

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            for _ in loader:
                if loader.last.step == 1 and loader.last.ends_step:
                    raise FloatingPointError("loss is NaN")

    start = time.monotonic()
    with pytest.raises(FloatingPointError):
        run_ranks({"dp": 1}, run)
    assert time.monotonic() - start < 10
    nothing_is_left(before)


class Unsendable(Documents):
    def __getitem__(self, index: int) -> Any:
        return (lambda: index) if index == 9 else super().__getitem__(index)


def test_a_record_that_cannot_leave_its_worker_is_named() -> None:
    scene = Scene(dataset=Unsendable(), workers=2, split=False)
    with pytest.raises(DataPlaneError, match="index 9"):
        run_ranks({"dp": 1}, lambda mesh: rest(scene.loader(mesh)))


# ---- options of workers


class Where(Documents):
    """Says which process read."""

    def __getitem__(self, index: int) -> Any:
        return {"pid": os.getpid(), "greeting": os.environ.get("HP_NODES_TEST_GREETING")}


def greet(worker: int) -> None:
    os.environ["HP_NODES_TEST_GREETING"] = f"worker {worker}"


def processes(read: list[Any]) -> set[int]:
    return {sample["pid"] for window in read for sample in window}


def test_persistent_workers_live_over_epochs_and_resets() -> None:
    before = children()
    options = {"persistent_workers": True, "worker_init_fn": greet}
    reader = SampleReader(windows(), Where(), num_workers=2, worker_options=options)
    state = reader.state_dict()
    first = read_all(reader)
    assert {sample["greeting"] for window in first for sample in window} == {"worker 0", "worker 1"}
    assert processes(read_again(reader)) == processes(first)
    reader.reset(state)
    next(reader)
    reader.reset(state)  # with windows on their way
    again = read_all(reader)
    assert len(again) == len(first)
    assert processes(again) == processes(first) == children() - before
    reader.close()
    nothing_is_left(before)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_may_start_in_other_ways(context: str) -> None:
    before = children()
    expected = read_all(SampleReader(windows(), Documents()))
    reader = SampleReader(windows(), Documents(), num_workers=1, worker_options={"multiprocessing_context": context})
    assert read_all(reader) == expected
    reader.close()
    nothing_is_left(before)


@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_left_after_close_reset_or_break(persistent: bool) -> None:
    before = children()
    options = {"persistent_workers": persistent}

    def graph(mesh: Any) -> DistributedDataLoader:
        return precomputed(mesh, workers=1, options=options)

    def run(mesh: Any) -> None:
        with graph(mesh) as loader:
            next(loader)
            loader.load_state_dict(loader.state_dict())
            next(loader)
        for batch in graph(mesh):
            del batch
            break
        gc.collect()

    run_ranks({"dp": 1}, run)
    nothing_is_left(before)


# ---- behind the plan


def precomputed(mesh: Any, workers: int, options: dict[str, Any] | None = None) -> DistributedDataLoader:
    """A graph that plans before it reads."""
    topology = DataTopology.from_mesh(mesh)
    data = create_transport(topology, timeout_s=20.0)
    dataset = Documents(64)
    metadata = [SampleMetadata(int(n), WorkloadCost(llm=float(n) ** 2)) for n in dataset.lengths]
    sampler = DistributedBatchSampler(64, 2, 8, topology.data_rank, topology.data_parallel_size, order="shuffle")
    node: BaseNode[Any] = MetadataDeriver(WindowSampler(sampler, 1), metadata=metadata)
    node = Planner(node, data, seq_len=64, local_batch_size=2)
    node = SampleReader(node, dataset, num_workers=workers, worker_options=options)
    node = Collator(Packer(node, seq_len=64, local_batch_size=2), local_batch_size=2)
    return DistributedDataLoader(HostPrefetcher(node, data, 1), transports=[data], topology=topology)


def test_ranks_that_consumed_equally_much_close_together_though_reading_runs_ahead() -> None:
    before = children()

    def run(mesh: Any) -> None:
        for number in range(6):
            # Different numbers of workers: how far each runs ahead is the same.
            with precomputed(mesh, workers=1 + mesh.get_rank()) as loader:
                for _ in range(number):
                    next(loader)

    start = time.monotonic()
    run_ranks({"dp": 2}, run)
    assert time.monotonic() - start < 30
    nothing_is_left(before)


def test_reading_ahead_behind_the_plan_gives_the_same_batches() -> None:
    results = [run_ranks({"dp": 2}, lambda mesh, n=n: rest(precomputed(mesh, workers=n))) for n in (0, 1, 2)]
    assert results[0] == results[1] == results[2]
