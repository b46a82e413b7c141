"""CONTRACT 10: steps from the user's own source, planned in groups, with one error for all when ranks differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hp_nodes import DataPlaneError, SampleMetadata
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from hp_nodes.transport.balance_group import create_balance_group
from tests.graphs.external_scene import ExternalScene, Sample, rounds, samples_of, weigh


def deliver(scene: ExternalScene, mesh: Any) -> list[list[Sample]]:
    with scene.loader(mesh) as loader:
        return [samples_of(batch) for batch in loader]


def failure(scene: ExternalScene, mesh: Any) -> tuple[int, str]:
    """Micro-batches delivered, and the error that came, and came again."""
    loader = scene.loader(mesh)
    count = 0
    with pytest.raises(DataPlaneError) as caught:  # noqa: PT012  where it comes is what matters
        for _ in loader:
            count += 1
    with pytest.raises(DataPlaneError) as second:
        next(loader)
    assert str(second.value) == str(caught.value)
    loader.close()
    return count, str(caught.value)


# ---- groups and the gate


@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_samples_move_within_their_group_only_and_not_without_gain(broadcast_plan: bool) -> None:
    scene = ExternalScene(
        lambda rank: rounds(rank, [9 if rank in (0, 2) else 1, 1]),
        group=2,
        settings={"broadcast_plan": broadcast_plan},
    )
    results = run_ranks({"dp": 4}, lambda mesh: deliver(scene, mesh))
    for first in (0, 2):
        group = {first, first + 1}
        step_0 = [results[rank][0] for rank in sorted(group)]
        assert {sample[0] for samples in step_0 for sample in samples} == group
        assert [sum(sample[2] for sample in samples) for samples in step_0] == [10, 10]
        assert sorted(sample for samples in step_0 for sample in samples) == sorted(
            sample for rank in group for sample in samples_of(rounds(rank, [9 if rank in (0, 2) else 1])[0])
        )
    for rank, (_, step_1) in enumerate(results):
        assert step_1 == [(rank, 2, 1), (rank, 3, 1)]


def test_one_group_of_all_on_one_node() -> None:
    scene = ExternalScene(lambda rank: rounds(rank, [9 if rank < 2 else 1]))
    results = run_ranks({"dp": 4}, lambda mesh: deliver(scene, mesh))
    assert [sum(sample[2] for sample in step) for (step,) in results] == [10] * 4


def test_the_gain_has_to_be_enough() -> None:
    scene = ExternalScene(lambda rank: rounds(rank, [9 if rank else 1]), settings={"min_balance_gain": 0.6})
    results = run_ranks({"dp": 2}, lambda mesh: deliver(scene, mesh))  # 18 to 10 is a gain of 0.444
    assert results == [[samples_of(rounds(rank, [9 if rank else 1])[0])] for rank in range(2)]


@pytest.mark.parametrize("group", [None, 2])
@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_a_window_takes_at_most_five_exchanges(group: int | None, broadcast_plan: bool) -> None:
    """Numbers, plan, sizes and payload within the group, and one over all ranks, which opens the next window too."""
    scene = ExternalScene(
        lambda rank: rounds(rank, [9 if rank in (0, 2) and number % 2 else 1 for number in range(8)]),
        group=group,
        settings={"broadcast_plan": broadcast_plan, "host_prefetch_depth": 0},
    )

    def run(mesh: Any) -> list[tuple[bool, int, int]]:
        with scene.loader(mesh) as loader:
            data, balanced = loader._transports[:2]
            found, before = [], (0, 0)
            for _ in loader:
                made = data.exchanges, balanced.exchanges if balanced is not data else 0
                found.append((loader.last.report.plan.accepted, made[0] - before[0], made[1] - before[1]))
                before = made
            return found

    for first, *others in run_ranks({"dp": 4}, run):
        moved = 4 + broadcast_plan
        assert [sum(counts) for accepted, *counts in others if accepted] == [moved] * 4
        assert all(sum(counts) < moved for accepted, *counts in others if not accepted)
        assert group is None or all(everywhere == 1 for _, everywhere, _ in others)
        # The first has an opening of its own, and its numbers outgrow what nothing was known of.
        assert not first[0]
        assert sum(first[1:]) <= moved + 1


@pytest.mark.parametrize("size", [3, 0, True, 8])
def test_a_group_size_that_does_not_divide_the_ranks_is_refused(size: Any) -> None:
    def run(mesh: Any) -> str:
        topology = DataTopology.from_mesh(mesh)
        with pytest.raises(ValueError, match="balance_group_size") as caught:
            create_balance_group(topology, create_transport(topology), size)
        return str(caught.value)

    for text in run_ranks({"dp": 4}, run):
        assert repr(size) in text


def test_bins_of_several_samples_and_steps_of_several_rounds() -> None:
    """Conservation in every step, whatever moved; places as the loop sees them."""

    def source(rank: int) -> list[Any]:
        sizes = [[1 + (rank + number + slot) % 3 for slot in range(2)] for number in range(6)]
        return [
            [
                [(rank, 100 * number + 10 * slot + k, 1 + 7 * (rank == 0)) for k in range(size)]
                for slot, size in enumerate(row)
            ]
            for number, row in enumerate(sizes)
        ]

    scene = ExternalScene(source, group=2, rounds_per_step=2)

    def run(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            return [(loader.last.step, loader.last.round, loader.last.ends_step, samples_of(b)) for b in loader]

    results = run_ranks({"dp": 4}, run)
    assert [[place[:3] for place in rank] for rank in results] == [
        [(step, number, number == 1) for step in range(3) for number in range(2)]
    ] * 4
    for first in (0, 2):
        for number in range(6):
            got = sorted(sample for rank in (first, first + 1) for sample in results[rank][number][3])
            assert got == sorted(sample for rank in (first, first + 1) for sample in samples_of(source(rank)[number]))


# ---- ranks that differ


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("group", [None, 1, 2])
def test_a_rank_that_ends_early_is_named_with_its_count(group: int | None, depth: int) -> None:
    scene = ExternalScene(
        lambda rank: rounds(rank, [1] * (3 if rank == 2 else 5)), group=group, settings={"host_prefetch_depth": depth}
    )
    for count, text in run_ranks({"dp": 4}, lambda mesh: failure(scene, mesh)):
        assert count == 3
        assert "rank 2 after 3 rounds" in text
        assert "ranks [0, 1, 3] have at least 5" in text
        assert "step 3" in text


@pytest.mark.parametrize("group", [None, 1])
def test_another_number_of_bins_is_one_error_on_all(group: int | None) -> None:
    """CASES 6: 3 bins asked of each rank; rank 0 brings 3, rank 1 brings 2."""
    scene = ExternalScene(lambda rank: [*rounds(rank, [1], 3), *rounds(rank, [1], 3 - rank)], bins=3, group=group)
    for count, text in run_ranks({"dp": 2}, lambda mesh: failure(scene, mesh)):
        assert count == 1
        assert "rank 1 yielded 2 bins, 3 are needed" in text


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ([[(0, 0, 1)], []], "bin 1 of the step source of rank 1 is empty"),
        ([[(0, 0, 1)], {"a": 1}], "bin 1 of the step source of rank 1 is a dict"),
        ({"a": 1}, "the step source of rank 1 yielded a dict"),
        ("ab", "the step source of rank 1 yielded a str"),
    ],
)
def test_what_is_no_round_is_named(item: Any, text: str) -> None:
    scene = ExternalScene(lambda rank: [item] if rank == 1 else rounds(rank, [1]))
    for _, shown in run_ranks({"dp": 2}, lambda mesh: failure(scene, mesh)):
        assert text in shown


def broken(rank: int, at: int) -> Iterator[Any]:
    for number, bins in enumerate(rounds(rank, [1] * 5)):
        if rank == 1 and number == at:
            raise OSError("stream lost")
        yield bins


def heavy(sample: Sample) -> SampleMetadata:
    if sample[:2] == (1, 4):
        raise KeyError("no such length")
    return weigh(sample)


def stiff(samples: Any, seq_len: int) -> Any:
    if any(sample[:2] == (1, 4) for sample in samples):
        raise ArithmeticError("cannot pack this")
    return tuple(samples)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("group", [None, 1, 2])
@pytest.mark.parametrize("stage", ["StepSource", "MetadataDeriver", "Planner", "Packer"])
def test_a_failure_anywhere_reaches_every_group(stage: str, group: int | None, depth: int) -> None:
    steps: dict[str, Any] = {"StepSource": lambda rank: Once(broken(rank, 2))}
    settings: dict[str, Any] = {
        "MetadataDeriver": {"metadata_fn": heavy},
        "Packer": {"pack_fn": stiff},
        "Planner": {"metadata_fn": lambda s: SampleMetadata(65 if s[:2] == (1, 4) else 4, weigh(s).cost)},
    }
    scene = ExternalScene(
        steps.get(stage, lambda rank: rounds(rank, [1] * 5)),
        group=group,
        settings={"host_prefetch_depth": depth},
        **settings.get(stage, {}),
    )
    before = time.monotonic()
    results = run_ranks({"dp": 4}, lambda mesh: failure(scene, mesh))
    assert time.monotonic() - before < 5
    words = {
        "StepSource": "stream lost",
        "MetadataDeriver": "no such",
        "Planner": "65",
        "Packer": "cannot pack",
    }
    for count, text in results:
        assert count == 2
        assert stage in text
        assert words[stage] in text
        assert text.splitlines()[0] == results[0][1].splitlines()[0]


def test_an_error_in_one_ranks_loop_reaches_the_other_groups() -> None:
    scene = ExternalScene(lambda rank: rounds(rank, [1] * 40), group=2)

    def run(mesh: Any) -> str:
        try:
            with scene.loader(mesh) as loader:
                for count, _ in enumerate(loader):
                    if mesh.get_rank() == 3 and count == 2:
                        raise FloatingPointError("loss is NaN")
        except (FloatingPointError, DataPlaneError) as error:
            return str(error)
        return "no error"

    before = time.monotonic()
    texts = run_ranks({"dp": 4}, run)
    assert time.monotonic() - before < 8
    assert all("rank 3" in text and "closed" in text for text in texts[:3])


def test_orderly_closes_at_any_place() -> None:
    scene = ExternalScene(lambda rank: rounds(rank, [1] * 8), group=2, settings={"host_prefetch_depth": 2})

    def run(mesh: Any) -> None:
        for number in range(24):
            with scene.loader(mesh) as loader:
                for _ in range(number % 7):
                    next(loader)

    before = time.monotonic()
    run_ranks({"dp": 4}, run)
    assert time.monotonic() - before < 10


# ---- ends and epochs


class Once:
    """An iterator, which can be gone through once."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return self.items


@pytest.mark.parametrize("depth", [0, 2])
def test_rounds_that_fill_no_step_are_dropped_and_counted(depth: int) -> None:
    scene = ExternalScene(
        lambda rank: rounds(rank, [1] * 8), rounds_per_step=3, settings={"host_prefetch_depth": depth}
    )

    def run(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            return [
                (loader.last.step, loader.last.round, loader.last.ends_epoch, loader.last.report.dropped)
                for _ in loader
            ]

    places = [(step, number, (step, number) == (1, 2)) for step in range(2) for number in range(3)]
    assert run_ranks({"dp": 2}, run) == [[(*place, 8 if place[2] else 0) for place in places]] * 2


def test_set_epoch_is_forwarded_and_epochs_follow_one_another() -> None:
    class Epochs:
        def __init__(self, rank: int) -> None:
            self.rank, self.epoch = rank, -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            return iter(rounds(self.rank, [1 + self.epoch] * 3, 1))

    scene = ExternalScene(Epochs, bins=1)

    def run(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            found = [[samples_of(batch)[0][2] for batch in loader] for _ in range(2)]
            loader.set_epoch(6)
            found.append([samples_of(batch)[0][2] for batch in loader])
            loader.set_epoch(6)
            return [*found, list(loader)]

    assert run_ranks({"dp": 2}, run) == [[[1] * 3, [2] * 3, [7] * 3, []]] * 2


def test_an_epoch_without_a_step_is_an_error() -> None:
    scene = ExternalScene(lambda rank: iter(rounds(rank, [1])))

    def run(mesh: Any) -> str:
        loader = scene.loader(mesh)
        assert len(list(loader)) == 1
        with pytest.raises(DataPlaneError, match="gone through once") as caught:
            list(loader)
        loader.close(caught.value)
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert texts[0] == texts[1]


def test_nothing_is_touched_before_the_first_batch() -> None:
    touched: list[str] = []

    class Watched:
        def __iter__(self) -> Iterator[Any]:
            touched.append("iter")
            return iter(rounds(0, [1]))

        def state_dict(self) -> dict[str, Any]:
            touched.append("state_dict")
            return {}

        def load_state_dict(self, state: Any) -> None:
            touched.append("load")

    def run(mesh: Any) -> None:
        with ExternalScene(lambda rank: Watched()).loader(mesh) as loader:
            loader.load_state_dict(loader.state_dict())
            assert touched == []
            next(loader)
            assert touched[0] == "iter"

    run_ranks({"dp": 1}, run)
