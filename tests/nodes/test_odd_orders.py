"""Resets, loads and epochs in any order, several loaders at once, and loaders that are left lying about."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from hp_nodes import DistributedDataLoader
from hp_nodes.transport import run_ranks
from tests.nodes.test_failures import no_thread_is_left
from tests.scenes import Documents, Scene, content, pickled, rest

SMALL = Scene(Documents(24), 1, 4, window=1, depth=2)  # 6 steps; 4 rounds each on one rank


def on_one_rank(fn: Any) -> Any:
    return run_ranks({"dp": 1}, fn)[0]


def whole_epochs(scene: Scene, ranks: int, count: int) -> list[list[list[Any]]]:
    """[rank][epoch] → micro-batches, from a loader that is only iterated."""

    def run(mesh: Any) -> list[list[Any]]:
        with scene.loader(mesh) as loader:
            return [rest(loader) for _ in range(count)]

    return run_ranks({"dp": ranks}, run)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_any_order_of_set_epoch_load_and_iteration(ranks: int, seed: int) -> None:
    """A model that knows only (epoch, micro-batches delivered) says what comes next, whatever was called before."""
    scene = replace(SMALL, window=2, depth=seed % 4, device_depth=seed % 2)
    epochs = 5
    expected = whole_epochs(scene, ranks, epochs)
    per_step = 4 // ranks

    def run(mesh: Any) -> None:
        mine = expected[mesh.get_rank()]
        rng = random.Random(seed)
        with scene.loader(mesh) as loader:
            epoch, place = 0, 0
            saved: list[tuple[int, int, Any]] = []
            for _ in range(20):
                action = rng.choice(["next", "next", "finish", "save", "load", "same epoch", "other epoch", "iter"])
                if action == "next":
                    count = rng.randint(1, 7)
                    want = mine[epoch][place : place + count]
                    assert rest_without_iter(loader, count) == want
                    place += len(want)
                elif action == "finish":
                    assert rest_without_iter(loader, None) == mine[epoch][place:]
                    with pytest.raises(StopIteration):
                        next(loader)
                    place = len(mine[epoch])
                elif action == "iter" and epoch + 1 < epochs:
                    if place == len(mine[epoch]):
                        assert rest_without_iter(loader, None) == []
                        epoch, place = epoch + 1, 0
                    assert iter(loader) is loader
                elif action == "save":
                    boundary = place // per_step * per_step
                    saved.append((epoch, boundary, pickled(loader.state_dict())))
                elif action == "load" and saved:
                    epoch, place, state = rng.choice(saved)
                    loader.load_state_dict(state)
                    assert pickled(loader.state_dict()) == state
                    if place == len(mine[epoch]):
                        if rng.random() < 0.5 or epoch + 1 == epochs:
                            loader.set_epoch(epoch)
                        else:
                            epoch, place = epoch + 1, 0
                elif action == "same epoch":
                    loader.set_epoch(epoch)
                elif action == "other epoch":
                    epoch, place = rng.choice([other for other in range(epochs) if other != epoch]), 0
                    loader.set_epoch(epoch)

    run_ranks({"dp": ranks}, run)
    assert no_thread_is_left()


def rest_without_iter(loader: DistributedDataLoader, count: int | None) -> list[Any]:
    found: list[Any] = []
    while count is None or len(found) < count:
        try:
            batch = next(loader)
        except StopIteration:
            break
        assert loader.last is not None
        found.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
    return found


def test_set_epoch_within_the_first_step_of_a_later_epoch() -> None:
    """The current epoch is the one being delivered, though the state still speaks of the end of the one before."""

    def run(mesh: Any) -> None:
        with SMALL.loader(mesh) as loader:
            first = rest(loader)
            finished = pickled(loader.state_dict())
        with SMALL.loader(mesh) as loader:
            loader.load_state_dict(finished)
            later = rest(loader, 1)
            loader.set_epoch(1)
            later += rest(loader)
            assert [place[:3] for place in later] == [(1, step, number) for _, step, number, _ in first]
            loader.load_state_dict(finished)
            rest(loader, 1)
            loader.set_epoch(0)
            assert rest(loader) == first

    on_one_rank(run)


def test_a_state_that_does_not_fit_changes_nothing_that_is_delivered() -> None:
    """The loader stands at the last step boundary afterwards; nothing is lost."""

    def run(mesh: Any) -> None:
        with SMALL.loader(mesh) as loader:
            whole = rest(SMALL.loader(mesh))
            assert rest(loader, 5) == whole[:5]
            wrong = loader.state_dict()["hp_nodes"].replace("WindowSampler", "Elsewhere")
            with pytest.raises(ValueError, match="Elsewhere"):
                loader.load_state_dict({"hp_nodes": wrong})
            assert rest(loader) == whole[4:]

    on_one_rank(run)


def test_two_loaders_interleaved() -> None:
    train, evaluation = replace(SMALL, order="sequential"), replace(SMALL, window=4, depth=1)
    expected = [whole_epochs(scene, 2, 1) for scene in (train, evaluation)]

    def run(mesh: Any) -> None:
        mine = [found[mesh.get_rank()][0] for found in expected]
        found: list[list[Any]] = [[], []]
        with train.loader(mesh) as first, evaluation.loader(mesh) as second:
            for number in range(len(mine[0])):
                found[0] += rest(first, 1)
                if number % 3 == mesh.get_rank():  # not at the same place on the two ranks
                    continue
                found[1] += rest(second, 1)
            found[1] += rest(second, len(mine[1]) - len(found[1]))
        assert found == mine

    run_ranks({"dp": 2}, run)
    assert no_thread_is_left()


def test_a_loader_beside_an_abandoned_one_on_the_same_mesh() -> None:
    expected = whole_epochs(SMALL, 2, 1)

    def run(mesh: Any) -> None:
        for count in range(4):
            abandoned = SMALL.loader(mesh)
            rest(abandoned, count)
            with SMALL.loader(mesh) as loader:
                assert rest(loader) == expected[mesh.get_rank()][0]
            del abandoned

    run_ranks({"dp": 2}, run)
    assert no_thread_is_left()


def test_state_from_another_thread_is_always_a_step_boundary() -> None:
    scene = replace(SMALL, dataset=Documents(200))

    def run(mesh: Any) -> tuple[set[str], set[str]]:
        taken: set[str] = set()
        with scene.loader(mesh) as loader:
            boundaries = {loader.state_dict()["hp_nodes"]}
            stop = threading.Event()

            def watch() -> None:
                while not stop.is_set():
                    taken.add(loader.state_dict()["hp_nodes"])

            watcher = threading.Thread(target=watch)
            watcher.start()
            for _ in loader:
                if loader.last.ends_step:
                    boundaries.add(loader.state_dict()["hp_nodes"])
            stop.set()
            watcher.join()
        return taken, boundaries

    taken, boundaries = on_one_rank(run)
    assert taken
    assert taken <= boundaries


def test_collection_in_another_loaders_thread_is_harmless() -> None:
    """The cycle collector runs wherever it likes: also in the background thread of a second loader."""

    def run(mesh: Any) -> int:
        forgotten = SMALL.loader(mesh)
        rest(forgotten, 2)
        cycle: list[Any] = [forgotten]
        cycle.append(cycle)
        del forgotten, cycle

        uncollected = [True]

        def collecting(bins: Any) -> Any:
            if uncollected:
                uncollected.pop()
                gc.collect()
            return tuple(bins)

        with replace(SMALL, collate_fn=collecting).loader(mesh) as loader:
            return len(rest(loader))

    before = time.monotonic()
    assert run_ranks({"dp": 2}, run) == [12, 12]
    assert time.monotonic() - before < 10
    assert no_thread_is_left()
