"""torchdata's own nodes below the Planner: each resumes exactly at every position, or is refused with the reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    Mapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    Prefetcher,
    SamplerWrapper,
    StopCriteria,
    Unbatcher,
)

from hp_nodes import (
    Collator,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Packer,
    Planner,
    Router,
    SampleKey,
    SampleMetadata,
    SampleReader,
    StepCheckpointer,
    Window,
    WorkloadCost,
    peek,
)
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.scenes import Documents, Scene, pickled, rest

MICRO, ROUNDS, STEPS = 2, 2, 5
SHARE = MICRO * ROUNDS
"""Records of a step on one rank."""

Source = Callable[[int, int], BaseNode[Any]]
"""rank, ranks → a node that gives ``SHARE * STEPS`` record indices, one list a step."""


class Numbered(BaseNode[Window]):
    """A user's node: makes a window of each list of indices. Its state is of its own rank."""

    def __init__(self, source: BaseNode[list[int]], rank: int, ranks: int) -> None:
        super().__init__()
        self.source = source
        self.rank, self.ranks, self.step = rank, ranks, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.step = 0 if initial_state is None else initial_state["step"]

    def next(self) -> Window:
        indices = next(self.source)
        if self.step == STEPS:
            raise StopIteration
        first = (self.step * self.ranks + self.rank) * SHARE
        keys = tuple(SampleKey(first + place, int(index)) for place, index in enumerate(indices))
        self.step += 1
        bins = np.arange(SHARE, dtype=np.int32)
        return Window(0, self.step - 1, 0, ROUNDS, True, self.step == STEPS, keys, reference=bins)

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "step": self.step}


def windows_of(indices: BaseNode[Any], rank: int, ranks: int) -> BaseNode[Window]:
    return Numbered(indices, rank, ranks)


def window_by_position(positions: list[int]) -> Window:
    """On one rank, of lists that follow one another."""
    keys = tuple(SampleKey(position, position) for position in positions)
    step = positions[0] // SHARE
    bins = np.arange(SHARE, dtype=np.int32)
    return Window(0, step, 0, ROUNDS, True, step == STEPS - 1, keys, reference=bins)


def loader_over(windows: BaseNode[Window], mesh: Any) -> DistributedDataLoader:
    """A whole graph of ours over windows that torchdata's nodes made."""
    topology = DataTopology.from_mesh(mesh)
    data = create_transport(topology, timeout_s=20)
    node: BaseNode[Any] = SampleReader(windows, Documents(64))
    node = MetadataDeriver(node, lambda d: SampleMetadata(len(d["input_ids"]), cost=WorkloadCost(llm=1)))
    node = Planner(node, data, seq_len=64, local_batch_size=MICRO)
    node = Packer(Router(node, data), seq_len=64, local_batch_size=MICRO)
    node = HostPrefetcher(Collator(node, lambda bins: [b[0]["index"] for b in bins], local_batch_size=MICRO), data)
    return DistributedDataLoader(StepCheckpointer(node), topology=topology)


def own(rank: int, ranks: int) -> list[int]:
    return list(range(rank, SHARE * STEPS * ranks, ranks))


class Counting:
    """An iterable that knows where it stands."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Stateless(BaseNode[list[int]]):
    """A user's node that always begins at its beginning."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.rest = iter(np.split(np.array(self.numbers), STEPS))

    def next(self) -> list[int]:
        return next(self.rest).tolist()

    def get_state(self) -> dict[str, Any]:
        return {}


def weighted(rank: int, ranks: int) -> BaseNode[Any]:
    parts = {"a": IterableWrapper(range(40)), "b": IterableWrapper(Counting(list(range(40, 60))))}
    return Batcher(
        MultiNodeWeightedSampler(
            parts, {"a": 0.7, "b": 0.3}, StopCriteria.CYCLE_FOREVER, rank=rank, world_size=ranks, seed=3
        ),
        SHARE,
    )


def distributed(rank: int, ranks: int) -> BaseNode[Any]:
    sampler: Any = DistributedSampler(range(SHARE * STEPS * ranks), ranks, rank, shuffle=True, seed=1)  # type: ignore[arg-type]
    return Batcher(SamplerWrapper(sampler), SHARE)


SOURCES: dict[str, Source] = {
    "IterableWrapper": lambda r, n: Batcher(IterableWrapper(own(r, n)), SHARE),
    "stateful IterableWrapper": lambda r, n: Batcher(IterableWrapper(Counting(own(r, n))), SHARE),
    "SamplerWrapper": distributed,
    "SamplerWrapper of ours": lambda r, n: SamplerWrapper(
        DistributedBatchSampler(SHARE * STEPS * n, SHARE, SHARE * n, r, n, order="shuffle")  # type: ignore[arg-type]
    ),
    "SamplerWrapper of a BatchSampler": lambda r, n: SamplerWrapper(
        BatchSampler(SequentialSampler(own(0, 1)), SHARE, True)  # type: ignore[arg-type]
    ),
    "Unbatcher": lambda r, n: Batcher(Unbatcher(IterableWrapper(np.array_split(own(r, n), 7))), SHARE),
    "Mapper": lambda r, n: Mapper(Batcher(IterableWrapper(own(r, n)), SHARE), list),
    "ParallelMapper": lambda r, n: Batcher(ParallelMapper(IterableWrapper(own(r, n)), int, 2), SHARE),
    "ParallelMapper, prebatch": lambda r, n: Batcher(
        ParallelMapper(IterableWrapper(own(r, n)), int, 2, prebatch=3), SHARE
    ),
    "Prefetcher": lambda r, n: Prefetcher(Batcher(IterableWrapper(own(r, n)), SHARE), 3),
    "Prefetcher of a node without state": lambda r, n: Prefetcher(Stateless(own(r, n)), 3),
    "MultiNodeWeightedSampler": weighted,
    "MultiNodeWeightedSampler, prefetched": lambda r, n: Prefetcher(weighted(r, n), 2),
}


@pytest.mark.parametrize("kind", sorted(SOURCES))
def test_every_position_of_a_torchdata_source(kind: str) -> None:
    def run(mesh: Any) -> None:
        rank, ranks = mesh.get_rank(), mesh.size()

        def fresh() -> DistributedDataLoader:
            return loader_over(windows_of(SOURCES[kind](rank, ranks), rank, ranks), mesh)

        with fresh() as loader:
            whole, states = [], [pickled(loader.state_dict())]
            for batch in loader:
                whole.append((loader.last.step, batch))
                if loader.last.ends_step:
                    states.append(pickled(loader.state_dict()))
            assert len(whole) == STEPS * ROUNDS
        for step, state in enumerate(states[:-1]):
            with fresh() as again:
                again.load_state_dict(state)
                assert again.state_dict() == state
                found = [(again.last.step, batch) for batch in again]
            assert found == whole[step * ROUNDS :], step

    run_ranks({"dp": 2}, run)


@pytest.mark.parametrize("says_epochs", [False, True])
def test_loops_over_epochs_of_a_source_that_does_not_say_its_epoch(says_epochs: bool) -> None:
    def run(mesh: Any) -> None:
        def fresh() -> DistributedDataLoader:
            return loader_over(windows_of(distributed(0, 1), 0, 1), mesh)

        def loop(loader: DistributedDataLoader, first: int) -> list[Any]:
            found = []
            for epoch in range(first, 3):
                if says_epochs:
                    loader.set_epoch(epoch)
                found.append(list(loader))
            return found

        with fresh() as loader:
            whole = loop(loader, 0)
            assert [len(batches) for batches in whole] == [STEPS * ROUNDS] * 3
            assert whole[0] != whole[1] != whole[2]
        with fresh() as loader:
            assert list(loader) == whole[0]
            state = pickled(loader.state_dict())
        with fresh() as resumed:  # at the end of the first epoch: what is asked for next is the second
            resumed.load_state_dict(state)
            assert loop(resumed, 1) == whole[1:]

    run_ranks({"dp": 1}, run)


def _same(window: Window) -> Window:
    return window


PASSING: dict[str, Callable[[BaseNode[Any]], BaseNode[Any]]] = {
    "none": lambda node: node,
    "Mapper": lambda node: Mapper(node, _same),
    "ParallelMapper": lambda node: ParallelMapper(node, _same, 2),
    "processes": lambda node: ParallelMapper(node, _same, 1, method="process", multiprocessing_context="fork"),
    "Prefetcher": lambda node: Prefetcher(node, 2),
    "both": lambda node: Prefetcher(ParallelMapper(node, _same, 1), 4),
    "Batcher": lambda node: Unbatched(Batcher(node, 1)),
}


class Unbatched(BaseNode[Any]):
    """A user's node that says it is the same on every rank."""

    state_scope = "global"

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])

    def next(self) -> Any:
        (item,) = next(self.source)
        return item

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}


@pytest.mark.parametrize("place", ["WindowSampler", "SampleReader"])
def test_what_only_passes_on_may_change_between_save_and_resume(place: str) -> None:
    """Depths, workers and whether the node is there at all; on another number of ranks too."""

    def saved(mesh: Any, kind: str) -> tuple[list[Any], Any]:
        with Scene(insert={place: PASSING[kind]}).loader(mesh) as loader:
            whole = rest(loader, 4)
            state = pickled(loader.state_dict())
            return whole + rest(loader), state

    def resumed(mesh: Any, kind: str, state: Any) -> list[Any]:
        with Scene(insert={place: PASSING[kind]}).loader(mesh) as loader:
            loader.load_state_dict(state)
            return rest(loader)

    kinds = [kind for kind in PASSING if kind != "Batcher"]
    states = set()
    for number, kind in enumerate(kinds):
        (_, state), *_ = results = run_ranks({"dp": 2}, lambda mesh, kind=kind: saved(mesh, kind))
        states.add(json.dumps(json.loads(state["hp_nodes"])["nodes"]))
        other = kinds[(number + 1) % len(kinds)]
        found = run_ranks({"dp": 2}, lambda mesh, other=other, state=state: resumed(mesh, other, state))
        assert found == [whole[4:] for whole, _ in results]
        wider = run_ranks({"dp": 4}, lambda mesh, other=other, state=state: resumed(mesh, other, state))
        steps = {batch[1] for batch in wider[0]}
        assert steps == {batch[1] for batch in found[0]}
    assert len(states) == 1  # none of them shows in the state


def test_a_slow_source_under_a_thread_loses_nothing_when_it_is_reset() -> None:
    """torchdata waits half a second for its thread and then lets a second one in."""

    class Slow(Documents):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.2)
            return super().__getitem__(index)

    scene = Scene(Slow(16, longest=10), global_batch=4, window=1, split=False, order="sequential", depth=0)
    scene.insert["SampleReader"] = lambda node: Prefetcher(node, 1)

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            state = loader.state_dict()
            time.sleep(0.1)
            for _ in range(2):
                loader.load_state_dict(state)
                next(loader)
            seen = [loader.last.positions, *(loader.last.positions for _ in loader)]
            assert sorted(position for positions in seen for position in positions) == list(range(16))

    run_ranks({"dp": 1}, run)


def test_close_leaves_no_thread_of_torchdatas() -> None:
    import threading

    before = threading.active_count()

    def run(mesh: Any) -> None:
        loader = Scene(insert={"SampleReader": lambda node: Prefetcher(node, 2)}).loader(mesh)
        next(loader)
        loader.close()

    run_ranks({"dp": 1}, run)
    assert threading.active_count() == before


def test_peek_below_and_above_a_thread() -> None:
    def run(mesh: Any) -> None:
        graph = Scene(insert={"SampleReader": lambda node: Prefetcher(node, 2)}, depth=0).graph(mesh)
        for node in ("Prefetcher", "Splitter", "Prefetcher"):
            assert peek(graph, after=node).step == 0
        assert next(graph).step == 0

    run_ranks({"dp": 1}, run)


def test_a_mapper_without_workers_may_stand_above_nodes_that_communicate() -> None:
    def run(mesh: Any) -> list[Any]:
        with DistributedDataLoader(Mapper(Scene().graph(mesh), _same)) as loader:
            return rest(loader)

    plain = run_ranks({"dp": 2}, lambda mesh: rest(Scene().loader(mesh)))
    assert run_ranks({"dp": 2}, run) == plain


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (lambda: ParallelMapper(IterableWrapper([1]), int, 2, in_order=False), "in_order=False.*repeats others"),
        (
            lambda: ParallelMapper(IterableWrapper([1]), int, 2, snapshot_frequency=3),
            "snapshot_frequency=3.*accepted: 1",
        ),
        (lambda: Prefetcher(IterableWrapper([1]), 2, snapshot_frequency=0), "snapshot_frequency=0.*accepted: 1"),
        (lambda: IterableWrapper(iter([1])), "list_iterator, which can be iterated once only"),
        (lambda: IterableWrapper(number for number in range(2)), "generator, which can be iterated once only"),
        (lambda: IterableWrapper({1, 2}), "set, whose order another process does not repeat"),
        (lambda: SamplerWrapper(RandomSampler([1, 2])), "RandomSampler, which draws another order"),
        (lambda: SamplerWrapper(BatchSampler(RandomSampler([1]), 1, True)), "RandomSampler, which draws another order"),
        (
            lambda: SamplerWrapper(RandomSampler([1, 2], generator=torch.Generator().manual_seed(1))),
            "accepted: a sampler whose order follows from set_epoch",
        ),
    ],
)
def test_what_cannot_be_resumed_exactly_is_refused(node: Callable[[], BaseNode[Any]], reason: str) -> None:
    def run(mesh: Any) -> None:
        with pytest.raises(ValueError, match=f"torchdata's .*{reason}"):
            loader_over(windows_of(Batcher(node(), SHARE), 0, 1), mesh)

    run_ranks({"dp": 1}, run)


def test_a_source_without_state_is_replayed_by_a_thread_only() -> None:
    def run(mesh: Any) -> None:
        def loader(workers: int) -> DistributedDataLoader:
            return loader_over(Mapper(ParallelMapper(Stateless(own(0, 1)), list, workers), window_by_position), mesh)

        with loader(1) as first:
            for _ in range(2 * ROUNDS):
                next(first)
            state = first.state_dict()
        with loader(0) as other, pytest.raises(ValueError, match="2 items from the beginning .* no thread"):
            other.load_state_dict(state)

    run_ranks({"dp": 1}, run)


def test_a_state_of_another_arrangement_under_a_users_node_is_refused() -> None:
    def run(mesh: Any) -> None:
        def chain(workers: int) -> DistributedDataLoader:
            node = ParallelMapper(IterableWrapper(own(0, 1)), int, workers)
            return loader_over(windows_of(Batcher(node, SHARE), 0, 1), mesh)

        with chain(1) as loader:
            state = loader.state_dict()
        with chain(0) as other:
            with pytest.raises(ValueError, match="node 'Numbered' cannot be restored .*KeyError: 'source'"):
                other.load_state_dict(state)
            assert len(list(other)) == STEPS * ROUNDS  # and the loader stands where it stood

    run_ranks({"dp": 1}, run)
