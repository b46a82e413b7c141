"""CONTRACT 10: what may be a source of external steps, and that a run over it stops and resumes anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from hp_nodes.transport import run_ranks
from tests.graphs.external_scene import ExternalScene, rounds, samples_of
from tests.scenes import pickled

STEPS = 5


class Stream:
    """A source with a state and an order of its own in each epoch, as many streaming loaders are."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place = 0
        self.random = random.Random(rank)
        self.order: list[int] = []
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed:
            self.place = 0
            self.order = self.random.sample(range(20), STEPS)
        self.resumed = False
        while self.place < STEPS:
            self.place += 1
            yield rounds(self.rank, [1 + self.order[self.place - 1]])[0]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": self.order, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.order = state["place"], state["order"]
        self.random.setstate(state["random"])
        self.resumed = True


class Mosaic:
    """Counts as Mosaic Streaming's datasets do: ``num_samples`` of all ranks, two a round, an epoch a call of iter."""

    def __init__(self, rank: int, ranks: int = 2) -> None:
        self.rank, self.ranks = rank, ranks
        self.next_epoch = 0
        self.resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        epoch, first = self.next_epoch, 0
        if self.resume is not None:
            epoch, first = self.resume["epoch"], self.resume["sample_in_epoch"] // (2 * self.ranks)
            self.resume = None
        self.next_epoch = epoch + 1
        for number in range(first, STEPS):
            yield rounds(self.rank, [1 + 10 * epoch + number])[0]  # two bins of one sample

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        assert from_beginning
        return {"epoch": self.next_epoch - 1, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume = dict(state)


class Rows(Dataset[Any]):
    """Bins of one sample for a DataLoader to draw from."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> Any:
        return [(self.rank, index, 1 + index)]


def unchanged(bins: Any) -> Any:
    return bins


def stateful_dataloader(rank: int, workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(rank)
    rows = Rows(rank)
    return StatefulDataLoader(
        rows,
        batch_size=2,
        sampler=StatefulRandomSampler(rows, generator=generator),
        generator=torch.Generator(),
        num_workers=workers,
        collate_fn=unchanged,
    )


def node(rank: int) -> Any:
    return Prefetcher(Mapper(IterableWrapper(range(1, STEPS + 1)), lambda cost: rounds(rank, [cost])[0]), 2)


def hugging_face(rank: int) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"rank": rank, "number": n, "cost": 1 + n} for n in range(2 * STEPS)])
    stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=1).batch(2)
    return Rounds(stream)


class Rounds:
    """Rounds of a Hugging Face iterable of batches: one bin a row. State and epoch are the iterable's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.state_dict = stream.state_dict
        self.load_state_dict = stream.load_state_dict
        self.set_epoch = stream.set_epoch

    def __iter__(self) -> Iterator[Any]:
        for batch in self.stream:
            yield [[row] for row in zip(batch["rank"], batch["number"], batch["cost"], strict=True)]


SOURCES = {
    "with a state of its own": Stream,
    "Mosaic Streaming": Mosaic,
    "StatefulDataLoader": stateful_dataloader,
    "torchdata node": node,
    "Hugging Face iterable": hugging_face,
}
BEGIN_AGAIN = ("torchdata node", "Hugging Face iterable")


@pytest.mark.parametrize(
    ("name", "depth"), [*((name, 1) for name in SOURCES), ("with a state of its own", 0), ("torchdata node", 2)]
)
def test_resume_at_every_position(name: str, depth: int) -> None:
    scene = ExternalScene(SOURCES[name], settings={"host_prefetch_depth": depth})

    def whole(mesh: Any) -> tuple[list[Any], list[Any]]:
        with scene.loader(mesh) as loader:
            states, delivered = [pickled(loader.state_dict())], []
            for _ in range(2):
                for batch in loader:
                    delivered.append((loader.last.epoch, loader.last.step, samples_of(batch)))
                    states.append(pickled(loader.state_dict()))
            return delivered, states

    delivered, states = zip(*run_ranks({"dp": 2}, whole), strict=True)
    assert len(delivered[0]) == 2 * STEPS

    def check(mesh: Any) -> None:
        rank = mesh.get_rank()
        for position in range(2 * STEPS):
            with scene.loader(mesh) as loader:
                # The same state object twice, the second time over a run in progress. A source without set_epoch that
                # draws an order of its own keeps nothing of its beginning, and begins an epoch of another order.
                for _ in range(1 if position == 0 and name not in BEGIN_AGAIN else 2):
                    loader.load_state_dict(states[rank][position])
                    assert loader.state_dict() == states[rank][position]
                    found: list[Any] = []
                    while not found or found[-1][0] == 0:
                        found += [(loader.last.epoch, loader.last.step, samples_of(b)) for b in loader]
                    assert found == delivered[rank][position:], position

    run_ranks({"dp": 2}, check)


class Streamed:
    """Rounds of two bins from Mosaic Streaming: over its dataset, whose state counts samples, or over its loader."""

    def __init__(self, folder: Path, workers: int | None) -> None:
        streaming = pytest.importorskip("streaming")
        rows = streaming.StreamingDataset(
            local=str(folder), batch_size=2, shuffle=True, shuffle_seed=3, num_canonical_nodes=1
        )
        columns = {"batch_size": 2, "num_workers": workers or 0, "collate_fn": as_columns}
        self.rows = rows if workers is None else streaming.StreamingDataLoader(rows, **columns)
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        numbers: list[int] = []
        for item in self.rows:
            numbers += item["number"] if isinstance(item["number"], list) else [item["number"]]
            if len(numbers) == 2:
                yield [[(0, number, 1 + number % 3)] for number in numbers]
                numbers = []


def as_columns(rows: Any) -> Any:
    """The loader counts the samples of a batch by its first column."""
    return {"number": [row["number"] for row in rows]}


@pytest.mark.parametrize("workers", [None, 0, 2], ids=["dataset", "loader", "loader with workers"])
def test_mosaic_streaming_itself_resumes_at_every_position(workers: int | None, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    with streaming.MDSWriter(out=str(tmp_path), columns={"number": "int"}, size_limit=200) as shards:
        for number in range(2 * STEPS):
            shards.write({"number": number})
    scene = ExternalScene(lambda rank: Streamed(tmp_path, workers))

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            states, delivered = [], []
            for _ in range(2):
                for batch in loader:
                    delivered.append((loader.last.epoch, samples_of(batch)))
                    states.append(pickled(loader.state_dict()))
        assert sorted(sample[1] for _, samples in delivered for sample in samples) == sorted(2 * list(range(2 * STEPS)))
        for position, state in enumerate(states[:-1], start=1):
            with scene.loader(mesh) as again:
                again.load_state_dict(state)
                found: list[Any] = []
                while not found or found[-1][0] == 0:
                    found += [(again.last.epoch, samples_of(batch)) for batch in again]
                assert found == delivered[position:], position

    run_ranks({"dp": 1}, run)


def test_a_finished_state_goes_on_with_the_next_epoch() -> None:
    scene = ExternalScene(Stream)

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            assert len(list(loader)) == STEPS
            state = pickled(loader.state_dict())
            second = [samples_of(batch) for batch in loader]
        with scene.loader(mesh) as again:
            again.load_state_dict(state)
            again.set_epoch(0)
            assert list(again) == []
            assert [samples_of(batch) for batch in again] == second
            assert again.last.epoch == 1
        with scene.loader(mesh) as other:
            other.load_state_dict(state)
            assert [samples_of(batch) for batch in other] == second
        with scene.loader(mesh) as third:
            third.load_state_dict(state)
            third.set_epoch(1)
            assert [samples_of(batch) for batch in third] == second

    run_ranks({"dp": 2}, run)


def test_steps_of_several_rounds_resume_at_their_boundary() -> None:
    scene = ExternalScene(Stream, rounds_per_step=2)

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            whole, states = [], [pickled(loader.state_dict())]
            for batch in loader:
                whole.append(samples_of(batch))
                states.append(pickled(loader.state_dict()))
        assert len(whole) == STEPS // 2 * 2
        for position, state in enumerate(states[:-1]):
            with scene.loader(mesh) as again:
                again.load_state_dict(state)
                assert [samples_of(batch) for batch in again] == whole[position // 2 * 2 :]

    run_ranks({"dp": 2}, run)


def test_a_source_without_state_says_so() -> None:
    scene = ExternalScene(lambda rank: rounds(rank, [1] * 3))

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            with pytest.raises(ValueError, match="the step source, a list, cannot say where it stands"):
                loader.state_dict()
            next(loader)
            with pytest.raises(ValueError, match="the step source, a list, cannot say where it stands"):
                loader.state_dict()
            assert len(list(loader)) == 2

    run_ranks({"dp": 2}, run)


def test_another_number_of_ranks_is_refused() -> None:
    states = run_ranks({"dp": 2}, lambda mesh: ExternalScene(Stream).loader(mesh).state_dict())

    def run(mesh: Any) -> None:
        with ExternalScene(Stream).loader(mesh) as loader, pytest.raises(ValueError, match="rank"):
            loader.load_state_dict(states[0])

    run_ranks({"dp": 1}, run)


class Shuffled(RandomSampler):
    """A sampler with epochs, as torch's DistributedSampler is."""

    epochs: list[int]

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epochs[-1]).sample(range(len(self.data_source)), len(self.data_source)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_is_told_its_epoch_through_its_sampler(workers: int) -> None:
    samplers: dict[int, Shuffled] = {}

    def source(rank: int) -> Any:
        rows = Rows(rank)
        samplers[rank] = Shuffled(rows)
        return DataLoader(rows, 2, sampler=samplers[rank], num_workers=workers, collate_fn=unchanged)

    def run(mesh: Any) -> list[Any]:
        with ExternalScene(source).loader(mesh) as loader:
            return [[samples_of(batch) for batch in loader] for _ in range(2)]

    results = run_ranks({"dp": 1 if workers else 2}, run)
    for rank, epochs in enumerate(results):
        assert samplers[rank].epochs == [0, 1]
        for epoch, steps in enumerate(epochs):
            numbers = sorted(number for rank in results for samples in rank[epoch] for _, number, _ in samples)
            assert numbers == sorted(list(range(2 * STEPS)) * len(results))
            assert len(steps) == STEPS
        assert epochs[0] != epochs[1]
