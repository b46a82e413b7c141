"""Readers that run ahead of exchanges: whatever fails on one rank, the ranks stay in the same exchange.

Behind a Planner each window that workers are given ahead was an exchange. So a read that fails, a worker that dies or a
node that raises on one rank must not change how many windows that rank has taken.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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
)
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.nodes.test_reading import children, nothing_is_left
from tests.scenes import Documents, Passing

SIZE = 48
WINDOWS = {"first": 0, "middle": 5, "last": SIZE // 4 - 1}
"""Windows of one round: two records on each of two ranks."""


class Failing(Documents):
    """One record cannot be read, or takes its reader along."""

    def __init__(self, kind: str, bad: int) -> None:
        super().__init__(SIZE)
        self.kind = kind
        self.bad = bad

    def __len__(self) -> int:
        return self.bad if self.kind == "outside" else SIZE

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("disk gone")
        return super().__getitem__(index)


class RaisingOnce(Passing):
    """A user's node that fails at one window on one rank, after the exchange below it."""

    def __init__(self, source: BaseNode[Any], window: int, here: bool) -> None:
        super().__init__(source)
        self.window = window if here else -1
        self.taken = 0

    def next(self) -> Any:
        item = super().next()
        self.taken += 1
        if self.taken == self.window + 1:
            raise KeyError("user node")
        return item


class Case(NamedTuple):
    kind: str
    window: str
    workers: int
    depth: int = 1
    prefetch_factor: int = 2

    def loader(self, mesh: Any) -> DistributedDataLoader:
        """A graph that plans before it reads, from the public parts, on virtual ranks or real ones."""
        topology = DataTopology.from_mesh(mesh)
        data = create_transport(topology, timeout_s=60.0)
        dataset = Failing(self.kind, 4 * WINDOWS[self.window] if self.kind != "node" else -1)
        metadata = [SampleMetadata(int(n), WorkloadCost(llm=float(n) ** 2)) for n in dataset.lengths]
        sampler = DistributedBatchSampler(SIZE, 2, 8, topology.data_rank, topology.data_parallel_size)
        node: BaseNode[Any] = MetadataDeriver(WindowSampler(sampler, 1), metadata=metadata)
        node = Planner(node, data, seq_len=64, local_batch_size=2)
        node = RaisingOnce(node, WINDOWS[self.window], here=self.kind == "node" and topology.data_rank == 1)
        options = {"prefetch_factor": self.prefetch_factor} if self.workers else None
        node = SampleReader(node, dataset, num_workers=self.workers, worker_options=options)
        node = Collator(Packer(node, seq_len=64, local_batch_size=2), local_batch_size=2)
        return DistributedDataLoader(HostPrefetcher(node, data, self.depth), transports=[data], topology=topology)


class Ended(NamedTuple):
    delivered: int
    exchanges: int
    text: str


def consume(loader: DistributedDataLoader) -> Ended:
    """Until the error, which comes again at every further ``next``."""
    delivered = 0
    with pytest.raises(DataPlaneError) as caught:  # noqa: PT012  the place where it comes is what matters
        for batch in loader:
            delivered += 1
            del batch
    with pytest.raises(DataPlaneError) as second:
        next(loader)
    assert str(second.value) == str(caught.value)
    exchanges = loader._transports[0].exchanges
    loader.close(caught.value)
    return Ended(delivered, exchanges, str(caught.value))


def check(case: Case, ended: list[Ended]) -> None:
    """All ranks delivered as much, exchanged as often and say the same."""
    assert ended[1:] == ended[:1] * (len(ended) - 1), case
    if case.kind == "node":
        assert "node RaisingOnce" in ended[0].text and "user node" in ended[0].text, case
    else:
        assert "node SampleReader" in ended[0].text, case
    told = {"killed": "SIGKILL", "raises": "disk gone", "outside": "is outside the dataset", "node": "KeyError"}
    assert told[case.kind] in ended[0].text, case
    # A killed worker may be noticed while an earlier window's records are awaited from it.
    ahead = case.prefetch_factor if case.kind == "killed" else 0
    place = WINDOWS[case.window]
    assert place - ahead <= ended[0].delivered <= place, case


CASES = [
    Case(kind, window, workers, depth)
    for kind in ("killed", "raises")
    for window in WINDOWS
    for workers in (1, 2)
    for depth in (0, 1)
]
MORE = [
    Case("outside", "middle", 1),
    Case("outside", "last", 2, 0),
    Case("raises", "middle", 0),
    Case("node", "middle", 0),
    Case("node", "first", 2),
    Case("node", "middle", 1, 0),
    Case("node", "last", 1),
    Case("raises", "middle", 2, 2, 1),
    Case("node", "middle", 2, 2, 4),
    Case("node", "first", 1, 2, 1),
]


@pytest.fixture
def without_torchs_signal_handler() -> Iterator[None]:
    """Once any DataLoader has made workers on the main thread, torch raises there whatever worker dies anywhere."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("without_torchs_signal_handler")
def test_one_rank_fails_and_all_ranks_say_so() -> None:
    """All cases at once: a worker that died is found by a poll of torch's, every 5 s."""
    before = children()
    cases = CASES + MORE
    with ThreadPoolExecutor(len(cases)) as at_once:
        results = at_once.map(lambda case: run_ranks({"dp": 2}, lambda mesh: consume(case.loader(mesh))), cases)
        for case, ended in zip(cases, results, strict=True):
            check(case, ended)
    nothing_is_left(before)
