"""A user's own samplers, nodes, algorithms and exceptions: kept exactly, or one error that names them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torchdata.nodes import BaseNode

from hp_nodes import DataPlaneError, DistributedDataLoader, Window, WindowSampler
from hp_nodes.nodes.graph import all_nodes, read_state
from hp_nodes.transport import run_ranks
from tests.nodes.test_failures import Broken
from tests.nodes.test_resume import DropShort, Noise
from tests.scenes import Documents, Passing, Scene, content, pickled, rest

SMALL = Scene(Documents(24), 1, 4, window=1, depth=2)  # 6 steps; 4 rounds each on one rank


# ---- errors at the edges of an epoch, and samplers


class Listed:
    """A user's own batch sampler: the contract and nothing more."""

    drop_last = True

    def __init__(self, order: list[int], micro: int, global_batch: int, rank: int, ranks: int) -> None:
        self.order, self.micro_batch_size, self.global_batch_size = order, micro, global_batch
        self.dp_rank, self.dp_world_size = rank, ranks
        self.total_samples, self.global_micro_batch_size = len(order), micro * ranks
        self.epoch = self.consumed_samples = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.consumed_samples + self.global_micro_batch_size <= self.total_samples:
            first = self.consumed_samples + self.dp_rank * self.micro_batch_size
            self.consumed_samples += self.global_micro_batch_size
            turned = self.order[self.epoch :] + self.order[: self.epoch]
            yield turned[first : first + self.micro_batch_size]

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.consumed_samples = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.consumed_samples = state["epoch"], state["consumed_samples"]


def with_sampler(kind: type, scene: Scene, mesh: Any) -> DistributedDataLoader:
    """The scene's graph over a sampler of the user's."""
    loader = scene.loader(mesh)
    size = len(scene.dataset)
    sampler = kind(list(range(size))[::-1], scene.micro, scene.global_batch, mesh.get_rank(), mesh.size())
    node = next(node for node in nodes_of(loader) if isinstance(node, WindowSampler))
    node.__init__(sampler, scene.window)  # type: ignore[misc]
    loader.graph.reset(None)
    return loader


def test_a_users_own_sampler_over_epochs_and_resumes() -> None:
    def run(mesh: Any) -> None:
        scene = replace(SMALL, window=2, split=False)
        with with_sampler(Listed, scene, mesh) as loader:
            whole, states = [], []
            for _ in range(2):
                states.append((len(whole), pickled(loader.state_dict())))
                for batch in loader:
                    whole.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
                    states.append((len(whole), pickled(loader.state_dict())))
        for position, state in states[:-1:5]:
            with with_sampler(Listed, scene, mesh) as loader:
                loader.load_state_dict(state)
                found = rest(loader)
                assert found == [place for place in whole[position // 2 * 2 :] if place[0] == found[0][0]]

    run_ranks({"dp": 2}, run)


class Short(Listed):
    """It promises more than it gives."""

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            if number == 3:
                return
            yield batch


class Stopping(Listed):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise StopIteration


class StoppingIterator(Listed):
    def __iter__(self) -> Any:
        raise StopIteration


class WrongSize(Listed):
    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(super().__iter__()):
            yield batch if number < 2 else [*batch, 0]


class NoIndices(Listed):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [str(index) for index in batch]


class Standing(Listed):
    """It does not count."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            self.consumed_samples = 0
            yield batch


BAD_SAMPLERS = {
    Short: "ended after 6 samples of an epoch of 24",
    Stopping: "raised StopIteration",
    StoppingIterator: "raised StopIteration",
    WrongSize: "yielded 2 indices",
    NoIndices: "TypeError",
    Standing: "consumed_samples is 0 after a yield",
}


@pytest.mark.parametrize("kind", BAD_SAMPLERS)
def test_a_sampler_that_breaks_its_promise_is_an_error_never_an_end(kind: type) -> None:
    def run(mesh: Any) -> str:
        with with_sampler(kind, SMALL, mesh) as loader, pytest.raises(DataPlaneError) as caught:
            rest(loader)
        return str(caught.value)

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
    assert BAD_SAMPLERS[kind] in first and "WindowSampler" in first


class AtThe(Passing):
    """A user's node that fails at one place of the epoch, on one rank."""

    def __init__(self, source: BaseNode[Any], where: str, here: bool) -> None:
        super().__init__(source)
        self.where = where
        self.here = here

    def next(self) -> Any:
        try:
            item = next(self.source)
        except StopIteration:
            if self.here and self.where == "end":
                raise LookupError("at the end") from None
            raise
        first = item.step == 0 and getattr(item, "first_round", getattr(item, "round", None)) == 0
        if self.here and ((self.where == "first" and first) or (self.where == "last" and item.ends_epoch)):
            raise LookupError(f"at the {self.where}")
        return item


@pytest.mark.parametrize("below", ["WindowSampler", "MetadataDeriver", "Planner", "Packer", "Collator"])
@pytest.mark.parametrize(("where", "delivered"), [("first", 0), ("last", 11), ("end", 12)])
def test_errors_in_the_first_window_in_the_last_and_at_the_end(where: str, delivered: int, below: str) -> None:
    def run(mesh: Any) -> tuple[int, str]:
        scene = replace(SMALL, insert={below: lambda node: AtThe(node, where, mesh.get_rank() == 1)}, timeout_s=5.0)
        count = 0
        with scene.loader(mesh) as loader, pytest.raises(DataPlaneError) as caught:  # noqa: PT012
            for _ in loader:
                count += 1
        return count, str(caught.value)

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
    assert first[0] == delivered
    assert f"at the {where}" in first[1] and "AtThe" in first[1]


# ---- algorithms and exceptions


class FailsHere:
    """A planner of the user's that fails on one rank only."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def assign(self, problem: Any) -> Any:
        if self.error is not None:
            raise self.error
        return problem.reference

    def objective(self, loads: np.ndarray) -> float:
        return float(loads.max(axis=0).sum())


@pytest.mark.parametrize("error", [ValueError("no plan today"), SystemExit(4), StopIteration()])
@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_an_algorithm_that_fails_on_one_rank(broadcast_plan: bool, error: BaseException) -> None:
    def run(mesh: Any) -> str:
        scene = replace(SMALL, broadcast_plan=broadcast_plan, timeout_s=5.0)
        loader = scene.loader(mesh)
        planner = next(node for node in nodes_of(loader) if type(node).__name__ == "Planner")
        planner.algorithm = FailsHere(error if mesh.get_rank() == 0 else None)
        with loader, pytest.raises(DataPlaneError) as caught:
            next(loader)
        return str(caught.value)

    before = time.monotonic()
    texts = run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 4
    assert texts[0] == texts[1]
    assert type(error).__name__ in texts[0] and "Planner" in texts[0]


def nodes_of(loader: DistributedDataLoader) -> Iterator[Any]:
    return all_nodes(loader.graph)


def test_an_exception_that_cannot_be_printed_is_an_error_like_others() -> None:
    class Mute(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise TypeError("mute")

    def run(mesh: Any) -> str:
        scene = replace(SMALL, dataset=Broken(Mute), timeout_s=5.0)
        with scene.loader(mesh) as loader, pytest.raises(DataPlaneError) as caught:
            rest(loader)
        return str(caught.value)

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
    assert "Mute" in first and "SampleReader" in first


# ---- nodes


class Twice(DropShort):
    """Gives one sample a second time, under the same key."""

    def next(self) -> Window:
        window = next(self.source)
        return window.take([0, *range(len(window.keys))])


def test_a_sample_that_a_node_doubles_is_an_error_before_the_plan() -> None:
    def run(mesh: Any) -> str:
        with replace(SMALL, insert={"Splitter": Twice}).loader(mesh) as loader, pytest.raises(DataPlaneError) as caught:
            rest(loader)
        return str(caught.value)

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
    assert "unique" in first


EVERYWHERE = ("WindowSampler", "SampleReader", "Splitter", "MetadataDeriver", "Planner", "Router", "Packer")


@pytest.mark.parametrize("depth", [0, 2])
def test_users_nodes_between_all_of_ours_resume_exactly(depth: int) -> None:
    class Counter(Passing):
        """Counts what passes, under a name of its class."""

        seen = 0

        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            super().reset(None if initial_state is None else initial_state["below"])
            self.seen = 0 if initial_state is None else initial_state["seen"]

        def next(self) -> Any:
            item = next(self.source)
            self.seen += 1
            return item

        def get_state(self) -> dict[str, Any]:
            return {"below": self.source.state_dict(), "seen": self.seen}

    insert = {**dict.fromkeys((*EVERYWHERE, "HostPrefetcher", "DevicePrefetcher"), Counter), "Collator": Noise}
    scene = replace(SMALL, window=2, depth=depth, device_depth=depth // 2, insert=insert)

    def counts(loader: DistributedDataLoader) -> list[int]:
        return [entry["seen"] for entry in read_state(loader.graph).values() if "seen" in entry]

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            whole, states = [], [pickled(loader.state_dict())]
            for batch in loader:
                whole.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
                states.append(pickled(loader.state_dict()))
            assert counts(loader) == [6] * len(EVERYWHERE) + [12] * 2
        for position in (0, 4, 7):
            with scene.loader(mesh) as loader:
                loader.load_state_dict(states[position])
                assert rest(loader) == whole[position // 2 * 2 :]

    run_ranks({"dp": 2}, run)
