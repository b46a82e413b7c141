"""Save at every position, restore into a new graph, and the rest is what it would have been."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torchdata.nodes import BaseNode, Loader

from hp_nodes import Window
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene, content, pickled, rest


def positions_of(scene: Scene, mesh: Any) -> list[Any]:
    """Deliver an epoch and a step of the next one, with the state after every micro-batch."""
    with scene.loader(mesh) as loader:
        states = [pickled(loader.state_dict())]
        delivered: list[Any] = []
        for _ in range(2):
            for batch in loader:
                delivered.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
                states.append(pickled(loader.state_dict()))
                if loader.last.epoch == 1 and loader.last.ends_step:
                    break
    return [delivered, states]


def resume_everywhere(scene: Scene, shape: dict[str, int], other: Scene | None = None) -> None:
    delivered, states = zip(*run_ranks(shape, lambda mesh: positions_of(scene, mesh)), strict=True)
    resumed_scene = other or scene

    def check(mesh: Any) -> None:
        rank = mesh.get_rank()
        for position, state in enumerate(states[rank]):
            with resumed_scene.loader(mesh) as loader:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
                boundary = boundary_before(delivered[rank], position)
                expected = delivered[rank][boundary:]
                epoch = expected[0][0] if expected else None
                found = rest(loader)
                if epoch == 0:
                    found += rest(loader, len(expected) - len(found))
                assert found[: len(expected)] == expected, f"position {position}"

    run_ranks(shape, check)


def boundary_before(delivered: list[Any], position: int) -> int:
    """The last step boundary at or before a position."""
    while position > 0 and position < len(delivered) and delivered[position][1] == delivered[position - 1][1]:
        position -= 1
    return position


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_at_every_position(ranks: int, window: int, depth: int) -> None:
    resume_everywhere(Scene(window=window, depth=depth, global_batch=16), {"dp": ranks})


@pytest.mark.parametrize("objective", ["makespan", "balance"])
def test_resume_with_loads_carried_over_windows(objective: str) -> None:
    resume_everywhere(Scene(window=1, objective=objective), {"dp": 2})


def test_resume_with_other_prefetch_window_and_workers() -> None:
    scene = Scene(window=2, depth=2, device_depth=2, split=False)
    delivered, states = zip(*run_ranks({"dp": 2}, lambda mesh: positions_of(scene, mesh)), strict=True)
    other = Scene(window=4, depth=0, device_depth=1, workers=1, split=False)

    def check(mesh: Any) -> list[Any]:
        with other.loader(mesh) as loader:
            loader.load_state_dict(states[mesh.get_rank()][4])
            return rest(loader)

    found = run_ranks({"dp": 2}, check)
    for step in (1, 2):
        assert samples_of(found, step) == samples_of(list(delivered), step, epoch=0)


def samples_of(per_rank: Any, step: int, epoch: int = 0) -> list[int]:
    records = [
        sample["index"]
        for rank in per_rank
        for (e, s, _, bins) in rank
        if (e, s) == (epoch, step)
        for packed in bins
        for sample in packed
    ]
    return sorted(records)


def test_resume_with_model_peers_has_one_state_everywhere() -> None:
    scene = Scene(window=2)
    results = run_ranks({"dp": 2, "tp": 2}, lambda mesh: positions_of(scene, mesh))
    for step_states in zip(*(states for _, states in results), strict=True):
        texts = [json.loads(state["hp_nodes"])["nodes"] for state in step_states]
        assert all(text == texts[0] for text in texts)
        assert all(len(state["hp_nodes"]) < 4096 for state in step_states)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]


def test_resume_of_a_resume() -> None:
    scene = Scene(window=2)

    def run(mesh: Any) -> tuple[list[Any], list[Any]]:
        with scene.loader(mesh) as loader:
            whole = rest(loader)
        pieces: list[Any] = []
        state = None
        while len(pieces) < len(whole):
            with scene.loader(mesh) as loader:
                if state is not None:
                    loader.load_state_dict(pickled(state))
                before = len(pieces)
                for batch in loader:
                    pieces.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
                    if loader.last.ends_step:
                        break
                assert len(pieces) > before
                state = loader.state_dict()
        return whole, pieces

    for whole, pieces in run_ranks({"dp": 2}, run):
        assert pieces == whole


class DropShort(BaseNode[Window]):
    """A user's node: leaves out short samples where a bin has others, and counts them."""

    def __init__(self, source: BaseNode[Window]) -> None:
        super().__init__()
        self.source = source
        self.dropped = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["below"])
        self.dropped = 0 if initial_state is None else initial_state["dropped"]

    def next(self) -> Window:
        window = next(self.source)
        keep, seen = [], set()
        for place, (sample, number) in enumerate(zip(window.samples, window.bins.tolist(), strict=True)):
            if number in seen and len(sample) < 9 and (self.dropped + place) % 3:
                self.dropped += 1
            else:
                keep.append(place)
                seen.add(number)
        return window.take(keep)

    def get_state(self) -> dict[str, Any]:
        return {"below": self.source.state_dict(), "dropped": self.dropped}


class Noise(BaseNode[Any]):
    """A user's node with generators of its own, above the collator."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.upstream = source
        self.generator = torch.Generator()
        self.random = random.Random()

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is None:
            self.upstream.reset()
            self.generator.manual_seed(1)
            self.random.seed(1)
        else:
            self.upstream.reset(initial_state["upstream"])
            self.generator.set_state(initial_state["torch"])
            self.random.setstate(initial_state["python"])

    def next(self) -> Any:
        from dataclasses import replace

        batch = next(self.upstream)
        draw = int(torch.randint(1000, (1,), generator=self.generator)), self.random.random()
        return replace(batch, data=(batch.data, draw))

    def get_state(self) -> dict[str, Any]:
        return {
            "upstream": self.upstream.state_dict(),
            "torch": self.generator.get_state(),
            "python": self.random.getstate(),
        }


@pytest.mark.parametrize("depth", [0, 2])
def test_users_stateful_nodes_anywhere(depth: int) -> None:
    scene = Scene(window=2, depth=depth, insert={"Router": DropShort, "Collator": Noise})
    resume_everywhere(scene, {"dp": 2})


def test_every_position_inside_torchdatas_loader_without_a_checkpointer() -> None:
    """Without StepCheckpointer the state moves with every micro-batch."""
    scene = Scene(window=4, depth=2, device_depth=1, checkpointer=False, insert={"Collator": Noise})

    def run(mesh: Any) -> None:
        loader = Loader(scene.graph(mesh))
        whole, states = [], [pickled(loader.state_dict())]
        for batch in loader:
            whole.append(content(batch.data))
            states.append(pickled(loader.state_dict()))
        for position, state in enumerate(states[:-1]):
            again = Loader(scene.graph(mesh))
            again.load_state_dict(state)
            assert [content(batch.data) for batch in again] == whole[position:], position

    run_ranks({"dp": 2}, run)


def test_state_does_not_grow() -> None:
    scene = Scene(dataset=Documents(size=400), micro=1, global_batch=4, window=2)

    def run(mesh: Any) -> list[int]:
        with scene.loader(mesh) as loader:
            return [len(loader.state_dict()["hp_nodes"]) for _ in loader]

    for sizes in run_ranks({"dp": 2}, run):
        assert max(sizes) - min(sizes) <= 8  # digits of the cursor, true or false
