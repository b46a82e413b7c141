"""CASES 25: what a dataset draws belongs to the occurrence, whatever reads it and wherever it was resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hp_nodes import sample_rng
from hp_nodes.randomness import SampleRng, occurrence
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene, content, pickled

SIZE = 24
SCENE = Scene(Documents(SIZE), 1, 4, window=2, split=False)


class Drawn(Documents):
    """Each record carries six numbers, two of each kind of generator."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = [number for _ in range(2) for number in self.draw()]
        return {**super().__getitem__(index), "draws": draws}

    def draw(self) -> list[float]:
        rng = sample_rng()
        return [rng.python.random(), float(rng.numpy.random()), torch.rand(1, generator=rng.torch).item()]


class DrawnGlobally(Drawn):
    def draw(self) -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]


@contextmanager
def untouched_generators() -> Iterator[None]:
    """The trainer's own generators are what they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    assert random.getstate() == before[0]
    for one, other in zip(np.random.get_state(), before[1], strict=True):
        assert np.array_equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[2])


def epochs(dataset: Any, workers: int, ranks: int = 1, count: int = 2) -> dict[tuple[int, int], list[float]]:
    """(epoch, position) → what was drawn there."""

    def run(mesh: Any) -> list[Any]:
        found = []
        with replace(SCENE, dataset=dataset, workers=workers).loader(mesh) as loader:
            for _ in range(count):
                for batch in loader:
                    drawn = [sample["draws"] for packed in batch for sample in packed]
                    found += [
                        ((loader.last.epoch, place), d) for place, d in zip(loader.last.positions, drawn, strict=True)
                    ]
        return found

    pairs = [pair for found in run_ranks({"dp": ranks}, run) for pair in found]
    assert len(pairs) == len(dict(pairs)) == count * SIZE
    return dict(pairs)


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (2, 1), (0, 2), (0, 4)])
def test_sample_rng_is_the_same_for_any_workers_and_ranks(workers: int, ranks: int) -> None:
    with untouched_generators():
        expected = epochs(Drawn(SIZE), 0)
        assert epochs(Drawn(SIZE), workers, ranks) == expected
    values = [value for draws in expected.values() for value in draws]
    assert len(set(values)) == len(values)  # nothing repeats: not over records, nor epochs, nor generators


def test_global_generators_are_exact_in_workers() -> None:
    with untouched_generators():
        found = epochs(DrawnGlobally(SIZE), 1)
        assert epochs(DrawnGlobally(SIZE), 2) == found
    values = [value for draws in found.values() for value in draws]
    assert len(set(values)) == len(values)


@pytest.mark.parametrize(
    ("dataset", "workers", "others"),
    [(Drawn, 0, 2), (Drawn, 1, 0), (DrawnGlobally, 1, 2)],
)
def test_save_at_3_and_restore_with_other_workers(dataset: type, workers: int, others: int) -> None:
    def run(mesh: Any) -> tuple[list[Any], list[Any]]:
        scene = replace(SCENE, dataset=dataset(SIZE), global_batch=1, window=1, depth=2)
        with replace(scene, workers=workers).loader(mesh) as loader:
            whole, state = [], None
            for number, batch in enumerate(loader):
                whole.append(content(batch))
                if number == 2:
                    state = pickled(loader.state_dict())
        with replace(scene, workers=others).loader(mesh) as loader:
            loader.load_state_dict(state)
            return whole[3:], [content(batch) for batch in loader]

    with untouched_generators():
        expected, found = run_ranks({"dp": 1}, run)[0]
    assert found == expected
    assert len(found) == SIZE - 3


def test_an_occurrence_has_its_own_seed() -> None:
    seeds = {SampleRng(seed, epoch, position).seed for seed in range(3) for epoch in range(3) for position in range(50)}
    assert len(seeds) == 450
    with occurrence(1, 2, 3) as rng:
        assert sample_rng() is rng
        with occurrence(1, 2, 4) as inner:
            assert sample_rng() is inner
        assert sample_rng() is rng


def test_outside_a_graph_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="here nothing is being read"):
        sample_rng()


def test_an_index_that_repeats_is_drawn_anew() -> None:
    class One(Drawn):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return super().__getitem__(0)

    found = epochs(One(SIZE), 0, count=1)
    assert len({tuple(draws) for draws in found.values()}) == SIZE
